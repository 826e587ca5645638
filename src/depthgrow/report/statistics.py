"""Uncertainty: an interval over held-out documents within a seed, a t-interval across seeds.

A mean by token is a ratio of sums over documents. From ``FEW_DOCUMENTS`` on, documents are resampled and the ratio is formed
anew; arms are paired by drawing the same documents for all of them. The percentile bootstrap of few documents is too narrow (of
2, 4, 8, 24 documents it holds the truth in 50, 80, 87 and 92 % of trials), so below that number the ratio is linearised and
Student's t gives the interval. The interval says how far the result depends on which documents
were held out. It says nothing of seeds; `across_seeds` does, from one value a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

DRAWS = 10_000
FEW_DOCUMENTS = 100
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

    def text(self, sign: str = "+") -> str:
        """'+0.031 ± 0.012', or '+0.031 [+0.022, +0.049]' where one side is longer than the other by more than a fifth.

        Three decimals, and more where the interval's half-width needs them to be told from zero. ``sign`` is '+' or, for
        a size whose side is said in words, ''.
        """
        digits = 3 if self.half_width == 0 else max(3, math.ceil(-math.log10(self.half_width)))
        value, form = self.value, f"{sign}.{digits}f"
        down, up = value - self.low, self.high - value
        if abs(up - down) > 0.2 * min(up, down) and f"{up:.{digits}f}" != f"{down:.{digits}f}":
            return f"{value:{form}} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"
        return f"{value:{form}} ± {self.half_width:.{digits}f}"

    def size(self) -> str:
        """``text`` of the absolute value: how far ahead, where the words say who."""
        if self.value >= 0:
            return self.text("")
        return Estimate(-self.value, -self.high, -self.low).text("")

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def across_documents(
    tokens: NDArray[np.int64],
    sums: Mapping[str, NDArray[np.float64]],
    contrast: Mapping[str, float],
    *,
    over: Mapping[str, float] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Estimate:
    """Estimate R = C / T, C = sum_arm contrast[arm] * (sum of the arm's losses), T = sum of tokens, with a 95 % interval.

    From ``FEW_DOCUMENTS`` on the percentile interval of a bootstrap over documents d. Below, R +- t(0.975, n - 1) * se with
    se = sqrt(n / (n - 1) * sum_d (c_d - R t_d)^2) / |T|, the variance of a ratio estimator to first order (W. G. Cochran,
    Sampling Techniques, 3rd ed., section 6.3).

    Args:
        tokens: target tokens of each document; sums: per arm, the summed loss of each document, same order.
        contrast: weight per arm, e.g. {'post-grow': 1, 'pre-grow': -1}.
        over: a second contrast to divide by instead of the tokens: one effect as a share of another.

    Raises:
        ValueError: a loss is not finite: a comparison with a missing value has no answer; fewer than two documents.
    """
    combined = np.sum([weight * sums[arm] for arm, weight in contrast.items()], axis=0)
    divisor = tokens if over is None else np.sum([weight * sums[arm] for arm, weight in over.items()], axis=0)
    if not (np.isfinite(combined).all() and np.isfinite(divisor).all()):
        raise ValueError("invalid comparison: a loss is not finite")
    count = len(tokens)
    if count < 2:
        raise ValueError("an interval over documents needs at least two of them")
    ratio = float(combined.sum() / divisor.sum())
    if count < FEW_DOCUMENTS:
        error = math.sqrt(count / (count - 1) * ((combined - ratio * divisor) ** 2).sum()) / abs(float(divisor.sum()))
        half = float(HALF_WIDTHS[count - 2]) * math.sqrt(count) * error
        return Estimate(ratio, ratio - half, ratio + half)
    rng = np.random.default_rng(seed)
    values = np.empty(draws)
    for start in range(0, draws, 1000):
        size = min(1000, draws - start)
        times = rng.multinomial(count, np.full(count, 1 / count), size=size)
        values[start : start + size] = (times @ combined) / (times @ divisor)
    low, high = np.quantile(values, [0.025, 0.975])
    return Estimate(ratio, float(low), float(high))


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
