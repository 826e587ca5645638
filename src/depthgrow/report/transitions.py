"""What happens to the training loss and the gradients where blocks are appended.

With w = the smoothing window, loss(t) the training loss of step t of the new phase (counted from 1), n its length:

    baseline   mean loss of the last w steps before the transition
    jump       mean loss of the first w steps - baseline
    peak       largest mean loss of any w consecutive steps - baseline
    auc p      mean over the first p*n steps of (loss - baseline): the area over the baseline, per step
    recovery   the first step s >= w at which the mean loss of the steps s-w+1 .. s is back at the baseline

w is 0.4 % of the phase, the published 200 of 50,000 steps, but at least 10 steps; p is 2 % and 10 %, the published 1,000
and 5,000 of 50,000. Losses are the objective's, in nats per token; nothing is interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from depthgrow.report.load import Phase, Run

SMOOTHING = 0.004
MIN_SMOOTHING = 10
AUC_SHARES = (0.02, 0.1)


def window(steps: int) -> int:
    """Steps of the smoothing window of a phase of ``steps``."""
    return min(steps, max(MIN_SMOOTHING, round(SMOOTHING * steps)))


def transition_metrics(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """The metrics above from the losses of every step of the phase before and of the phase after.

    ``recovery`` is None where the phase ends first.
    """
    old, new = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    w = window(len(new))
    baseline = float(old[-w:].mean())
    above = new - baseline
    smooth = np.convolve(above, np.full(w, 1 / w), mode="valid")  # smooth[i] ends with step i + w
    back = np.flatnonzero(smooth <= 0)
    return {
        "window": w,
        "baseline": baseline,
        "jump": float(smooth[0]),
        "peak": float(smooth.max()),
        "auc": {f"{share:.0%}": float(above[: max(1, round(share * len(new)))].mean()) for share in AUC_SHARES},
        "recovery": int(back[0]) + w if len(back) else None,
        "steps": len(new),
    }


def transitions(run: Run) -> list[dict[str, Any]]:
    """One entry for each pair of finished phases between which blocks were appended."""
    found = []
    for before, after in pairwise(run.phases):
        if after.active > before.active:
            losses = (_column(before, "loss"), _column(after, "loss"))
            blocks = {"from": before.active, "to": after.active}
            found.append(blocks | transition_metrics(*losses) | {"grad_norms": _gradients(before, after)})
    return found


def _column(phase: Phase, name: str) -> list[float]:
    """A value of every step; NaN where its line was lost or has none."""
    found = {record["step"]: record.get(name) for record in phase.metrics if record["kind"] == "train"}
    return [np.nan if (value := found.get(step)) is None else value for step in range(1, phase.steps + 1)]


def _gradients(before: Phase, after: Phase) -> dict[str, dict[str, float | None]]:
    """Of each part, its mean gradient norm before clipping over w steps: the last before the transition, the first after
    it, the last of the phase. A part that is not trained then has none."""
    w = window(after.steps)
    train = [record for record in after.metrics if record["kind"] == "train"]
    parts = [name for name in train[0] if name.startswith("grad_norm ")] if train else []
    result = {}
    for name in parts:
        old, new = _column(before, name)[-w:], _column(after, name)
        means = [float(np.mean(values)) for values in (old, new[:w], new[-w:])]
        result[name.removeprefix("grad_norm ")] = dict(
            zip(("before", "after", "end"), [m if np.isfinite(m) else None for m in means], strict=True)
        )
    return result


def smoothed(run: Run, name: str, points: int = 120) -> list[dict[str, list[float]]]:
    """Of each phase, ``points`` (or fewer) bin means of a train column over the arm's steps; gaps where it is not there."""
    curves, offset = [], 0
    for phase in run.phases:
        values = np.asarray(_column(phase, name), dtype=float)
        edges = np.unique(np.linspace(0, len(values), min(points, len(values)) + 1).round().astype(int))
        means = [float(values[a:b].mean()) for a, b in pairwise(edges)]
        middles = [offset + (a + b + 1) / 2 for a, b in pairwise(edges)]
        kept = [(x, y) for x, y in zip(middles, means, strict=True) if np.isfinite(y)]
        curves.append({"x": [x for x, _ in kept], "y": [y for _, y in kept]})
        offset += phase.steps
    return curves
