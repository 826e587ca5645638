"""Held-out evaluation: sums per whole document, so that any later statistic can be made from the files."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthgrow.data.batches import MicroBatch, group_by_length, pack
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.files import write_atomic
from depthgrow.head_loss import TeacherTargets, token_values

Targets = Callable[[MicroBatch], TeacherTargets]


@dataclass(frozen=True)
class Evaluation:
    """Sums over each held-out document's target tokens, in nats; without a teacher ``kl`` and ``entropy`` are NaN."""

    tokens: NDArray[np.int64]
    ce: NDArray[np.float64]
    kl: NDArray[np.float64]
    teacher_entropy: NDArray[np.float64]

    def summary(self) -> dict[str, float]:
        """Means by token: ce, and with a teacher kl, teacher_entropy, soft_ce = kl + teacher_entropy; ppl = exp(ce)."""
        total = self.tokens.sum()
        ce = float(self.ce.sum() / total)
        result = {"ce": ce, "ppl": float(np.exp(ce))}
        if not np.isnan(self.kl).any():
            kl, entropy = float(self.kl.sum() / total), float(self.teacher_entropy.sum() / total)
            result |= {"kl": kl, "teacher_entropy": entropy, "soft_ce": kl + entropy}
        return result

    def save(self, path: Path) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, tokens=self.tokens, ce=self.ce, kl=self.kl, teacher_entropy=self.teacher_entropy)
        write_atomic(path, buffer.getvalue())


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
    """Evaluate on every held-out document.

    Args:
        hidden: the final hidden states h_ND of a micro-batch of held-out documents, a student's or a teacher's.
        targets: the teacher's, per micro-batch of held-out documents; None for cross-entropy alone.
    """
    count = len(held_out)
    sums = {name: np.full(count, np.nan) for name in ("ce", "kl", "teacher_entropy")}
    for group in group_by_length(held_out, range(count), micro_tokens):
        batch = pack(held_out, group).to(device)
        values = token_values(hidden(batch), head_VD, batch.label_N, None if targets is None else targets(batch))
        row_N = torch.arange(len(group)).repeat_interleave(torch.tensor(batch.lengths)).to(device)
        for name, value_N in (
            ("ce", values.ce_N),
            ("kl", values.kl_N),
            ("teacher_entropy", values.teacher_entropy_N),
        ):
            if value_N is not None:
                total = torch.zeros(len(group), dtype=torch.float64, device=device)
                sums[name][group] = total.index_add_(0, row_N, value_N.double()).cpu().numpy()
    return Evaluation(tokens=held_out.num_targets.copy(), **sums)
