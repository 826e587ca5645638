"""The one training loop: a phase from its parent's weights to its end, stoppable and resumable at every step.

A train state is weights, moments and a step number; data, learning rate and depth follow from the step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from depthgrow.architecture import Architecture
from depthgrow.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from depthgrow.curriculum import DataPosition, Phase, data_start
from depthgrow.data.batches import Batches, MicroBatch
from depthgrow.data.classes import TokenClasses
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.diagnostics import diagnose
from depthgrow.evaluate import Evaluation, Targets, evaluate
from depthgrow.files import UserError, write_json
from depthgrow.head_loss import ObjectiveConfig, head_loss
from depthgrow.ledger import Flops, causal_pairs
from depthgrow.metrics import MetricsLog, read_metrics
from depthgrow.optim import NamedAdamW, OptimConfig, learning_rate
from depthgrow.runtime import Stop, Stopped, environment, pick_device, torch_dtype
from depthgrow.student import PLACEMENTS, Student, StudentConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How steps are made and when things are written. Counts are in steps of one phase, documents, or tokens.

    micro_tokens: most tokens (padding inside attention included) of one forward pass; dtype: of the matrix products
    (weights, moments and sums stay float32). tensorboard: event files in every node's folder. threads: CPU threads of one
    phase; jobs: phases run side by side (0: as many as the CPU's cores allow, one on a GPU).
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
    train_targets: Targets | None
    held_out_targets: Targets | None


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


@dataclass(frozen=True)
class Work:
    """Steps a phase has still to make (``start`` .. ``steps``) and the cost of one, in any one unit."""

    cost: float
    start: int
    steps: int


Paths = dict[str, dict[str, list[str]]]  # arm -> seed -> the nodes it goes through


class Listener(Protocol):
    """Whoever shows progress. ``states`` are 'done' or 'started', by node; ``values`` are plain floats."""

    def note(self, text: str) -> None: ...

    def begin(self, work: dict[str, Work], paths: Paths, states: dict[str, str]) -> None: ...

    def progress(self, label: str, step: int, num_steps: int, values: dict[str, float]) -> None: ...


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
    """All parameters but an embedding that is a frozen copy of the teacher's."""
    return {
        name: parameter.detach()
        for name, parameter in student.named_parameters()
        if not (name == "embed_tokens.weight" and student.config.freeze_embedding)
    }


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


def step_work(phase: Phase, placement: str, layers_per_block: int) -> dict[str, Any]:
    """What `Flops.train_step` needs to know of a phase: layers run, trained, and frozen ones that a gradient crosses."""
    layers = phase.active * layers_per_block
    trained = layers if phase.trainable == "all" else layers_per_block
    head_trained = phase.trainable != "newest-only"
    entry_trained = head_trained and PLACEMENTS[placement].boundary == "entry"
    passed = layers - trained if entry_trained else 0
    return {"layers": layers, "trained": trained, "passed": passed, "head_trained": head_trained}


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


