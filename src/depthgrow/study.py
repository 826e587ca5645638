"""A study: arms as lists of phases, folded into a tree whose nodes are computed once and kept by fingerprint.

DIR/study.json          the resolved config, arms and seeds, and which nodes each arm goes through
DIR/teacher.json        the teacher: source, shapes, hash, held-out CE, provenance
DIR/data.json           the corpora: source, licence, counts, hashes
DIR/nodes/KEY/          one phase: config, environment, metrics.jsonl, eval/, checkpoints/, done.json when done
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from depthgrow.architecture import Architecture
from depthgrow.checkpoint import Checkpoint, latest_checkpoint
from depthgrow.config import fields_of, fingerprint, from_dict, to_dict
from depthgrow.curriculum import CURRICULA, Phase, canonical, data_start, schedule_position
from depthgrow.data.batches import Batches, MicroBatch
from depthgrow.data.tokens import DataConfig, TokenSet, prepare_tokens
from depthgrow.evaluate import Evaluation, evaluate
from depthgrow.files import UserError, cache_root, read_json, unknown, write_json
from depthgrow.head_loss import ObjectiveConfig, TeacherTargets
from depthgrow.ledger import Flops
from depthgrow.optim import OptimConfig
from depthgrow.runtime import StopSignal, pick_device, torch_dtype
from depthgrow.student import PLACEMENTS, StudentConfig
from depthgrow.teacher.cache import TargetCache, open_cache
from depthgrow.teacher.live import LiveTeacher
from depthgrow.teacher.sources import resolve_teacher
from depthgrow.trainer import Listener, Materials, PhaseRun, TrainConfig, run_phase


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """source: 'laptop' (ships with the package), 'smollm2' (see `depthgrow prepare`), a local folder or a hub name;
    dtype: what it computes and what the cache keeps; cache_dir: where its targets lie (None: the user's cache folder)."""

    source: str = "laptop"
    dtype: str = "float32"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        torch_dtype(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A complete study. Arms are named placement-curriculum; seeds are seed, seed+1, .., paired across arms."""

    name: str
    arms: tuple[str, ...] = ("pre-joint", "post-joint", "pre-grow", "post-grow")
    seeds: int = 1
    seed: int = 42
    student: StudentConfig = field(default_factory=StudentConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not self.arms:
            raise UserError("arms is empty; name at least one, for example --arms pre-grow")
        if self.seeds < 1:
            raise UserError(f"seeds={self.seeds} must be at least 1")
        for arm in self.arms:
            parse_arm(arm)

    @property
    def shard_documents(self) -> int:
        """Documents of the fixed shard: one phase's worth unless the config says otherwise."""
        return self.data.shard_documents or self.train.batch_documents * self.train.steps_per_phase

    def phases(self, arm: str) -> list[Phase]:
        _, curriculum = parse_arm(arm)
        return canonical(CURRICULA[curriculum](self.student.num_blocks, self.train.steps_per_phase))

    def num_shards(self) -> int:
        """Shards that the arms read: 1, and one more for each phase on fresh data."""
        phases = [self.phases(arm) for arm in self.arms]
        return 1 + max(data_start(p, len(p) - 1).shard for p in phases)


def parse_arm(name: str) -> tuple[str, str]:
    """'post-grow' -> ('post', 'grow').

    Raises:
        UserError: no such arm; the nearest name is suggested.
    """
    placement, _, curriculum = name.partition("-")
    if placement not in PLACEMENTS or curriculum not in CURRICULA:
        raise unknown("arm", name, [f"{p}-{c}" for p in PLACEMENTS for c in CURRICULA])
    return placement, curriculum


@dataclass(frozen=True)
class Facts:
    """What the fingerprints need to know of teacher and text."""

    teacher: str
    shards: tuple[str, ...]
    held_out: str


@dataclass
class Node:
    """One phase of the tree: the run, its parent's key, and the (arm, seed) pairs that go through it."""

    key: str
    parent: str | None
    run: PhaseRun
    users: list[tuple[str, int]]


@dataclass(frozen=True)
class Tree:
    """Nodes in an order that runs parents first, and each (arm, seed)'s path of keys."""

    nodes: dict[str, Node]
    paths: dict[tuple[str, int], list[str]]


def plan_tree(study: Study, facts: Facts) -> Tree:
    """Fold the arms of a study into a tree. Equal prefixes get equal keys, hence one node."""
    tree = Tree({}, {})
    for seed in range(study.seed, study.seed + study.seeds):
        for arm in study.arms:
            phases = study.phases(arm)
            path = tree.paths[arm, seed] = []
            for index in range(len(phases)):
                run = _phase_run(study, facts, arm, seed, phases, index)
                key = fingerprint(run.identity)
                node = tree.nodes.setdefault(key, Node(key, path[-1] if path else None, run, []))
                node.users.append((arm, seed))
                path.append(key)
    return tree


def _phase_run(study: Study, facts: Facts, arm: str, seed: int, phases: list[Phase], index: int) -> PhaseRun:
    placement, _ = parse_arm(arm)
    student = replace(study.student, placement=placement)
    prefix = phases[: index + 1]
    shards = facts.shards[: data_start(phases, index).shard + 1]
    schedule = schedule_position(phases, index)
    train = study.train
    identity = {
        "format": 1,
        "student": {k: v for k, v in to_dict(student).items() if k != "num_blocks"},
        "teacher": facts.teacher,
        "data": {"shards": list(shards), "shard_documents": study.shard_documents, "held_out": facts.held_out},
        "objective": to_dict(study.objective),
        "optim": to_dict(study.optim),
        "numerics": {
            "batch_documents": train.batch_documents,
            "micro_tokens": train.micro_tokens,
            "dtype": train.dtype,
            "teacher_dtype": study.teacher.dtype,
            "eval_every": train.eval_every,
        },
        "seed": seed,
        "phases": [asdict(phase) for phase in prefix],
        "schedule": list(schedule),
    }
    label = f"{arm} phase {index + 1}/{len(phases)}" + (f" seed {seed}" if study.seeds > 1 else "")
    return PhaseRun(
        label=label,
        student=student,
        objective=study.objective,
        optim=study.optim,
        train=train,
        seed=seed,
        phases=prefix,
        schedule=schedule,
        identity=identity,
    )


class Workspace:
    """A study's folder: where nodes lie, what is done, and that two processes do not write it at once."""

    def __init__(self, root: Path):
        self.root = root

    def node(self, key: str) -> Path:
        return self.root / "nodes" / key

    def is_done(self, key: str) -> bool:
        return (self.node(key) / "done.json").exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{self.root} is in use by another depthgrow process; wait for it or stop it") from None
            yield

    def claim(self, study: Study) -> None:
        """Refuse a folder made with another config. Other arms and more seeds of the same study are welcome."""
        path = self.root / "study.json"
        if path.exists():
            theirs = dict(fields_of(from_dict(Study, read_json(path)["config"])))
            for name, value in fields_of(study):
                if name not in ("arms", "seeds", "train.device", "teacher.cache_dir") and theirs[name] != value:
                    raise UserError(
                        f"{self.root} was made with {name}={theirs[name]!r}, now it is {value!r}; "
                        "choose another --out or keep the value"
                    )

    def record(self, study: Study, tree: Tree) -> None:
        """Write study.json; arms and seeds of earlier calls stay in it."""
        path = self.root / "study.json"
        arms: dict[str, dict[str, list[str]]] = read_json(path)["arms"] if path.exists() else {}
        for (arm, seed), keys in tree.paths.items():
            arms.setdefault(arm, {})[str(seed)] = keys
        write_json(path, {"format": 1, "config": to_dict(study), "arms": arms})


def load_study(root: Path) -> tuple[Study, dict[str, dict[str, list[str]]]]:
    """The config of a study folder and ``{arm: {seed: [node keys]}}``.

    Raises:
        UserError: the folder holds no study.
    """
    path = root / "study.json"
    if not path.exists():
        raise UserError(f"{root} holds no study (no study.json); run: depthgrow study RECIPE --out {root}")
    record = read_json(path)
    return from_dict(Study, record["config"]), record["arms"]


@dataclass
class Prepared:
    """Teacher, text and targets of a study, ready to train on; ``facts`` go into fingerprints."""

    teacher: LiveTeacher
    tokens: TokenSet
    shards: list[TargetCache]
    held_out: TargetCache
    facts: Facts
    device: torch.device

    def fill(self, study: Study, stop: StopSignal, listener: Listener) -> None:
        """Let the teacher see every document once, unless the cache has it already."""
        names = ["held-out documents", *(f"shard {i}" for i in range(len(self.shards)))]
        for name, cache in zip(names, [self.held_out, *self.shards], strict=True):
            if cache.missing:
                listener.note(f"teacher targets of the {name}: {cache.hidden.nbytes / 2**20:.0f} MiB in {cache.folder}")

                def progress(done: int, total: int, name: str = name) -> None:
                    listener.progress(f"teacher targets, {name}", done, total, {})

                cache.fill(self.teacher, study.train.micro_tokens, self.device, stop, progress)

    def materials(self, study: Study, seed: int) -> Materials:
        size = study.shard_documents

        def train_targets(batch: MicroBatch) -> TeacherTargets:
            return self.shards[batch.document_ids[0] // size].targets(batch)

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
            batches=batches,
            held_out=self.tokens.held_out,
            train_targets=train_targets,
            held_out_targets=self.held_out.targets,
        )

    def evaluate_teacher(self, study: Study) -> Evaluation:
        """The teacher's own CE on the held-out documents, from its cached hidden states."""
        return evaluate(
            lambda batch: self.held_out.targets(batch).hidden_ND,
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
    for problem in tokens.info["skipped_files"][:5]:
        listener.note(f"skipped {problem}")
    if len(tokens.info["skipped_files"]) > 5:
        listener.note(f"skipped {len(tokens.info['skipped_files'])} files in all, named in data.json")
    root = Path(study.teacher.cache_dir) if study.teacher.cache_dir else cache_root()
    shards = [
        open_cache(root, teacher, tokens.train.part(i * size, (i + 1) * size), dtype, first=i * size)
        for i in range(count)
    ]
    held_out = open_cache(root, teacher, tokens.held_out, dtype)
    facts = Facts(
        teacher=teacher.identity["weights"],
        shards=tuple(shard.documents.content_hash for shard in shards),
        held_out=tokens.held_out.content_hash,
    )
    return Prepared(teacher, tokens, shards, held_out, facts, device)


def run_study(study: Study, root: Path, *, stop: StopSignal, listener: Listener) -> None:
    """Run what is missing of a study's tree in folder ``root``.

    Raises:
        UserError: a mistake the message explains. Stopped: a signal came; the next call goes on from there.
    """
    workspace = Workspace(root)
    workspace.claim(study)
    with workspace.locked():
        prepared = prepare(study, listener)
        tree = plan_tree(study, prepared.facts)
        workspace.record(study, tree)
        write_json(root / "data.json", prepared.tokens.info)
        prepared.fill(study, stop, listener)
        _record_teacher(study, prepared, root)
        missing = [node for node in tree.nodes.values() if not workspace.is_done(node.key)]
        named = sum(len(node.users) for node in tree.nodes.values())
        listener.note(
            f"{len(study.arms)} arms, {named} phases, {len(tree.nodes)} of them distinct, {len(missing)} left to run"
        )
        listener.begin(*_work(missing, prepared.teacher.arch))
        for node in missing:
            folder = workspace.node(node.key)
            folder.mkdir(parents=True, exist_ok=True)
            parent = None if node.parent is None else _finished(workspace, node.parent)
            materials = prepared.materials(study, node.run.seed)
            run_phase(node.run, materials, folder, parent, stop=stop, listener=listener)


def _work(nodes: list[Node], arch: Architecture) -> tuple[dict[str, float], dict[str, int]]:
    """Cost of a step (in forward-layer equivalents) and number of steps of each phase, for the time left."""
    flops = Flops.of(arch)
    head = 4 * flops.head_per_token / flops.layer_per_token
    costs = {n.run.label: 3 * n.run.phase.active * n.run.student.layers_per_block + head for n in nodes}
    return costs, {n.run.label: n.run.phase.steps for n in nodes}


def _finished(workspace: Workspace, key: str) -> Checkpoint:
    folder = workspace.node(key)
    checkpoint = latest_checkpoint(folder / "checkpoints")
    steps = read_json(folder / "done.json")["steps"]
    if checkpoint is None or checkpoint.step != steps:
        raise UserError(f"{folder} has no checkpoint of its last step {steps}; delete the folder to train it again")
    return checkpoint


def _record_teacher(study: Study, prepared: Prepared, root: Path) -> None:
    path = root / "teacher.json"
    if path.exists():
        return
    teacher = prepared.teacher
    result = prepared.evaluate_teacher(study)
    result.save(root / "teacher_eval.npz")
    write_json(
        path,
        {
            "source": study.teacher.source,
            "weights_hash": teacher.identity["weights"],
            "architecture": to_dict(teacher.arch),
            "parameters": sum(p.numel() for p in teacher.model.parameters()),
            "held_out": result.summary(),
            "provenance": _provenance(study.teacher.source),
        },
    )


def _provenance(source: str) -> dict[str, Any] | None:
    path = Path(resolve_teacher(source)) / "provenance.json"
    return read_json(path) if path.exists() else None
