"""The one training loop: a phase from its parent's weights to its end, stoppable and resumable at every step.

A train state is weights, moments and a step number; data, learning rate and depth follow from the step.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from depthgrow.files import UserError, read_json, unknown, write_json
from depthgrow.head_loss import ObjectiveConfig, TeacherTargets, TopTargets
from depthgrow.ledger import Flops, causal_pairs
from depthgrow.metrics import MetricsLog, read_metrics
from depthgrow.optim import NamedAdamW, OptimConfig, learning_rate
from depthgrow.parallel import (
    any_rank,
    collected,
    on_first,
    own_part,
    rank,
    set_layers,
    settle_layers,
    spread,
    sum_ranks,
    whole,
    world,
)
from depthgrow.runtime import Listener, Stop, Stopped, environment, pick_device, torch_dtype
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
    run: PhaseRun, materials: Materials, folder: Path, parent: Checkpoint | None, *, stop: Stop, listener: Listener
) -> None:
    """Train one phase in ``folder`` until it is done, going on from the newest checkpoint there; on all ranks together.

    Raises:
        Stopped: a signal came; a checkpoint of the last finished step has been written.
    """
    loop = _Loop(run, materials, folder, parent, listener)
    try:
        for step in range(loop.done, run.phase.steps):
            loop.step(step)
            loop.keep_up(stop)
        loop.finish()
    finally:
        loop.close()


class _Loop:
    """A phase under way: student, optimizer, the number of steps ``done``, and the files it keeps in ``folder``.

    Every rank has one and makes the same calls; only the first writes and talks.
    """

    def __init__(
        self, run: PhaseRun, materials: Materials, folder: Path, parent: Checkpoint | None, listener: Listener
    ):
        self.run, self.materials, self.folder, self.listener = run, materials, folder, listener
        self.train, self.device = run.train, pick_device(run.train.device)
        torch.set_num_threads(self.train.threads)
        checkpoints = folder / "checkpoints"
        newest = on_first(lambda: latest_checkpoint(checkpoints, listener.note) if checkpoints.exists() else None)
        origin = newest or parent
        self.student = build_student(run, materials, torch.device("cpu"))
        if origin is not None:
            load_weights(self.student, origin.weights(), origin.path)
        spread(self.student, self.device)
        self._start = data_start(run.phases, len(run.phases) - 1)
        made = folder / "environment.json"
        begun = None if newest is None else on_first(lambda: read_json(made).get("compiled", False))
        compiled = settle_layers(
            self.student,
            str(self.train.compile),
            begun,
            run.phase.steps,
            self._seconds_a_step,
            recompute=self.train.recompute,
            tell=lambda text: listener.note(f"{run.label}: {text}"),
        )
        self.optimizer = NamedAdamW(self.student.named_parameters(), run.optim, self.student.part_of)
        if origin is not None and (newest is not None or not run.phase.reset_optimizer):
            self.optimizer.load_state(origin.optimizer())
        self.done = 0
        self.counted = {"tokens": 0, "pairs": 0, "active_layer_tokens": 0, "flops": 0, "seconds": 0.0}
        if newest is not None:
            self.done, self.counted = newest.step, newest.state["counted"]
        self.log = MetricsLog(folder / "metrics.jsonl", tensorboard=self.train.tensorboard)
        on_first(self._cut_back)
        self._record("config.json", {"label": run.label, "identity": run.identity})
        self._record("environment.json", environment(self.device) | {"ranks": world(), "compiled": compiled})
        resumed = f", from step {self.done}" if self.done else ""
        listener.note(f"{run.label}: {trainable_table(self.student)}{resumed}")
        self._flops = Flops.of(materials.arch)
        self._work = step_work(run.phase, run.placement, run.student.layers_per_block)
        self._pending: list[dict[str, Any]] = []
        self._clock = time.perf_counter()
        self._since, self._waited = self._clock, 0.0
        self._reader = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(self.train.threads,))
        self._next: Future[list[tuple[MicroBatch, TeacherTargets | TopTargets | None]]] | None = None

    def _seconds_a_step(self, passes: int) -> float:
        """The fastest of so many passes of the first batch on the first rank; the optimizer, made next, drops gradients."""
        batches, found = self._read(0), []
        for _ in range(passes):
            clock = time.perf_counter()
            self._gradients(batches, 1).sum().item()
            found.append(time.perf_counter() - clock)
        return on_first(lambda: min(found))

    def _cut_back(self) -> None:
        """Drop what was written after the checkpoint that the loop goes on from."""
        self.log.cut_after(self.done)
        for late in self.folder.glob("eval/step-*.npz"):
            if int(late.stem.removeprefix("step-")) > self.done:
                late.unlink()

    def _record(self, name: str, value: Any) -> None:
        on_first(lambda: write_json(self.folder / name, value))

    def _read(self, step: int) -> list[tuple[MicroBatch, TeacherTargets | TopTargets | None]]:
        """This rank's micro-batches of a step, with the teacher's targets."""
        position, targets = DataPosition(self._start.shard, self._start.batch + step), self.materials.train_targets
        batches = self.materials.batches.global_batch(position, rank(), world())
        return [(batch, targets and targets(batch)) for batch in (b.to(self.device) for b in batches)]

    def _fetch(self, step: int) -> list[tuple[MicroBatch, TeacherTargets | TopTargets | None]]:
        """The same, read from files while the step before was computed."""
        if not self.materials.read_ahead:
            return self._read(step)
        asked = time.perf_counter()
        self._next = self._next or self._reader.submit(self._read, step)
        found = self._next.result()
        self._next = self._reader.submit(self._read, step + 1) if step + 1 < self.run.phase.steps else None
        self._waited += time.perf_counter() - asked
        return found

    def step(self, step: int) -> None:
        """One optimizer step on one global batch."""
        run, position = self.run, DataPosition(self._start.shard, self._start.batch + step)
        lengths = self.materials.batches.lengths(position)
        tokens, pairs = sum(lengths), causal_pairs(lengths)
        distilled = self.materials.train_targets is not None
        sums = self._gradients(self._fetch(step), tokens)
        lr = learning_rate(run.optim, run.schedule[0] + step, run.schedule[1])
        norms = self.optimizer.step(lr)
        total = sum_ranks(sums) / tokens
        record = {"kind": "train", "step": step + 1, "loss": total[0], "ce": total[1]}
        if distilled:
            record["kl"] = total[2]
        self._pending.append(record | norms | {"lr": lr, "tokens": tokens})
        self.counted["tokens"] += tokens
        self.counted["pairs"] += pairs
        self.counted["active_layer_tokens"] += tokens * self._work["layers"]
        self.counted["flops"] += self._flops.train_step(tokens, pairs, **self._work, distilled=distilled)
        self.done = step + 1

    def _gradients(self, batches: list[tuple[MicroBatch, TeacherTargets | TopTargets | None]], tokens: int) -> Tensor:
        """Forward and backward passes of this rank's micro-batches: their sums of loss, CE and KL over tokens."""
        sums: list[Tensor] = []
        for batch, targets in batches:
            with compute_dtype(self.train, self.device):
                h_ND = self.student(batch.ids_N, batch.lengths)
            hidden_ND = narrow(h_ND, self.train)
            result = self.student.lm_head(hidden_ND, batch.label_N, targets, self.run.objective, tokens)
            result.loss.backward()
            sums.append(torch.stack([result.loss.detach().double() * tokens, result.ce_sum, result.kl_sum]))
        return torch.stack(sums).sum(0)

    def keep_up(self, stop: Stop) -> None:
        """Log, evaluate, save and stop where the step just made calls for it; ranks agree on a stop when they log."""
        train, last = self.train, self.done == self.run.phase.steps
        logging = self.done % train.log_every == 0
        if logging:
            self._flush()
        stopping = any_rank(stop.requested) if world() == 1 or logging or last else False
        if last or self.done % train.eval_every == 0:
            self._evaluate()
        if last or self.done % train.checkpoint_every == 0 or stopping:
            self._save()
        if stopping and not last:
            raise Stopped(self.run.label)

    def _flush(self) -> None:
        """Append the figures of the steps since the last call, read from the device in one go."""
        pending = self._pending
        if not pending:
            return
        waiting = [(record, name) for record in pending for name, v in record.items() if isinstance(v, Tensor)]
        values = torch.stack([record[name].double() for record, name in waiting]).tolist()
        for (record, name), value in zip(waiting, values, strict=True):
            record[name] = value
        now, tokens = time.perf_counter(), sum(record["tokens"] for record in pending)
        pending[-1]["tokens_per_second"] = round(tokens / (now - self._since), 1)
        pending[-1]["data_wait"] = round(self._waited / (now - self._since), 5)
        self._since, self._waited = now, 0.0
        on_first(lambda: self.log.append(pending))
        self.listener.progress(self.run.label, pending[-1]["step"], self.run.phase.steps, pending[-1])
        pending.clear()

    def _save(self) -> None:
        self._flush()
        now = time.perf_counter()
        self.counted["seconds"] += now - self._clock
        self._clock = now
        weights, moments = saved_weights(self.student), self.optimizer.state()
        state = {"step": self.done, "counted": self.counted}
        on_first(lambda: save_checkpoint(self.folder / "checkpoints", weights, moments, state))

    def _evaluate(self) -> None:
        self._flush()
        before = time.perf_counter()
        result = evaluate_student(self.student, self.materials, self.train, self.device)
        summary = result.summary()
        on_first(lambda: result.save(self.folder / "eval" / f"step-{self.done:08d}.npz"))
        on_first(lambda: self.log.append([{"kind": "eval", "step": self.done, **summary}]))
        self.listener.progress(self.run.label, self.done, self.run.phase.steps, {"held_out_ce": summary["ce"]})
        self._since += time.perf_counter() - before

    def _last_evaluation(self) -> dict[str, Any] | None:
        found = [record for record in read_metrics(self.log.path) if record["kind"] == "eval"]
        return found[-1] if found and found[-1]["step"] == self.done else None

    def finish(self) -> None:
        """Diagnostics, and the record that says the phase is done."""
        materials, student = self.materials, self.student
        set_layers(student, recompute=False, compiled=False)  # a compiler would trace the hooks, once for every layer
        findings = diagnose(
            student,
            hidden_states(student, self.train, self.device),
            materials.held_out,
            materials.classes,
            micro_tokens=self.train.micro_tokens,
            device=self.device,
        )
        self._record("diagnostics.json", findings)
        if on_first(self._last_evaluation) is None:
            self._evaluate()  # a power failure took the lines that the checkpoint outlived
        last = on_first(self._last_evaluation)
        assert last is not None
        consumed = consumed_documents(self.run.phases, materials.batches)
        targets_of = materials.batches.documents.num_targets
        self._record(
            "done.json",
            {
                "steps": self.run.phase.steps,
                "counted": self.counted,
                "unique_tokens": int(sum(targets_of[i] for i in consumed)),
                "final": {name: value for name, value in last.items() if name not in ("kind", "step")},
                "parameters": parameter_counts(student),
            },
        )
        self.listener.note(f"{self.run.label} done: held-out ce {last['ce']:.4f} after {self.counted['seconds']:.0f} s")

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self.log.close()
        del self.student, self.optimizer
        gc.collect()  # recomputed and sharded layers refer to themselves, and the next phase needs their memory


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


def hidden_states(student: Student, train: TrainConfig, device: torch.device) -> Callable[..., Tensor]:
    """Final hidden states of a micro-batch as training computes them (same dtype), for evaluation and diagnostics; options
    are those of the student's forward pass."""

    def hidden(batch: MicroBatch, **options: Any) -> Tensor:
        with compute_dtype(train, device):
            return narrow(student(batch.ids_N, batch.lengths, **options), train)

    return hidden


def evaluate_student(student: Student, materials: Materials, train: TrainConfig, device: torch.device) -> Evaluation:
    """Held-out evaluation of a student."""
    return evaluate(
        hidden_states(student, train, device),
        whole(student.lm_head.weight.detach()),
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
