"""What each block is worth and what it sends on, on a fixed batch of held-out documents.

Everything is read through hooks on the unmodified model: its logits, mode, gradients and random state stay as they were.
Formulas, units and the fixed batch are in docs/diagnostics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from depthgrow.data.batches import MicroBatch, group_by_length, pack
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.head_loss import token_values
from depthgrow.student import Student

FIXED_TOKENS = 4096  # the published study uses 2 x 2048
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
BINS_PER_DECADE = 10


def fixed_batch(documents: TokenizedDocuments, num_tokens: int = FIXED_TOKENS) -> list[int]:
    """The first held-out documents that together have at least ``num_tokens`` target tokens (all, if they have fewer)."""
    enough = int(np.searchsorted(np.cumsum(documents.num_targets), num_tokens)) + 1
    return list(range(min(enough, len(documents))))


def angular_distance(a_ND: Tensor, b_ND: Tensor) -> Tensor:
    """arccos(cos(a, b)) / pi per token, as 2 atan2(|u - v|, |u + v|) / pi of the unit vectors: 0 for equal, never NaN."""
    u_ND, v_ND = (nn.functional.normalize(x.double(), dim=-1) for x in (a_ND, b_ND))
    return 2 * torch.atan2((u_ND - v_ND).norm(dim=-1), (u_ND + v_ND).norm(dim=-1)) / math.pi


def rms(x_ND: Tensor) -> Tensor:
    """Root mean square of each token's stream, in float64."""
    return x_ND.double().square().mean(-1).sqrt()


def describe(values: NDArray[np.float64]) -> dict[str, Any]:
    """Count (and how many were not finite), mean, std, kurtosis (fourth standardised moment; 3 for a normal), quantiles,
    max, histogram with logarithmic bins."""
    finite = values[np.isfinite(values)]
    lost = len(values) - len(finite)
    values = finite
    if len(values) == 0:
        return {"count": 0, "non_finite": lost}
    mean, std = float(values.mean()), float(values.std())
    positive = np.maximum(values, 1e-12)
    low, high = math.floor(math.log10(positive.min())), math.floor(math.log10(positive.max())) + 1
    edges = np.logspace(low, high, (high - low) * BINS_PER_DECADE + 1)
    counts, _ = np.histogram(np.clip(positive, edges[0], edges[-1]), edges)
    return {
        "count": len(values),
        "non_finite": lost,
        "mean": mean,
        "std": std,
        "kurtosis": float(((values - mean) ** 4).mean() / std**4) if std > 0 else 0.0,
        "quantiles": {str(q): float(np.quantile(values, q)) for q in QUANTILES},
        "max": float(values.max()),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


@contextmanager
def _bypassed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, these layers return what they are given: removed with all their norms."""
    handles = [layer.register_forward_hook(lambda module, inputs, output: inputs[0]) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _captured(layers: Sequence[nn.Module]) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Inside, each layer's (input, output) of the newest forward pass, by position in ``layers``."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            seen[index] = (inputs[0].detach(), output.detach())

        return hook

    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def diagnose(
    student: Student,
    hidden: Callable[[MicroBatch], Tensor],
    documents: TokenizedDocuments,
    *,
    micro_tokens: int,
    device: torch.device,
) -> dict[str, Any]:
    """Per block: removal (change of CE in nats per token without it), angle (share of pi), relative update; the RMS of
    the stream it leaves, over all tokens and by class.

    Args:
        hidden: final hidden states of a micro-batch, as evaluation computes them, from ``student``.
        documents: the held-out documents; the fixed batch is taken from their start.
    """
    groups = list(group_by_length(documents, fixed_batch(documents), micro_tokens))
    batches = [pack(documents, group).to(device) for group in groups]
    size = student.config.layers_per_block
    blocks = [list(student.layers[b * size : (b + 1) * size]) for b in range(student.active_blocks)]

    def cross_entropy() -> float:
        total = sum(
            token_values(hidden(b), student.lm_head.weight, b.label_N, None).ce_N.double().sum() for b in batches
        )
        return float(total / sum(b.num_targets for b in batches))

    angle: list[list[Tensor]] = [[] for _ in blocks]
    update: list[list[Tensor]] = [[] for _ in blocks]
    scale: list[list[Tensor]] = [[] for _ in blocks]
    structural: list[Tensor] = []
    with _captured(list(student.layers)) as seen:
        for batch in batches:
            hidden(batch)
            first_N = torch.cat([torch.arange(n, device=device) for n in batch.lengths]) == 0
            structural.append(first_N | torch.isin(batch.ids_N, student.special_ids.to(device)))
            for b in range(len(blocks)):
                h_in, h_out = seen[b * size][0], seen[b * size + size - 1][1]
                angle[b].append(angular_distance(h_in, h_out))
                update[b].append((h_out.double() - h_in.double()).norm(dim=-1) / h_in.double().norm(dim=-1))
                scale[b].append(rms(h_out))
    special = torch.cat(structural).cpu().numpy()
    full = cross_entropy()
    rows = []
    for b, layers in enumerate(blocks):
        with _bypassed(layers):
            removal = cross_entropy() - full
        values = torch.cat(scale[b]).cpu().numpy()
        rows.append(
            {
                "block": b,
                "removal": removal,
                "angle": float(torch.cat(angle[b]).mean()),
                "relative_update": float(torch.cat(update[b]).mean()),
                "rms": {
                    "all": describe(values),
                    "structural": describe(values[special]),
                    "regular": describe(values[~special]),
                },
            }
        )
    return {"ce": full, "tokens": len(special), "documents": sum(map(len, groups)), "blocks": rows}
