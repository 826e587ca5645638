"""A study: arms as lists of phases, folded into a tree whose nodes are computed once and kept by fingerprint.

DIR/study.json          the resolved config, arms and seeds, and which nodes each arm goes through
DIR/teacher.json        the teacher: source, shapes, hash, held-out CE, provenance
DIR/data.json           the corpora: source, licence, counts, hashes
DIR/nodes/KEY/          one phase: config, environment, metrics.jsonl, eval/, checkpoints/, done.json at its end
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from depthgrow.config import fields_of, fingerprint, from_dict, require_finite, to_dict
from depthgrow.curriculum import CURRICULA, Phase, canonical, data_start, schedule_position
from depthgrow.data.documents import absolute_spec
from depthgrow.data.tokens import DataConfig
from depthgrow.files import UserError, as_path, locked, node_state, read_json, read_study, sweep, unknown, write_json
from depthgrow.head_loss import ObjectiveConfig
from depthgrow.interventions import INTERVENTIONS, SCALED
from depthgrow.optim import OptimConfig
from depthgrow.phase import PhaseRun, TrainConfig
from depthgrow.runtime import torch_dtype
from depthgrow.student import PLACEMENTS, StudentConfig
from depthgrow.teacher.sources import absolute_source

TARGETS = ("auto", "hidden", "topk", "live")


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """source: 'laptop' (ships with the package), 'smollm2' (see `depthgrow prepare`), a local folder or a hub name;
    dtype: what it computes and what the cache keeps; targets: 'hidden' (every document once, its hidden states kept on
    disk: exact), 'topk' (the ``top`` most probable tokens kept: smaller where the hidden size is large, not exact), 'live'
    (at every step anew, no disk) or 'auto' (hidden where half the free disk holds it, else live); cache_dir: where cached
    targets lie (None: the user's cache folder)."""

    source: str = "laptop"
    dtype: str = "float32"
    targets: str = "auto"
    top: int = 64
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        torch_dtype(self.dtype)
        if self.targets == "cache":  # its name in studies of earlier versions
            object.__setattr__(self, "targets", "hidden")
        if self.targets not in TARGETS:
            raise unknown("teacher.targets", self.targets, TARGETS)
        if self.top < 1:
            raise UserError(f"teacher.top={self.top} must be at least 1")

    @property
    def kept(self) -> int:
        """Most probable tokens that the training targets are cut to; 0 where they are exact."""
        return self.top if self.targets == "topk" else 0


@dataclass(frozen=True, kw_only=True)
class Study:
    """A complete study.

    arms: named placement-curriculum, then +intervention or +reinit where wanted (see `parse_arm`); seeds: how many, from
    ``seed`` on, paired across arms in initialisation and data order; verdict: whether the report draws conclusions: not
    where phases are too short for that.
    """

    name: str
    arms: tuple[str, ...] = ("pre-joint", "post-joint", "pre-grow", "post-grow")
    seeds: int = 1
    seed: int = 42
    verdict: bool = True
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
        require_finite(self)
        twice = sorted({arm for arm in self.arms if self.arms.count(arm) > 1})
        if twice:
            raise UserError(f"arms names {twice[0]!r} twice; name each arm once")
        for arm in self.arms:
            parse_arm(arm)
        warmup, steps = self.optim.warmup_steps, self.train.steps_per_phase
        if warmup is not None and warmup >= steps:
            raise UserError(f"optim.warmup_steps={warmup} must be less than train.steps_per_phase={steps}; lower it")
        for arm in self.arms:
            phases = self.phases(arm)
            shortest = min(schedule_position(phases, i)[1] for i in range(len(phases)))
            if warmup is not None and warmup >= shortest:
                raise UserError(
                    f"optim.warmup_steps={warmup} would outlast a phase of {arm} ({shortest} steps); lower it"
                )
        if self.teacher.kept and self.objective.tau != 1.0:
            raise UserError(f"objective.tau={self.objective.tau} needs exact targets: --teacher.targets hidden or live")
        if self.shard_documents < self.train.batch_documents:
            raise UserError(
                f"data.shard_documents={self.shard_documents} is less than train.batch_documents="
                f"{self.train.batch_documents}; raise it"
            )

    @property
    def shard_documents(self) -> int:
        """Documents of the fixed shard: one phase's worth unless the config says otherwise."""
        whole_phase = self.train.batch_documents * self.train.steps_per_phase
        return whole_phase if self.data.shard_documents is None else self.data.shard_documents

    def phases(self, arm: str) -> list[Phase]:
        named = parse_arm(arm)
        total = () if named.steps is None else (named.steps,)
        return canonical(CURRICULA[named.curriculum](self.student.num_blocks, self.train.steps_per_phase, *total))

    def num_shards(self) -> int:
        """Shards that the arms read: 1, and one more for each phase on fresh data."""
        phases = [self.phases(arm) for arm in self.arms]
        return 1 + max(data_start(p, len(p) - 1).shard for p in phases)


def with_absolute_paths(study: Study) -> Study:
    """The study with its folders as they are from everywhere, so that commands called elsewhere find what it was made with."""
    cache = study.teacher.cache_dir
    teacher = replace(
        study.teacher,
        source=absolute_source(study.teacher.source),
        cache_dir=None if cache is None else str(as_path(cache).absolute()),
    )
    data = replace(study.data, corpora=tuple(absolute_spec(spec) for spec in study.data.corpora))
    return replace(study, teacher=teacher, data=data)


REINIT = 1_000_003  # from a seed to the seed of another initial draw; far from every study's own seeds


@dataclass(frozen=True)
class Arm:
    """The choices an arm is named by. steps: of a joint-long that is to match another arm; reinit: another initial draw."""

    placement: str
    curriculum: str
    steps: int | None
    intervention: str | None
    reinit: bool


def parse_arm(name: str) -> Arm:
    """placement-curriculum, then what sets the arm apart:

    'post-grow'; 'pre-grow+forward-norm' (an intervention at block boundaries); 'pre-grow+reinit' (another initial draw on
    the same data: the noise floor); 'post-joint-long@700' (700 steps instead of its default number, see `ledger`).

    Raises:
        UserError: no such arm; the nearest name is suggested.
    """
    base, *extras = name.split("+")
    placement, _, curriculum = base.partition("-")
    curriculum, at, steps = curriculum.partition("@")
    if at and not (curriculum == "joint-long" and steps.isdecimal() and int(steps)):
        raise UserError(f"arm {name!r}: only joint-long takes a number of steps, written joint-long@700")
    interventions = [extra for extra in extras if extra != "reinit"]
    if placement not in PLACEMENTS or curriculum not in CURRICULA:
        raise unknown("arm", base, [f"{p}-{c}" for p in PLACEMENTS for c in CURRICULA])
    for intervention in interventions:
        if intervention not in INTERVENTIONS:
            raise unknown("intervention", intervention, [*INTERVENTIONS, "reinit"])
    if len(interventions) > 1 or "reinit" in extras[:-1]:
        raise UserError(f"arm {name!r}: at most one intervention, then +reinit at most once")
    return Arm(placement, curriculum, int(steps) if at else None, next(iter(interventions), None), "reinit" in extras)


@dataclass(frozen=True)
class Facts:
    """What the fingerprints need to know of teacher, text and machine, found by looking at them, not at their names.

    teacher: hash of shapes and weights; shards, held_out: hashes of token ids; device: 'cpu' or 'cuda'; classes: hash of
    which tokens are special and which are delimiters.
    """

    teacher: str
    shards: tuple[str, ...]
    held_out: str
    device: str
    classes: str = ""


@dataclass
class Node:
    """One phase of the tree: the run, its parent's key, and the (arm, seed) pairs that go through it."""

    key: str
    parent: str | None
    run: PhaseRun
    users: list[tuple[str, int]]

    @property
    def first_seed(self) -> int:
        return min(seed for _, seed in self.users)


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
    named = parse_arm(arm)
    # with one block there is no boundary to intervene at: the phase is the plain arm's
    intervention = named.intervention if phases[index].active > 1 else None
    prefix = phases[: index + 1]
    schedule = schedule_position(phases, index)
    init_seed = seed + REINIT if named.reinit else seed
    run_facts = {
        "placement": named.placement,
        "intervention": intervention,
        "seed": seed,
        "init_seed": init_seed,
        "phases": [{name.removeprefix("phase."): v for name, v in _told(p, "phase.").items()} for p in prefix],
        "schedule": list(schedule),
        "shards": list(facts.shards[: data_start(phases, index).shard + 1]),
    }
    identity = identity_of(study, facts, run_facts)
    label = f"{arm} phase {index + 1}/{len(phases)}" + (f" seed {seed}" if study.seeds > 1 else "")
    return PhaseRun(
        label=label,
        placement=named.placement,
        intervention=intervention,
        student=study.student,
        objective=study.objective,
        optim=study.optim,
        train=study.train,
        seed=seed,
        init_seed=init_seed,
        phases=prefix,
        schedule=schedule,
        identity=identity,
    )


# Fields that may differ between two calls on one study folder: they change what is run, where, or what is written beside
# it, not a weight. Sources are not compared by name: what is found there decides (see `Facts`).
FREE_FIELDS = (
    "arms",
    "data.corpora",
    "seeds",
    "teacher.cache_dir",
    "teacher.source",
    "teacher.targets",
    "train.checkpoint_every",
    "train.compile",
    "train.device",
    "train.eval_every",
    "train.jobs",
    "train.log_every",
    "train.recompute",
    "train.tensorboard",
    "verdict",
)

# Fields that decide a node's content through something else that is in its key: a resolved value, a hash, its phases.
RESOLVED_FIELDS = (
    "data.end_token",  # data: hashes of the token ids
    "data.held_out_documents",
    "data.max_tokens",
    "data.min_tokens",
    "data.near_duplicates",
    "data.shard_documents",  # None stands for a phase's worth
    "data.start_token",
    "name",
    "seed",
    "student.boundary_scale",  # only interventions that set a scale
    "student.num_blocks",  # phases
    "teacher.top",  # only where targets are cut to the most probable tokens
    "train.steps_per_phase",  # phases
)

# Fields that came after the key's format was settled, with the value that stands for what was done before: there they
# are left out, so that finished studies keep their keys. A field's default may change later; this value may not.
LATER_FIELDS: dict[str, Any] = {}


def _told(config: Any, prefix: str = "") -> dict[str, Any]:
    """A config's fields as the key holds them."""
    return {
        name: value
        for name, value in fields_of(config, prefix)
        if not (name in LATER_FIELDS and LATER_FIELDS[name] == value)
    }


def identity_of(study: Study, facts: Facts, run: dict[str, Any]) -> dict[str, Any]:
    """Everything that decides what a node holds at its end: its key is the fingerprint of this.

    Args:
        run: what the arm, its seed and its phases say.
    """
    ignored = {*FREE_FIELDS, *RESOLVED_FIELDS}
    identity: dict[str, Any] = {
        "format": 3,
        "run": run,
        "teacher": facts.teacher,
        "held_out": facts.held_out,
        "classes": facts.classes,
        "device": facts.device,
        "shard_documents": study.shard_documents,
        "fields": {name: value for name, value in _told(study).items() if name not in ignored},
    }
    if study.teacher.kept:
        identity["teacher_top"] = study.teacher.kept
    if run["intervention"] in SCALED:
        identity["boundary_scale"] = study.student.boundary_scale
    return json.loads(json.dumps(identity))


WORDS = {"held_out": "held-out set", "shards": "training text", "classes": "tokenizer"}


class Workspace:
    """A study's folder: where nodes lie, what is done, and that two processes do not write it at once."""

    def __init__(self, root: Path):
        self.root = root

    def node(self, key: str) -> Path:
        return self.root / "nodes" / key

    def state(self, key: str) -> str:
        """'done', 'diverged', 'started' or 'missing' (see `depthgrow.files.node_state`)."""
        return node_state(self.node(key))

    def is_done(self, key: str) -> bool:
        return self.state(key) == "done"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes here inside; what a killed process left half written is removed first."""
        with locked(self.root / ".lock", f"{self.root} is in use by another depthgrow process; wait for it or stop it"):
            for folder in (self.root, *self.root.glob("nodes/*"), *self.root.glob("nodes/*/*")):
                sweep(folder)
            yield

    def claim(self, study: Study) -> None:
        """Refuse a folder made with another config. Other arms and more seeds of the same study are welcome."""
        path = self.root / "study.json"
        if path.exists():
            earlier = from_dict(Study, read_json(path)["config"])
            theirs = dict(fields_of(earlier))
            if earlier.teacher.kept != study.teacher.kept:
                raise UserError(
                    f"{self.root} was made with teacher.targets={earlier.teacher.targets!r}, now it is "
                    f"{study.teacher.targets!r}, of which one is not exact; choose another --out or keep the value"
                )
            for name, value in fields_of(study):
                if name not in FREE_FIELDS and theirs[name] != value:
                    raise UserError(
                        f"{self.root} was made with {name}={theirs[name]!r}, now it is {value!r}; "
                        "choose another --out or keep the value"
                    )

    def require_same(self, facts: Facts) -> dict[str, Any]:
        """Refuse teacher, documents or device other than those that the folder was made with; returns study.json or {}.

        Raises:
            UserError: naming what differs.
        """
        path = self.root / "study.json"
        if not path.exists():
            return {}
        earlier, now = read_json(path), json.loads(json.dumps(asdict(facts)))
        for name, value in earlier["facts"].items():
            shared = min(len(value), len(now[name]))
            if value[:shared] != now[name][:shared]:
                raise UserError(
                    f"{self.root} was made with another {WORDS.get(name, name)} ({value}) than is found now "
                    f"({now[name]}): results could not be compared with what is there; choose another --out, or bring "
                    "back what it was made with"
                )
        return earlier

    def record(self, study: Study, tree: Tree, facts: Facts) -> None:
        """Write study.json; arms and seeds of earlier calls stay in it.

        Raises:
            UserError: those were made with another teacher, other documents or on another kind of device.
        """
        earlier = self.require_same(facts)
        now = json.loads(json.dumps(asdict(facts)))
        arms: dict[str, dict[str, list[str]]] = {}
        if earlier:
            arms = earlier["arms"]
            now["shards"] = max(now["shards"], earlier["facts"]["shards"], key=len)
        for (arm, seed), keys in tree.paths.items():
            arms.setdefault(arm, {})[str(seed)] = keys
        whole = replace(study, arms=tuple(arms), seeds=max(len(seeds) for seeds in arms.values()))
        write_json(self.root / "study.json", {"format": 1, "config": to_dict(whole), "facts": now, "arms": arms})


def load_study(root: Path) -> tuple[Study, dict[str, dict[str, list[str]]]]:
    """The config of a study folder and ``{arm: {seed: [node keys]}}``.

    Raises:
        UserError: the folder holds no study.
    """
    record = read_study(root)
    return from_dict(Study, record["config"]), record["arms"]
