"""Running a study: teacher and text made ready, then the tree's missing nodes, side by side where cores allow."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from depthgrow.architecture import Architecture
from depthgrow.checkpoint import Checkpoint, latest_checkpoint
from depthgrow.config import to_dict
from depthgrow.data.baselines import baselines
from depthgrow.data.batches import Batches, MicroBatch
from depthgrow.data.tokens import TokenSet, prepare_tokens
from depthgrow.evaluate import Evaluation, evaluate
from depthgrow.files import UserError, cache_root, read_json, start_step, write_json
from depthgrow.head_loss import TeacherTargets, TopTargets
from depthgrow.ledger import Flops
from depthgrow.metrics import event_writer
from depthgrow.parallel import on_first, on_first_held, sharded
from depthgrow.runtime import Listener, Paths, Stop, Stopped, Work, num_cores, pick_device, torch_dtype
from depthgrow.study import Facts, Node, Study, Tree, Workspace, plan_tree
from depthgrow.teacher.cache import Rows, TargetCache, is_begun, open_cache, pick_live, row_bytes
from depthgrow.teacher.live import LiveTeacher
from depthgrow.teacher.sources import resolve_teacher
from depthgrow.trainer import Materials, run_phase


@dataclass
class Prepared:
    """Teacher, text and targets of a study, ready to train on; ``facts`` go into fingerprints."""

    teacher: LiveTeacher
    tokens: TokenSet
    shards: list[TargetCache] | None
    held_out: TargetCache | None
    facts: Facts
    device: torch.device

    def fill(self, study: Study, stop: Stop, listener: Listener) -> None:
        """Let the teacher see every document once, unless the cache has it already or it stays live."""
        if self.shards is None or self.held_out is None:
            return
        names = ["held-out documents", *(f"shard {i}" for i in range(len(self.shards)))]
        for name, cache in zip(names, [self.held_out, *self.shards], strict=True):
            if on_first(partial(bool, cache.missing)):
                listener.note(f"teacher targets of the {name}: {cache.rows.nbytes / 2**20:.0f} MiB in {cache.folder}")

                def progress(done: int, total: int, name: str = name) -> None:
                    listener.progress(f"teacher targets, {name}", done, total, {})

                workers = _cores(study, self.device)
                cache.fill(stop, progress, workers=workers)

    def materials(self, study: Study, seed: int) -> Materials:
        size, shards = study.shard_documents, self.shards

        def train_targets(batch: MicroBatch) -> TeacherTargets | TopTargets:
            if shards is None:
                return self.teacher.targets(batch)
            return shards[batch.document_ids[0] // size if batch.document_ids else 0].targets(batch)

        batches = Batches(
            self.tokens.train,
            shard_documents=size,
            batch_documents=study.train.batch_documents,
            micro_tokens=study.train.micro_tokens,
            seed=seed,
        )
        return Materials(
            arch=self.teacher.arch,
            initial=self.teacher.initial,
            classes=self.teacher.classes,
            batches=batches,
            held_out=self.tokens.held_out,
            train_targets=train_targets,
            read_ahead=shards is not None,
            held_out_targets=self.held_out_targets,
        )

    def held_out_targets(self, batch: MicroBatch) -> TeacherTargets:
        """Always exact, whatever the training targets are."""
        targets = self.teacher.targets(batch) if self.held_out is None else self.held_out.targets(batch)
        assert isinstance(targets, TeacherTargets)
        return targets

    def evaluate_teacher(self, study: Study) -> Evaluation:
        """The teacher's own CE on the held-out documents."""
        return evaluate(
            lambda batch: self.held_out_targets(batch).hidden_ND,
            self.teacher.head_VD,
            self.tokens.held_out,
            None,
            micro_tokens=study.train.micro_tokens,
            device=self.device,
        )