def run_phase(
    run: PhaseRun,
    materials: Materials,
    folder: Path,
    parent: Checkpoint | None,
    *,
    stop: Stop,
    listener: Listener,
) -> None:
    """Train one phase in ``folder`` until it is done, going on from the newest checkpoint there.

    Raises:
        Stopped: a signal came; a checkpoint of the last finished step has been written.
    """
    device = pick_device(run.train.device)
    phase, train = run.phase, run.train
    torch.set_num_threads(train.threads)
    student = build_student(run, materials, device)
    if parent is not None:
        load_weights(student, parent.weights(), parent.path)
    optimizer = NamedAdamW(student.named_parameters(), run.optim, student.part_of)
    checkpoints = folder / "checkpoints"
    newest = latest_checkpoint(checkpoints, listener.note) if checkpoints.exists() else None
    if newest is not None:
        load_weights(student, newest.weights(), newest.path)
        optimizer.load_state(newest.optimizer())
    elif parent is not None and not phase.reset_optimizer:
        optimizer.load_state(parent.optimizer())
    counted = {"tokens": 0, "pairs": 0, "active_layer_tokens": 0, "flops": 0, "seconds": 0.0}
    first = 0
    if newest is not None:
        first, counted = newest.step, newest.state["counted"]
    log = MetricsLog(folder / "metrics.jsonl", tensorboard=train.tensorboard)
    log.cut_after(first)
    for late in folder.glob("eval/step-*.npz"):
        if int(late.stem.removeprefix("step-")) > first:
            late.unlink()
    write_json(folder / "config.json", {"label": run.label, "identity": run.identity})
    write_json(folder / "environment.json", environment(device))
    listener.note(f"{run.label}: {trainable_table(student)}" + (f", from step {first}" if first else ""))

    start = data_start(run.phases, len(run.phases) - 1)
    flops = Flops.of(materials.arch)
    work = step_work(phase, run.placement, run.student.layers_per_block)
    distilled = materials.train_targets is not None
    pending: list[dict[str, Any]] = []
    clock = time.perf_counter()
    since = (clock, 0)

    def flush() -> None:
        """Move device values to the host and append them: the only synchronisation between steps."""
        nonlocal since
        if pending:
            waiting = [(record, name) for record in pending for name, v in record.items() if isinstance(v, Tensor)]
            values = torch.stack([record[name].double() for record, name in waiting]).tolist()
            for (record, name), value in zip(waiting, values, strict=True):
                record[name] = value
            now, tokens = time.perf_counter(), sum(record["tokens"] for record in pending)
            pending[-1]["tokens_per_second"] = round((since[1] + tokens) / (now - since[0]), 1)
            since = (now, 0)
            log.append(pending)
            listener.progress(run.label, pending[-1]["step"], phase.steps, pending[-1])
            pending.clear()

    def checkpoint(step: int) -> Checkpoint:
        nonlocal clock
        flush()
        now = time.perf_counter()
        counted["seconds"] += now - clock
        clock = now
        return save_checkpoint(
            checkpoints, saved_weights(student), optimizer.state(), {"step": step, "counted": counted}
        )

    def evaluation(step: int) -> None:
        nonlocal since
        flush()
        before = time.perf_counter()
        result = evaluate_student(student, materials, train, device)
        result.save(folder / "eval" / f"step-{step:08d}.npz")
        summary = result.summary()
        log.append([{"kind": "eval", "step": step, **summary}])
        listener.progress(run.label, step, phase.steps, {"held_out_ce": summary["ce"]})
        since = (since[0] + time.perf_counter() - before, since[1])

    for step in range(first, phase.steps):
        micro_batches = materials.batches.global_batch(DataPosition(start.shard, start.batch + step))
        num_targets = sum(batch.num_targets for batch in micro_batches)
        sums: list[Tensor] = []
        for micro in micro_batches:
            batch = micro.to(device)
            targets = None if materials.train_targets is None else materials.train_targets(batch)
            with compute_dtype(train, device):
                h_ND = student(batch.ids_N, batch.lengths)
            result = head_loss(
                narrow(h_ND, train), student.lm_head.weight, batch.label_N, targets, run.objective, num_targets
            )
            result.loss.backward()
            sums.append(torch.stack([result.loss.detach().double() * num_targets, result.ce_sum, result.kl_sum]))
        lr = learning_rate(run.optim, run.schedule[0] + step, run.schedule[1])
        norms = optimizer.step(lr)
        total = torch.stack(sums).sum(0) / num_targets
        record = {"kind": "train", "step": step + 1, "loss": total[0], "ce": total[1]}
        if distilled:
            record["kl"] = total[2]
        pending.append(record | norms | {"lr": lr, "tokens": num_targets})
        pairs = sum(causal_pairs(micro.lengths) for micro in micro_batches)
        counted["tokens"] += num_targets
        counted["pairs"] += pairs
        counted["active_layer_tokens"] += num_targets * work["layers"]
        counted["flops"] += flops.train_step(num_targets, pairs, **work, distilled=distilled)
        done = step + 1
        if done % train.log_every == 0:
            flush()
        if done % train.eval_every == 0 or done == phase.steps:
            evaluation(done)
        if done == phase.steps or done % train.checkpoint_every == 0 or stop.requested:
            checkpoint(done)
        if stop.requested and done < phase.steps:
            raise Stopped(run.label)

    findings = diagnose(
        student,
        hidden_states(student, train, device),
        materials.held_out,
        materials.classes,
        micro_tokens=train.micro_tokens,
        device=device,
    )
    write_json(folder / "diagnostics.json", findings)
    consumed = consumed_documents(run.phases, materials.batches)
    targets_of = materials.batches.documents.num_targets
    if not any(record["kind"] == "eval" and record["step"] == phase.steps for record in read_metrics(log.path)):
        evaluation(phase.steps)  # a power failure took the lines that the checkpoint outlived
    last = [record for record in read_metrics(log.path) if record["kind"] == "eval"][-1]
    write_json(
        folder / "done.json",
        {
            "steps": phase.steps,
            "counted": counted,
            "unique_tokens": int(sum(targets_of[i] for i in consumed)),
            "final": {name: value for name, value in last.items() if name not in ("kind", "step")},
            "parameters": parameter_counts(student),
        },
    )
    log.close()
    listener.note(f"{run.label} done: held-out ce {last['ce']:.4f} after {counted['seconds']:.0f} s")


def consumed_documents(phases: Sequence[Phase], batches: Batches) -> set[int]:
    """Every document that the steps of ``phases`` read."""
    consumed: set[int] = set()
    for index, phase in enumerate(phases):
        start = data_start(phases, index)
        for step in range(phase.steps):
            consumed.update(batches.document_ids(DataPosition(start.shard, start.batch + step)))
    return consumed


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


def hidden_states(student: Student, train: TrainConfig, device: torch.device) -> Callable[[MicroBatch], Tensor]:
    """Final hidden states of a micro-batch as training computes them (same dtype), for evaluation and diagnostics."""

    def hidden(batch: MicroBatch) -> Tensor:
        with compute_dtype(train, device):
            return narrow(student(batch.ids_N, batch.lengths), train)

    return hidden


def evaluate_student(student: Student, materials: Materials, train: TrainConfig, device: torch.device) -> Evaluation:
    """Held-out evaluation of a student."""
    return evaluate(
        hidden_states(student, train, device),
        student.lm_head.weight,
        materials.held_out,
        materials.held_out_targets,
        micro_tokens=train.micro_tokens,
        device=device,
    )


def compute_dtype(train: TrainConfig, device: torch.device) -> Any:
    """Matrix products in ``train.dtype``; float32 means no autocast at all."""
    if train.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch_dtype(train.dtype))


def narrow(h_ND: Tensor, train: TrainConfig) -> Tensor:
    """Hidden states in the dtype of the head's matrix products."""
    return h_ND if train.dtype == "float32" else h_ND.to(torch_dtype(train.dtype))
