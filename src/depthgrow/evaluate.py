"""Held-out evaluation: sums per whole document, so that any later statistic can be made from the files."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthgrow.data.batches import MicroBatch, group_by_length, pack
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.files import write_atomic
from depthgrow.head_loss import TeacherTargets, token_values
from depthgrow.parallel import rank, sum_ranks, world

Targets = Callable[[MicroBatch], TeacherTargets]


@dataclass(frozen=True)
class Evaluation:
    """Sums over each held-out document's target tokens, in nats; without a teacher there is no ``kl`` and no entropy."""

    tokens: NDArray[np.int64]
    ce: NDArray[np.float64]
    kl: NDArray[np.float64] | None = None
    teacher_entropy: NDArray[np.float64] | None = None

    def summary(self) -> dict[str, float]:
        """Means by token: ce, and with a teacher kl, teacher_entropy, soft_ce = kl + teacher_entropy; ppl = exp(ce)."""
        total = self.tokens.sum()
        ce = float(self.ce.sum() / total)
        result = {"ce": ce, "ppl": float(np.exp(np.float64(ce)))}
        if self.kl is not None and self.teacher_entropy is not None:
            kl, entropy = float(self.kl.sum() / total), float(self.teacher_entropy.sum() / total)
            result |= {"kl": kl, "teacher_entropy": entropy, "soft_ce": kl + entropy}
        return result

    def save(self, path: Path) -> None:
        arrays = {"tokens": self.tokens, "ce": self.ce, "kl": self.kl, "teacher_entropy": self.teacher_entropy}
        given: dict[str, Any] = {name: values for name, values in arrays.items() if values is not None}
        buffer = io.BytesIO()
        np.savez(buffer, **given)
        write_atomic(path, buffer.getvalue())


def evaluate_model(
    model: Any, held_out: TokenizedDocuments, targets: Targets | None = None, *, micro_tokens: int
) -> Evaluation:
    """A model loaded as a teacher is (`depthgrow.teacher.live.LiveTeacher`) on held-out documents."""
    device = model.head_VD.device
    options: Any = {"micro_tokens": micro_tokens, "device": device}
    return evaluate(lambda batch: model.targets(batch).hidden_ND, model.head_VD, held_out, targets, **options)


@torch.no_grad()
def evaluate(
    hidden: Callable[[MicroBatch], Tensor],
    head_VD: Tensor,
    held_out: TokenizedDocuments,
    targets: Targets | None,
    *,
    micro_tokens: int,
    device: torch.device,
) -> Evaluation:
    """Evaluate on every held-out document, each on one of the ranks; all get the result.

    Args:
        hidden: the final hidden states h_ND of a micro-batch of held-out documents, a student's or a teacher's.
        targets: the teacher's, per micro-batch of held-out documents; None for cross-entropy alone.
    """
    count = len(held_out)
    names = ("ce",) if targets is None else ("ce", "kl", "teacher_entropy")
    sums = torch.zeros(len(names), count, dtype=torch.float64, device=device)
    groups = list(group_by_length(held_out, range(count), micro_tokens))
    groups += [[]] * (-len(groups) % world())  # ranks take turns, and make as many passes
    for group in groups[rank() :: world()]:
        batch = pack(held_out, group).to(device)
        values = token_values(hidden(batch), head_VD, batch.label_N, None if targets is None else targets(batch))
        documents, lengths = (torch.tensor(x, dtype=torch.long) for x in (group, batch.lengths))
        document_N = documents.repeat_interleave(lengths).to(device)
        for name, total in zip(names, sums, strict=True):
            total.index_add_(0, document_N, getattr(values, f"{name}_N").double())
    found = dict(zip(names, sum_ranks(sums).cpu().numpy(), strict=True))
    return Evaluation(tokens=held_out.num_targets.copy(), **found)
