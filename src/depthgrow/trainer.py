"""The one training loop: a phase from its parent's weights to its end, stoppable and resumable at every step.

A train state is weights, moments and a step number; data, learning rate and depth follow from the step.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgrow.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from depthgrow.curriculum import DataPosition, Phase, data_start
from depthgrow.data.batches import Batches, MicroBatch
from depthgrow.diagnostics import diagnose
from depthgrow.evaluate import Evaluation, evaluate
from depthgrow.files import read_json, write_json
from depthgrow.head_loss import TeacherTargets, TopTargets
from depthgrow.ledger import Flops, causal_pairs
from depthgrow.metrics import MetricsLog, read_metrics
from depthgrow.optim import NamedAdamW, learning_rate
from depthgrow.parallel import any_rank, on_first, rank, set_layers, settle_layers, spread, sum_ranks, whole, world
from depthgrow.phase import (
    Materials,
    PhaseRun,
    TrainConfig,
    build_student,
    load_weights,
    parameter_counts,
    saved_weights,
    step_work,
    trainable_table,
)
from depthgrow.runtime import Listener, Stop, Stopped, environment, pick_device, torch_dtype
from depthgrow.student import Student


class Diverged(Exception):
    """A loss or gradient was not finite; the phase is recorded as diverged, and what was trained before it is kept."""


def run_phase(
    run: PhaseRun, materials: Materials, folder: Path, parent: Checkpoint | None, *, stop: Stop, listener: Listener
) -> None:
    """Train one phase in ``folder`` until it is done, going on from the newest checkpoint there; on all ranks together.

    Raises:
        Stopped: a signal came; a checkpoint of the last finished step has been written.
        Diverged: a loss or gradient was not finite; done.json says so.
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
        names = ("tokens", "pairs", "active_layer_tokens", "flops", "teacher_flops")
        self.counted: dict[str, float] = dict.fromkeys(names, 0) | {"seconds": 0.0}
        if newest is not None:
            self.done, self.counted = newest.step, self.counted | newest.state["counted"]
        self.log = MetricsLog(folder / "metrics.jsonl", tensorboard=self.train.tensorboard)
        on_first(self._cut_back)
        self._record("config.json", {"label": run.label, "identity": run.identity})
        self._record("environment.json", environment(self.device) | {"ranks": world(), "compiled": compiled})
        resumed = f", from step {self.done}" if self.done else ""
        listener.note(f"{run.label}: {trainable_table(self.student)}{resumed}")
        self._flops = Flops.of(materials.arch)
        distilled = {"teacher_logits": materials.train_targets is not None}
        self._work = step_work(run.phase, run.placement, run.student, **distilled | materials.teacher_work)
        self._pending: list[dict[str, Any]] = []
        self._counted_before: list[dict[str, float]] = []  # each pending step
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
        sums = self._gradients(self._fetch(step), tokens)
        total = sum_ranks(sums) / tokens
        lr = learning_rate(run.optim, run.schedule[0] + step, run.schedule[1])
        norms = self.optimizer.step(lr, total.sum())
        record = {"kind": "train", "step": step + 1, "loss": total[0], "ce": total[1]}
        if self.materials.train_targets is not None:
            record["kl"] = total[2]
        self._pending.append(record | norms | {"lr": lr, "tokens": tokens})
        self._counted_before.append(dict(self.counted))
        for name, spent in {
            "tokens": tokens,
            "pairs": pairs,
            "active_layer_tokens": tokens * self._work.layers,
            "flops": int(self._flops.student(tokens, pairs, self._work)),
            "teacher_flops": int(self._flops.teacher(tokens, pairs, self._work)),
        }.items():
            self.counted[name] += spent
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
        if logging or last:
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
        bad = next((i for i, record in enumerate(pending) if not _healthy(record)), None)
        if bad is not None:
            self._diverge(bad)
        now, tokens = time.perf_counter(), sum(record["tokens"] for record in pending)
        pending[-1]["tokens_per_second"] = round(tokens / (now - self._since), 1)
        pending[-1]["data_wait"] = round(self._waited / (now - self._since), 5)
        self._since, self._waited = now, 0.0
        on_first(lambda: self.log.append(pending))
        self.listener.progress(self.run.label, pending[-1]["step"], self.run.phase.steps, pending[-1])
        pending.clear()
        self._counted_before.clear()

    def _diverge(self, bad: int) -> None:
        """End the phase at the ``bad``-th pending step, whose update the optimizer has left out.

        Raises:
            Diverged: always.
        """
        pending, record = self._pending[: bad + 1], self._pending[bad]
        self.done, self.counted = record["step"] - 1, self._counted_before[bad]
        self._pending.clear()
        on_first(lambda: self.log.append(pending))
        weights = saved_weights(self.student)
        if self.done and on_first(lambda: all(bool(p.isfinite().all()) for p in weights.values())):
            self._save()  # of the step before it; where the weights broke first, an earlier checkpoint stays the last
        step = record["step"]
        documents = self.materials.batches.document_ids(DataPosition(self._start.shard, self._start.batch + step - 1))
        values = {name: record[name] for name in ("loss", "grad_norm")}
        found = {"step": step, "documents": documents, "values": {name: str(v) for name, v in values.items()}}
        self._record("done.json", {"state": "diverged", "steps": self.done, "counted": self.counted, "diverged": found})
        text = f"{self.run.label} diverged at step {step} (loss {values['loss']}, gradient norm {values['grad_norm']})"
        self.listener.note(f"{text}; what was trained before is kept in {self.folder}")
        raise Diverged(text)

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
                "state": "done",
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


def _healthy(record: dict[str, Any]) -> bool:
    return all(math.isfinite(record[name]) for name in ("loss", "ce", "kl", "grad_norm") if name in record)


def consumed_documents(phases: Sequence[Phase], batches: Batches) -> set[int]:
    """Every document that the steps of ``phases`` read."""
    consumed: set[int] = set()
    for index, phase in enumerate(phases):
        start = data_start(phases, index)
        for step in range(phase.steps):
            consumed.update(batches.document_ids(DataPosition(start.shard, start.batch + step)))
    return consumed


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
