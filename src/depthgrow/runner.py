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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from depthgrow.architecture import Architecture
from depthgrow.checkpoint import Checkpoint, latest_checkpoint
from depthgrow.config import to_dict
from depthgrow.data.baselines import baselines
from depthgrow.evaluate import Evaluation
from depthgrow.files import UserError, read_done, read_json, start_step, write_json
from depthgrow.ledger import Flops
from depthgrow.metrics import event_writer
from depthgrow.parallel import on_first, on_first_held, sharded
from depthgrow.plugins import ran, run_file
from depthgrow.prepare import Prepared, cores, prepare
from depthgrow.runtime import STOP_SIGNALS, Listener, Paths, Stop, Stopped, Work
from depthgrow.study import Facts, Node, Study, Tree, Workspace, plan_tree, with_absolute_paths
from depthgrow.teacher.sources import resolve_teacher
from depthgrow.trainer import Diverged, run_phase


def run_study(study: Study, root: Path, *, stop: Stop, listener: Listener) -> list[str]:
    """Run what is missing of a study's tree in folder ``root``. Returns the labels of the phases that have diverged: those
    end where they did, what would go on from them is not run, and everything else is.

    Raises:
        UserError: a mistake the message explains. Stopped: a signal came; the next call goes on from there.
    """
    workspace, study = Workspace(root), with_absolute_paths(study)
    on_first(lambda: workspace.claim(study))
    if study.train.tensorboard:
        event_writer()  # if it is missing, say so before the work and not after
    with on_first_held(workspace.locked):
        prepared = prepare(study, listener, stop)
        tree = plan_tree(study, prepared.facts)
        on_first(lambda: workspace.record(study, tree, prepared.facts))
        on_first(lambda: write_json(root / "data.json", prepared.tokens.info))
        prepared.fill(study, stop, listener)
        if on_first(lambda: not (root / "teacher.json").exists()):
            evaluation = prepared.evaluate_teacher(study)
            on_first(lambda: _record_teacher(study, prepared, evaluation, root))
        on_first(lambda: _record_baselines(study, prepared, root))
        states = on_first(lambda: {key: workspace.state(key) for key in tree.nodes})
        lost = _behind({key for key, state in states.items() if state == "diverged"}, tree)
        missing = [node for key, node in tree.nodes.items() if states[key] != "done" and key not in lost]
        named = sum(len(node.users) for node in tree.nodes.values())
        jobs = 1 if sharded() else min(study.train.jobs or cores(study, prepared.device), len(missing))
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
            _run_in_turn(study, workspace, tree, missing, prepared, stop, listener)
        return on_first(lambda: [n.run.label for n in tree.nodes.values() if workspace.state(n.key) == "diverged"])


def _behind(diverged: set[str], tree: Tree) -> set[str]:
    """The keys of ``diverged`` and of all nodes that go on from one of them."""
    lost = set(diverged)
    for node in tree.nodes.values():  # parents first
        if node.parent in lost:
            lost.add(node.key)
    return lost


def _run_in_turn(
    study: Study,
    workspace: Workspace,
    tree: Tree,
    missing: list[Node],
    prepared: Prepared,
    stop: Stop,
    listener: Listener,
) -> None:
    lost: set[str] = set()
    for node in missing:
        if node.parent in lost:
            lost.add(node.key)
        elif _run_node(study, workspace, node, prepared, stop, listener):
            on_first(partial(_tell_finished_seeds, workspace, tree, node, listener))
        else:
            lost.add(node.key)


def _announce(workspace: Workspace, tree: Tree, missing: list[Node], arch: Architecture, listener: Listener) -> None:
    paths: Paths = {}
    for (arm, seed), keys in tree.paths.items():
        paths.setdefault(arm, {})[str(seed)] = [tree.nodes[key].run.label for key in keys]
    left = {node.run.label: _work(workspace, node, arch) for node in missing}
    states = {node.run.label: workspace.state(node.key) for node in tree.nodes.values()}
    listener.begin(left, paths, states)


def _work(workspace: Workspace, node: Node, arch: Architecture) -> Work:
    """A step's cost in forward passes of one layer: three per layer, and the head's four products."""
    flops = Flops.of(arch)
    layers = node.run.phase.active * node.run.student.layers_per_block
    cost = 3 * layers + 4 * flops.head_per_token / flops.layer_per_token
    return Work(cost, start_step(workspace.node(node.key)), node.run.phase.steps)


def _run_node(
    study: Study, workspace: Workspace, node: Node, prepared: Prepared, stop: Stop, listener: Listener
) -> bool:
    """Whether the phase was trained to its end; not where it diverged."""
    folder, before = workspace.node(node.key), node.parent
    folder.mkdir(parents=True, exist_ok=True)
    parent = None if before is None else on_first(lambda: final_checkpoint(workspace.node(before)))
    try:
        run_phase(node.run, prepared.materials(study, node.run.seed), folder, parent, stop=stop, listener=listener)
    except Diverged:
        return False
    return True


def final_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint of a finished node's last step.

    Raises:
        UserError: it is not there, or damaged: an older one is another student.
    """
    checkpoint = latest_checkpoint(folder / "checkpoints")
    steps = read_done(folder)["steps"]
    if checkpoint is None or checkpoint.step != steps:
        raise UserError(
            f"{folder} has no whole checkpoint of its last step {steps}; delete the folder to train it again"
        )
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


def _start_worker(study: Study, root: Path, facts: Facts, queue: Any, event: Any, files: list[Path]) -> None:
    for number in STOP_SIGNALS:  # a terminal signals the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    _worker.update(study=study, workspace=Workspace(root), relay=_Relay(queue, event), facts=facts)
    try:
        for path in files:  # what a recipe registers must be known here, too
            run_file(path)
        _worker["prepared"] = prepare(study, _Quiet(queue, event))
    except Exception as error:  # raised from here it would only be told as a broken pool
        _worker["failed"] = error


def _work_on(node: Node) -> bool:
    if "failed" in _worker:
        raise _worker["failed"]
    if _worker["prepared"].facts != _worker["facts"]:
        raise UserError("teacher or text changed while the study was starting; run the command again")
    return _run_node(
        _worker["study"], _worker["workspace"], node, _worker["prepared"], _worker["relay"], _worker["relay"]
    )


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
    running: dict[Future[bool], Node] = {}
    errors: list[BaseException] = []
    initial = (study, workspace.root, facts, queue, event, list(ran))
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
                    if error is not None:
                        errors.append(error)
                    elif future.result():
                        _tell_finished_seeds(workspace, tree, node, listener)
                    else:
                        for key in _behind({node.key}, tree):
                            waiting.pop(key, None)
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
