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
from depthgrow.data.classes import TokenClasses
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.head_loss import token_values
from depthgrow.parallel import whole
from depthgrow.student import Layout, Student

FIXED_TOKENS = 4096  # the published study uses 2 x 2048
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
BINS_PER_DECADE = 10
CLASSES = ("document_boundary", "delimiter", "regular", "outlier")
OUTLIER = 5.0  # times the median RMS of all tokens at the same place
LISTED = 8  # outliers named with their text


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
def _hooked(modules: Sequence[nn.Module], see: Callable[[int, tuple[Any, ...], Tensor], None]) -> Iterator[None]:
    """Inside, ``see(i, inputs, output)`` is called after each forward pass of ``modules[i]``."""

    def hook(index: int) -> Callable[..., None]:
        return lambda module, inputs, output: see(index, inputs, output)

    handles = [module.register_forward_hook(hook(i)) for i, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sink_share(attention: Any, h_ND: Tensor, layout: Layout) -> Tensor:
    """Each head's attention weight on its document's first token, per token: [N, H].

    The same kernel mixes an indicator of the first tokens instead of the values.
    """
    q_NHd, k_NGd, v_NGd = attention.project(h_ND, layout)
    first_NGd = layout.first_N[:, None, None].to(v_NGd.dtype).expand_as(v_NGd)
    return layout.attend(q_NHd, k_NGd, first_NGd).unflatten(-1, q_NHd.shape[1:])[..., 0]


class _Stream:
    """What is kept of the residual stream at one place: a few numbers a token, the stream itself is let go."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._parts.setdefault(name, []).append(value.double().cpu())

    def add_scale(self, h_ND: Tensor) -> None:
        peak_N, channel_N = h_ND.abs().max(dim=-1)
        self.add(rms=rms(h_ND), peak=peak_N, channel=channel_N)

    def add_change(self, in_ND: Tensor, out_ND: Tensor) -> None:
        update_N = (out_ND.double() - in_ND.double()).norm(dim=-1) / in_ND.double().norm(dim=-1)
        self.add(angle=angular_distance(in_ND, out_ND), update=update_N)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return torch.cat(self._parts[name]).numpy()

    def change(self) -> dict[str, float]:
        return {"angle": float(self["angle"].mean()), "relative_update": float(self["update"].mean())}

    def scale(
        self, kinds: dict[str, NDArray[np.bool_]], describe_token: Callable[[int], dict[str, Any]]
    ) -> dict[str, Any]:
        """The distribution of the RMS over all tokens and by class, and the outliers by name."""
        values = self["rms"]
        finite = values[np.isfinite(values)]
        outlier = kinds["regular"] & (values > OUTLIER * (np.median(finite) if len(finite) else np.inf))
        members = kinds | {"regular": kinds["regular"] & ~outlier, "outlier": outlier}
        largest = np.flatnonzero(outlier)[np.argsort(-values[outlier])][:LISTED]
        listed = [
            describe_token(int(i))
            | {"rms": float(values[i]), "channel": int(self["channel"][i]), "value": float(self["peak"][i])}
            for i in largest
        ]
        return {
            "rms": {"all": describe(values)} | {k: describe(values[members[k]]) for k in CLASSES},
            "outliers": listed,
        }


@torch.no_grad()
def diagnose(
    student: Student,
    hidden: Callable[..., Tensor],
    documents: TokenizedDocuments,
    classes: TokenClasses,
    *,
    micro_tokens: int,
    device: torch.device,
) -> dict[str, Any]:
    """Per block and per layer: removal (change of CE in nats per token without it), angle (share of pi), relative update;
    per block the RMS of the stream it leaves, over all tokens and by class; per layer each head's attention sink.

    Args:
        hidden: final hidden states of a micro-batch, as evaluation computes them, from ``student``.
        documents: the held-out documents; the fixed batch is taken from their start.
        classes: which of their tokens are special or delimiters.
    """
    groups = list(group_by_length(documents, fixed_batch(documents), micro_tokens))
    batches = [pack(documents, group).to(device) for group in groups]
    seen = _Seen(student, hidden, batches)
    kinds, describe_token = _classify(batches, classes)
    size = student.config.layers_per_block
    return {
        "ce": seen.full,
        "tokens": sum(b.num_targets for b in batches),
        "documents": sum(map(len, groups)),
        "entry": seen.entry.scale(kinds, describe_token),
        "blocks": [
            {
                "block": b,
                "removal": seen.removal(b * size, (b + 1) * size),
                **stream.change(),
                **stream.scale(kinds, describe_token),
            }
            for b, stream in enumerate(seen.blocks)
        ],
        "layers": [
            {"layer": i, "removal": seen.removal(i, i + 1), **stream.change(), "sink": stream["sink"].mean(0).tolist()}
            for i, stream in enumerate(seen.layers)
        ],
    }


class _Seen:
    """One pass over the batches, watched: what each layer and block does to the stream, and ``full``, the CE it ends at."""

    def __init__(self, student: Student, hidden: Callable[..., Tensor], batches: list[MicroBatch]):
        self._hidden, self._batches = hidden, batches
        self._head_VD = whole(student.lm_head.weight.detach())
        self._size = student.config.layers_per_block
        modules = list(student.layers)
        self._attentions: list[Any] = [layer.self_attn for layer in modules]
        self.layers, self.entry = [_Stream() for _ in modules], _Stream()
        self.blocks = [_Stream() for _ in range(student.active_blocks)]
        self._stream_in: list[list[Tensor]] = [[] for _ in modules]  # of every layer, a batch at a time
        with _hooked(modules, self._see_layer), _hooked(self._attentions, self._see_attention):
            self.full = self._cross_entropy()

    def removal(self, start: int, end: int) -> float:
        """Without layers start .. end-1, all their norms included: what entered the first goes into the one after the last."""
        return self._cross_entropy(first=[end] * len(self._batches), stream_ND=self._stream_in[start]) - self.full

    def _cross_entropy(self, **options: list[Any]) -> float:
        """Of all batches; each option lists one value a batch."""
        total = torch.zeros((), dtype=torch.float64, device=self._head_VD.device)
        for number, batch in enumerate(self._batches):
            hidden_ND = self._hidden(batch, **{name: values[number] for name, values in options.items()})
            total += token_values(hidden_ND, self._head_VD, batch.label_N, None).ce_N.double().sum()
        return float(total / sum(b.num_targets for b in self._batches))

    def _see_layer(self, i: int, inputs: tuple[Any, ...], out_ND: Tensor) -> None:
        self.layers[i].add_change(inputs[0], out_ND)
        if i == 0:
            self.entry.add_scale(inputs[0])
        self._stream_in[i].append(inputs[0])
        if i % self._size == self._size - 1:
            block = self.blocks[i // self._size]
            block.add_change(self._stream_in[i - self._size + 1][-1], out_ND)
            block.add_scale(out_ND)

    def _see_attention(self, i: int, inputs: tuple[Any, ...], out_ND: Tensor) -> None:
        h_ND, layout = inputs
        self.layers[i].add(sink=sink_share(self._attentions[i], h_ND, layout)[~layout.first_N])


def _classify(
    batches: list[MicroBatch], classes: TokenClasses
) -> tuple[dict[str, NDArray[np.bool_]], Callable[[int], dict[str, Any]]]:
    """Each token's class, in the order the batches are read, and a function that names one of them."""
    ids = torch.cat([b.ids_N for b in batches]).cpu().numpy()
    lengths = [n for b in batches for n in b.lengths]
    document = np.repeat([i for b in batches for i in b.document_ids], lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    boundary = (position == 0) | np.isin(ids, classes.special_ids)
    delimiter = ~boundary & np.isin(ids, classes.delimiter_ids)

    def describe_token(i: int) -> dict[str, Any]:
        token = int(ids[i])
        return {"text": classes.text(token), "token": token, "document": int(document[i]), "position": int(position[i])}

    return {"document_boundary": boundary, "delimiter": delimiter, "regular": ~(boundary | delimiter)}, describe_token
