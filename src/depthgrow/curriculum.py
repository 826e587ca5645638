"""A run is a list of phases. Everything about which blocks train on which data is said here, and only here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from depthgrow.files import UserError

TRAINABLE = ("all", "newest", "newest-only")
DATA = ("continue", "rewind", "fresh")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of training with a fixed depth.

    active: blocks in the forward pass; trainable: 'all' of them, only the 'newest' (head and boundary norm go on), or the
    'newest-only' (they stay as well); steps: optimizer steps; data: 'continue' through the shard (wrapping at its end),
    'rewind' to its start, or read a 'fresh' shard; reset_optimizer / restart_lr: drop moments / begin a new schedule at
    the phase's start.
    """

    active: int
    steps: int
    trainable: str = "all"
    data: str = "continue"
    reset_optimizer: bool = True
    restart_lr: bool = True

    def __post_init__(self) -> None:
        if self.active < 1 or self.steps < 1:
            raise UserError(
                f"a phase needs at least one block and one step, got active={self.active} steps={self.steps}"
            )
        if self.trainable not in TRAINABLE:
            raise UserError(f"trainable={self.trainable!r} is not one of {', '.join(TRAINABLE)}")
        if self.data not in DATA:
            raise UserError(f"data={self.data!r} is not one of {', '.join(DATA)}")


def joint(num_blocks: int, steps: int) -> list[Phase]:
    """Full depth from the first step."""
    return [Phase(active=num_blocks, steps=steps)]


def grow(num_blocks: int, steps: int) -> list[Phase]:
    """Phase p trains the first p+1 blocks."""
    return [Phase(active=p + 1, steps=steps) for p in range(num_blocks)]


def freeze(num_blocks: int, steps: int) -> list[Phase]:
    """Grow, but finished blocks stay as they are."""
    return [Phase(active=p + 1, steps=steps, trainable="newest") for p in range(num_blocks)]


def freeze_head(num_blocks: int, steps: int) -> list[Phase]:
    """Freeze, and after the first phase head and boundary norm stay as they are too."""
    return [replace(phase, trainable="newest-only") for phase in freeze(num_blocks, steps)]


def single(num_blocks: int, steps: int) -> list[Phase]:
    """One block only: the end of grow's first phase."""
    return [Phase(active=1, steps=steps)]


def joint_long(num_blocks: int, steps: int, total: int | None = None) -> list[Phase]:
    """Joint on fresh data for ``total`` steps, the schedule restarting where grow's does; by default until grow's
    active-layer tokens are spent: (1 + .. + K) / K phases = (K + 1) / 2."""
    total = total or steps * (num_blocks + 1) // 2
    lengths = [min(steps, total - done) for done in range(0, total, steps)]
    if len(lengths) > 1 and lengths[-1] < steps / 2:  # too short for a schedule of its own
        lengths[-2:] = [lengths[-2] + lengths[-1]]
    return [Phase(active=num_blocks, steps=n, data="fresh", reset_optimizer=False) for n in lengths]


def joint_longer(num_blocks: int, steps: int) -> list[Phase]:
    """The same for as many phases as grow has: grow's total tokens."""
    return [Phase(active=num_blocks, steps=steps, data="fresh", reset_optimizer=False) for _ in range(num_blocks)]


def joint_replay(num_blocks: int, steps: int) -> list[Phase]:
    """Joint over the shard as often as grow passes it: grow's total and unique tokens."""
    return [Phase(active=num_blocks, steps=steps, reset_optimizer=False) for _ in range(num_blocks)]


def grow_rewind(num_blocks: int, steps: int) -> list[Phase]:
    """Grow with the data going back to the shard's start at every transition."""
    return [replace(phase, data="rewind") for phase in grow(num_blocks, steps)]


def grow_fresh(num_blocks: int, steps: int) -> list[Phase]:
    """Grow on new documents in every phase."""
    return [replace(phase, data="fresh") for phase in grow(num_blocks, steps)]


def grow_keep(num_blocks: int, steps: int) -> list[Phase]:
    """Grow without dropping the moments of what was trained before."""
    return [replace(phase, reset_optimizer=False) for phase in grow(num_blocks, steps)]


def grow_one_lr(num_blocks: int, steps: int) -> list[Phase]:
    """Grow under one learning-rate schedule over all phases."""
    return [replace(phase, restart_lr=False) for phase in grow(num_blocks, steps)]


def jump(num_blocks: int, steps: int) -> list[Phase]:
    """One block, then all of them at once."""
    return [Phase(active=1, steps=steps), Phase(active=num_blocks, steps=steps)]


CURRICULA: dict[str, Callable[..., list[Phase]]] = {
    "joint": joint,
    "grow": grow,
    "freeze": freeze,
    "freeze-head": freeze_head,
    "single": single,
    "joint-long": joint_long,
    "joint-longer": joint_longer,
    "joint-replay": joint_replay,
    "grow-rewind": grow_rewind,
    "grow-fresh": grow_fresh,
    "grow-keep": grow_keep,
    "grow-one-lr": grow_one_lr,
    "jump": jump,
}


def canonical(phases: Sequence[Phase]) -> list[Phase]:
    """The same run written in one way, so that equal prefixes of two curricula are equal.

    With one active block everything trains; the first phase starts fresh whatever its flags say.
    """
    result = []
    for index, phase in enumerate(phases):
        if index and phase.active < phases[index - 1].active:
            raise UserError(f"phase {index} has {phase.active} blocks, fewer than the phase before it")
        first = index == 0
        result.append(
            replace(
                phase,
                trainable="all" if phase.active == 1 else phase.trainable,
                data="continue" if first else phase.data,
                reset_optimizer=first or phase.reset_optimizer,
                restart_lr=first or phase.restart_lr,
            )
        )
    return result


@dataclass(frozen=True)
class DataPosition:
    """Which global batch a step reads: the ``batch``-th of shard number ``shard`` (0 is the base shard)."""

    shard: int
    batch: int


def data_start(phases: Sequence[Phase], index: int) -> DataPosition:
    """Where phase ``index`` starts reading: a pure function of the phases."""
    shard = batch = 0
    for i, phase in enumerate(phases[: index + 1]):
        if i and phase.data == "rewind":
            batch = 0
        elif i and phase.data == "fresh":
            shard, batch = shard + 1, 0
        if i < index:
            batch += phase.steps
    return DataPosition(shard, batch)


def schedule_position(phases: Sequence[Phase], index: int) -> tuple[int, int]:
    """(steps of the LR schedule done before phase ``index``, the schedule's whole length in steps)."""
    first = max(i for i in range(index + 1) if i == 0 or phases[i].restart_lr)
    last = next((i for i in range(first + 1, len(phases)) if phases[i].restart_lr), len(phases))
    return sum(p.steps for p in phases[first:index]), sum(p.steps for p in phases[first:last])
