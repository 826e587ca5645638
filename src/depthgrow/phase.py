"""What a phase is made of: its settings, its materials, and a student built, loaded and set to train as it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgrow.architecture import Architecture
from depthgrow.curriculum import Phase
from depthgrow.data.batches import Batches, MicroBatch
from depthgrow.data.classes import TokenClasses
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.evaluate import Targets
from depthgrow.files import UserError, unknown
from depthgrow.head_loss import ObjectiveConfig, TeacherTargets, TopTargets
from depthgrow.ledger import StepWork
from depthgrow.optim import OptimConfig
from depthgrow.parallel import collected, own_part
from depthgrow.runtime import torch_dtype
from depthgrow.student import PLACEMENTS, Student, StudentConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How steps are made and when things are written. Counts are in steps of one phase, documents, or tokens.

    micro_tokens: most tokens (padding inside attention included) of one forward pass; dtype: of the matrix products
    (weights, moments and sums stay float32). tensorboard: event files in every node's folder. threads: CPU threads of one
    phase; jobs: phases run side by side (0: as many as the CPU's cores allow, one on a GPU or under torchrun). recompute:
    layers run again in the backward pass instead of keeping what it needs; compile: `torch.compile` each layer: 'true',
    'false', or 'auto', where a phase of ten minutes or more measures faster with it.
    """

    steps_per_phase: int = 50_000
    batch_documents: int = 64
    micro_tokens: int = 8192
    eval_every: int = 2000
    checkpoint_every: int = 1000
    log_every: int = 10
    dtype: str = "float32"
    device: str = "auto"
    tensorboard: bool = False
    threads: int = 1
    jobs: int = 0
    recompute: bool = False
    compile: str | bool = "auto"

    def __post_init__(self) -> None:
        for name in (
            "steps_per_phase",
            "batch_documents",
            "micro_tokens",
            "eval_every",
            "checkpoint_every",
            "log_every",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 1")
        torch_dtype(self.dtype)
        object.__setattr__(self, "compile", str(self.compile).lower())
        if self.compile not in ("auto", "true", "false"):
            raise unknown("train.compile", str(self.compile), ("auto", "true", "false"))
        if self.jobs < 0:
            raise UserError(f"train.jobs={self.jobs} must be at least 0 (0: as many as the cores allow)")


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What every phase of a study shares: shapes, the teacher's tensors, documents, teacher targets."""

    arch: Architecture
    initial: dict[str, Any]  # the teacher's part of a Student: embedding_VD, head_VD, norm_D, special_ids
    classes: TokenClasses
    batches: Batches
    held_out: TokenizedDocuments
    train_targets: Callable[[MicroBatch], TeacherTargets | TopTargets] | None
    held_out_targets: Targets | None
    read_ahead: bool = False  # training targets come from files: a step's can be read during another
    teacher_work: dict[str, Any] = field(default_factory=dict)  # what a step asks of the teacher (see `StepWork`)


@dataclass(frozen=True, kw_only=True)
class PhaseRun:
    """Everything that decides the weights at the end of the last of ``phases``, together with the materials.

    seed: of the data order; init_seed: of the student's draw. schedule: (steps of the LR schedule already done, its whole
    length); identity: what the fingerprint was made of.
    """

    label: str
    placement: str
    intervention: str | None
    student: StudentConfig
    objective: ObjectiveConfig
    optim: OptimConfig
    train: TrainConfig
    seed: int
    init_seed: int
    phases: Sequence[Phase]
    schedule: tuple[int, int]
    identity: dict[str, Any]

    @property
    def phase(self) -> Phase:
        return self.phases[-1]


def build_student(run: PhaseRun, materials: Materials, device: torch.device) -> Student:
    """The student of a phase as it starts from nothing but seed and teacher; a parent's weights are loaded over it."""
    placed = (run.placement, run.intervention)
    student = Student(run.student, materials.arch, *placed, seed=run.init_seed, **materials.initial).to(device)
    student.append_blocks(run.phase.active)
    set_trainable(student, run.phase)
    return student


def set_trainable(student: Student, phase: Phase) -> None:
    """Blocks by identity: 'newest' leaves a gradient to the last block, head and boundary norm; 'newest-only' to the block."""
    if phase.trainable == "newest-only":
        student.requires_grad_(False)
    for block in range(student.active_blocks):
        wanted = phase.trainable == "all" or block == phase.active - 1
        for _, parameter in student.block_parameters(block):
            parameter.requires_grad_(wanted)


def saved_weights(student: Student) -> dict[str, Tensor]:
    """All parameters but an embedding that is a frozen copy of the teacher's; whole, on rank 0."""
    return collected(
        (name, own_part(parameter), parameter)
        for name, parameter in student.named_parameters()
        if not (name == "embed_tokens.weight" and student.config.freeze_embedding)
    )


def load_weights(student: Student, weights: dict[str, Tensor], where: Path) -> None:
    """Copy tensors in by name; blocks the file does not have keep their fresh draw.

    Raises:
        UserError: the file has a tensor the student lacks, or one of another shape.
    """
    own = dict(student.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            if name not in own or own[name].shape != value.shape:
                raise UserError(f"{where}: tensor {name} {tuple(value.shape)} does not fit this student")
            own[name].copy_(value)


def step_work(phase: Phase, placement: str, student: StudentConfig, **teacher: Any) -> StepWork:
    """What a step of a phase computes: the one description that ledger, plan and `match` count from.

    Args:
        teacher: what the step asks of the teacher, as fields of `StepWork`.
    """
    size = student.layers_per_block
    layers = phase.active * size
    trained = layers if phase.trainable == "all" else size
    alone = phase.trainable == "newest-only"  # neither head nor boundary norm nor embedding
    below = not alone and (PLACEMENTS[placement].boundary == "entry" or not student.freeze_embedding)
    return StepWork(
        layers=layers,
        trained=trained,
        passed=layers - trained if below else 0,
        # a pre layer's own first norm wants the gradient of what it sends to q, k and v
        input_gradient=below or placement == "pre",
        head_trained=not alone,
        **teacher,
    )


def trainable_table(student: Student) -> str:
    """One line a phase: parameters in training, and which blocks are frozen."""
    train = sum(p.numel() for p in student.parameters() if p.requires_grad)
    frozen = [
        b for b in range(student.active_blocks) if not any(p.requires_grad for _, p in student.block_parameters(b))
    ]
    outside = {"embedding": student.embed_tokens, "boundary norm": student.norm, "head": student.lm_head}
    parts = [name for name, module in outside.items() if not module.weight.requires_grad]
    kept = ", ".join(parts + [f"block {b}" for b in frozen]) or "nothing"
    return f"{student.active_blocks} block(s), {train:,} trainable parameters, frozen: {kept}"


def parameter_counts(student: Student) -> dict[str, int]:
    """Parameters by part; 'trainable' counts what a joint run would train, norms included."""
    parts = {
        "embedding": student.embed_tokens.weight.numel(),
        "head": student.lm_head.weight.numel(),
        "boundary_norm": student.norm.weight.numel(),
        "stack": sum(p.numel() for p in student.layers.parameters()),
    }
    frozen = parts["embedding"] if student.config.freeze_embedding else 0
    total = sum(parts.values())
    return parts | {"total": total, "trainable": total - frozen}