def prepare(study: Study, listener: Listener) -> Prepared:
    """Load the teacher, tokenize the text, open the caches.

    Raises:
        UserError: teacher or corpus is missing or does not fit; the message says what to install.
    """
    device = pick_device(study.train.device)
    torch.set_num_threads(study.train.threads)
    dtype = torch_dtype(study.teacher.dtype)
    listener.note(f"loading teacher {study.teacher.source}")
    teacher = LiveTeacher.load(resolve_teacher(study.teacher.source), dtype, device)
    if study.data.max_tokens > teacher.arch.max_positions + 1:
        raise UserError(
            f"data.max_tokens={study.data.max_tokens} exceeds the teacher's {teacher.arch.max_positions} positions; lower it"
        )
    listener.note("reading " + ", ".join(study.data.corpora))
    size, count = study.shard_documents, study.num_shards()
    tokens = prepare_tokens(study.data, teacher.tokenizer, cache_root(), train_documents=size * count)
    skipped = tokens.info["skipped_files"]
    for problem in skipped[:5]:
        listener.note(f"skipped {problem}")
    if len(skipped) > 5:
        listener.note(f"skipped {len(skipped)} files in all, named in data.json")
    parts = [tokens.train.part(i * size, (i + 1) * size) for i in range(count)]
    facts = Facts(
        teacher=teacher.fingerprint,
        shards=tuple(part.content_hash for part in parts),
        held_out=tokens.held_out.content_hash,
        device=device.type,
    )
    root = Path(study.teacher.cache_dir) if study.teacher.cache_dir else cache_root()
    exact, micro = Rows(teacher, dtype), study.train.micro_tokens
    coding = replace(exact, top=study.teacher.kept)
    if study.teacher.targets == "auto":
        missing = [part for part in (*parts, tokens.held_out) if not is_begun(root, exact, part, micro)]
        needed = sum(int(part.num_targets.sum()) for part in missing) * row_bytes(teacher.arch, dtype)
        live, reason = on_first(lambda: pick_live(needed, root))
        listener.note(reason)
    if study.teacher.targets == "live" or (study.teacher.targets == "auto" and live):
        return Prepared(teacher, tokens, None, None, facts, device)
    shards = [open_cache(root, coding, part, micro, first=i * size) for i, part in enumerate(parts)]
    held_out = open_cache(root, exact, tokens.held_out, micro)
    return Prepared(teacher, tokens, shards, held_out, facts, device)


def run_study(study: Study, root: Path, *, stop: Stop, listener: Listener) -> None:
    """Run what is missing of a study's tree in folder ``root``.

    Raises:
        UserError: a mistake the message explains. Stopped: a signal came; the next call goes on from there.
    """
    workspace = Workspace(root)
    on_first(lambda: workspace.claim(study))
    if study.train.tensorboard:
        event_writer()  # if it is missing, say so before the work and not after
    with on_first_held(workspace.locked):
        prepared = prepare(study, listener)
        tree = plan_tree(study, prepared.facts)
        on_first(lambda: workspace.record(study, tree, prepared.facts))
        on_first(lambda: write_json(root / "data.json", prepared.tokens.info))
        prepared.fill(study, stop, listener)
        if on_first(lambda: not (root / "teacher.json").exists()):
            evaluation = prepared.evaluate_teacher(study)
            on_first(lambda: _record_teacher(study, prepared, evaluation, root))
        on_first(lambda: _record_baselines(study, prepared, root))
        done = on_first(lambda: {key for key in tree.nodes if workspace.is_done(key)})
        missing = [node for node in tree.nodes.values() if node.key not in done]
        named = sum(len(node.users) for node in tree.nodes.values())
        jobs = 1 if sharded() else min(study.train.jobs or _cores(study, prepared.device), len(missing))
        beside = f", {jobs} side by side" if jobs > 1 else ""
        listener.note(
            f"{len(study.arms)} arms, {named} phases, {len(tree.nodes)} of them distinct, {len(missing)} left to run{beside}"
        )
        _announce(workspace, tree, missing, prepared.teacher.arch, listener)
        if jobs > 1:
            # workers take the same targets, whatever the disk looks like by then
            picked = "live" if prepared.shards is None else study.teacher.targets.replace("auto", "hidden")
            settled = replace(study, teacher=replace(study.teacher, targets=picked))
            _run_side_by_side(settled, workspace, tree, missing, prepared.facts, jobs, stop, listener)
        else:
            for node in missing:
                _run_node(study, workspace, node, prepared, stop, listener)
                on_first(partial(_tell_finished_seeds, workspace, tree, node, listener))


