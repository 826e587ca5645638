"""Uncertainty: a paired bootstrap over held-out documents within a seed, a t-interval across seeds.

A mean by token is a ratio of sums over documents, so documents are resampled and the ratio is formed anew; arms are
paired by drawing the same documents for all of them. The interval says how far the result depends on which documents
were held out. It says nothing of seeds; `across_seeds` does, from one value a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

DRAWS = 10_000
_SEEDS = np.arange(2, 10_000)
HALF_WIDTHS = stats.t.ppf(0.975, _SEEDS - 1) / np.sqrt(
    _SEEDS
)  # of the t-interval of 2 .. 9,999 seeds, in units of the std


@dataclass(frozen=True)
class Estimate:
    """A value with its central 95 % interval, in nats per token."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def paired_bootstrap(
    tokens: NDArray[np.int64],
    sums: Mapping[str, NDArray[np.float64]],
    contrast: Mapping[str, float],
    *,
    over: Mapping[str, float] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Estimate:
    """Estimate sum_arm contrast[arm] * (sum of the arm's losses / sum of tokens) with a 95 % percentile interval.

    Args:
        tokens: target tokens of each document; sums: per arm, the summed loss of each document, same order.
        contrast: weight per arm, e.g. {'post-grow': 1, 'pre-grow': -1}.
        over: a second contrast to divide by instead of the tokens: one effect as a share of another.

    Raises:
        ValueError: a loss is not finite: a comparison with a missing value has no answer.
    """
    combined = np.sum([weight * sums[arm] for arm, weight in contrast.items()], axis=0)
    divisor = tokens if over is None else np.sum([weight * sums[arm] for arm, weight in over.items()], axis=0)
    if not (np.isfinite(combined).all() and np.isfinite(divisor).all()):
        raise ValueError("invalid comparison: a loss is not finite")
    rng = np.random.default_rng(seed)
    count = len(tokens)
    values = np.empty(draws)
    for start in range(0, draws, 1000):
        size = min(1000, draws - start)
        times = rng.multinomial(count, np.full(count, 1 / count), size=size)
        values[start : start + size] = (times @ combined) / (times @ divisor)
    low, high = np.quantile(values, [0.025, 0.975])
    return Estimate(float(combined.sum() / divisor.sum()), float(low), float(high))


@dataclass(frozen=True)
class SeedSummary:
    """One contrast over seeds, in nats per token: mean, 95 % t-interval, sample std, how many seeds fall on each side of
    zero, how many would make the interval's half-width ``target``, and from how many on the interval would leave out zero
    if mean and std stayed as they are (over 9,999: never, as far as can be told)."""

    values: list[float]
    mean: float
    low: float
    high: float
    std: float
    negative: int
    positive: int
    target: float
    needed: int
    settles: int


def across_seeds(values: Sequence[float], *, target: float = 0.005) -> SeedSummary:
    """mean +- t(0.975, n-1) * std / sqrt(n), for values that differ by seed only.

    Raises:
        ValueError: fewer than two values, or one that is not finite.
    """
    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        raise ValueError("an interval across seeds needs at least two seeds")
    if not np.isfinite(array).all():
        raise ValueError("invalid comparison: a seed's value is not finite")
    mean, std, count = float(array.mean()), float(array.std(ddof=1)), len(array)
    half = float(HALF_WIDTHS[count - 2]) * std
    sides = (int((array < 0).sum()), int((array > 0).sum()))
    needed, settles = _first(HALF_WIDTHS * std <= target), _first(HALF_WIDTHS * std < abs(mean))
    return SeedSummary([float(v) for v in array], mean, mean - half, mean + half, std, *sides, target, needed, settles)


def _first(enough: NDArray[np.bool_]) -> int:
    """The least number of seeds at which ``enough`` holds; 10,000 where it never does."""
    found = np.flatnonzero(enough)
    return int(_SEEDS[found[0]]) if len(found) else len(_SEEDS) + 2


def mean_over_seeds(arrays: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Per-document sums averaged over seeds; NaN in one is NaN in the mean."""
    return np.mean(np.stack(arrays), axis=0)