def _announce(workspace: Workspace, tree: Tree, missing: list[Node], arch: Architecture, listener: Listener) -> None:
    paths: Paths = {}
    for (arm, seed), keys in tree.paths.items():
        paths.setdefault(arm, {})[str(seed)] = [tree.nodes[key].run.label for key in keys]
    left = {node.run.label: _work(workspace, node, arch) for node in missing}
    states = {node.run.label: "done" for node in tree.nodes.values() if node.run.label not in left}
    states |= {label: "started" for label, work in left.items() if work.start}
    listener.begin(left, paths, states)


def _cores(study: Study, device: torch.device) -> int:
    return 1 if device.type == "cuda" or sharded() else max(1, num_cores() // study.train.threads)


def _work(workspace: Workspace, node: Node, arch: Architecture) -> Work:
    """A step's cost in forward passes of one layer: three per layer, and the head's four products."""
    flops = Flops.of(arch)
    layers = node.run.phase.active * node.run.student.layers_per_block
    cost = 3 * layers + 4 * flops.head_per_token / flops.layer_per_token
    return Work(cost, start_step(workspace.node(node.key)), node.run.phase.steps)


def _run_node(
    study: Study, workspace: Workspace, node: Node, prepared: Prepared, stop: Stop, listener: Listener
) -> None:
    folder, before = workspace.node(node.key), node.parent
    folder.mkdir(parents=True, exist_ok=True)
    parent = None if before is None else on_first(lambda: _finished(workspace, before))
    run_phase(node.run, prepared.materials(study, node.run.seed), folder, parent, stop=stop, listener=listener)


def _finished(workspace: Workspace, key: str) -> Checkpoint:
    folder = workspace.node(key)
    checkpoint = latest_checkpoint(folder / "checkpoints")
    steps = read_json(folder / "done.json")["steps"]
    if checkpoint is None or checkpoint.step != steps:
        raise UserError(f"{folder} has no checkpoint of its last step {steps}; delete the folder to train it again")
    return checkpoint


class _Relay:
    """In a worker: sends notes and progress to the process that shows them, and hears from it when to stop."""

    def __init__(self, queue: Any, event: Any):
        self._queue, self._event = queue, event

    @property
    def requested(self) -> bool:
        return bool(self._event.is_set())

    def note(self, text: str) -> None:
        self._queue.put(("note", (text,)))

    def begin(self, work: dict[str, Work], paths: Paths, states: dict[str, str]) -> None:
        raise AssertionError("only the parent announces work")

    def progress(self, label: str, step: int, num_steps: int, values: dict[str, Any]) -> None:
        self._queue.put(("progress", (label, step, num_steps, values)))


class _Quiet(_Relay):
    """Drops notes: a worker prepares what its parent has already announced."""

    def note(self, text: str) -> None:
        pass


_worker: dict[str, Any] = {}


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed parent: leave its checkpoints as they are and the folder free for the next call


def _start_worker(study: Study, root: Path, facts: Facts, queue: Any, event: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal signals the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    _worker.update(study=study, workspace=Workspace(root), relay=_Relay(queue, event), facts=facts)
    _worker["prepared"] = prepare(study, _Quiet(queue, event))


def _work_on(node: Node) -> str:
    if _worker["prepared"].facts != _worker["facts"]:
        raise UserError("teacher or text changed while the study was starting; run the command again")
    _run_node(_worker["study"], _worker["workspace"], node, _worker["prepared"], _worker["relay"], _worker["relay"])
    return node.key


def _run_side_by_side(
    study: Study,
    workspace: Workspace,
    tree: Tree,
    missing: list[Node],
    facts: Facts,
    jobs: int,
    stop: Stop,
    listener: Listener,
) -> None:
    """Keep ``jobs`` processes busy with nodes whose parents are done: seed by seed, those with most work behind them first."""
    context = multiprocessing.get_context("spawn")
    queue, event = context.SimpleQueue(), context.Event()
    waiting = {node.key: node for node in missing}
    running: dict[Future[str], Node] = {}
    errors: list[BaseException] = []
    initial = (study, workspace.root, facts, queue, event)
    with (
        _relaying(queue, listener),
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=initial) as pool,
    ):
        try:
            while running or (waiting and not event.is_set()):
                if stop.requested or errors:
                    event.set()
                if not event.is_set():
                    busy = {node.key for node in running.values()}
                    ready = [n for n in waiting.values() if n.parent not in waiting and n.parent not in busy]
                    # a seed is finished before the next is begun, as far as there is work in it for all
                    ready.sort(key=lambda node: (node.first_seed, -_work_behind(node, waiting)))
                    for node in ready[: jobs - len(running)]:
                        running[pool.submit(_work_on, waiting.pop(node.key))] = node
                finished, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    node = running.pop(future)
                    error = future.exception()
                    if error is None:
                        _tell_finished_seeds(workspace, tree, node, listener)
                    else:
                        errors.append(error)
        finally:
            event.set()
    # what went wrong in one worker stops the others: their Stopped must not hide it
    for error in errors:
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                "a worker process died, most likely for lack of memory; run again with --train.jobs 1 to go on"
            ) from error
        if not isinstance(error, Stopped):
            raise error
    if errors or waiting:
        raise Stopped(str(errors[0]) if errors else "the study")


def _tell_finished_seeds(workspace: Workspace, tree: Tree, node: Node, listener: Listener) -> None:
    """Where ``node`` was the last of a seed, and others are left, say that its results can be read."""
    seeds = sorted({seed for _, seed in tree.paths})
    nodes = {seed: {key for (_, s), path in tree.paths.items() if s == seed for key in path} for seed in seeds}
    finished = [seed for seed in seeds if all(workspace.is_done(key) for key in nodes[seed])]
    for seed in finished if len(finished) < len(seeds) else ():
        if node.key in nodes[seed]:
            listener.note(
                f"seed {seed} is finished ({len(finished)} of {len(seeds)} seeds): `depthgrow report {workspace.root}` shows "
                "it while the others run"
            )


def _work_behind(node: Node, waiting: dict[str, Node]) -> int:
    """Layer-steps on the longest way from this node to a leaf."""
    own = node.run.phase.steps * node.run.phase.active
    return own + max((_work_behind(n, waiting) for n in waiting.values() if n.parent == node.key), default=0)


@contextmanager
def _relaying(queue: Any, listener: Listener) -> Iterator[None]:
    def relay() -> None:
        while (message := queue.get()) is not None:
            with suppress(OSError, ValueError):  # a closed terminal must not block the workers
                getattr(listener, message[0])(*message[1])

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        yield
    finally:
        queue.put(None)
        thread.join()


def _record_baselines(study: Study, prepared: Prepared, root: Path) -> None:
    """Counted on the shard that every arm reads."""
    path = root / "baselines.json"
    if not path.exists():
        shard = prepared.tokens.train.part(0, study.shard_documents)
        write_json(path, baselines(shard, prepared.tokens.held_out, prepared.teacher.arch.vocab_size))


def _record_teacher(study: Study, prepared: Prepared, evaluation: Evaluation, root: Path) -> None:
    teacher = prepared.teacher
    provenance = Path(resolve_teacher(study.teacher.source)) / "provenance.json"
    write_json(
        root / "teacher.json",
        {
            "source": study.teacher.source,
            "fingerprint": teacher.fingerprint,
            "architecture": to_dict(teacher.arch),
            "parameters": sum(p.numel() for p in teacher.model.parameters()),
            "held_out": evaluation.summary(),
            "provenance": read_json(provenance) if provenance.exists() else None,
        },
    )
