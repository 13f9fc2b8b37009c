"""Means over seeds with intervals, paired differences between runs, figures of a curve."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from scipy import optimize, stats

FEW = 4  # with fewer values an interval says less than the values themselves
Curve = Sequence[tuple[float, float]]
"""(step, accuracy) pairs"""


@dataclass(frozen=True)
class Estimate:
    """The mean of n values and its 95% interval by Student's t (None of a single value)."""

    n: int
    mean: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """The mean, with its interval, of one or more independent values."""
    n, mean = len(values), fmean(values)
    if n == 1:
        return Estimate(n, mean, None, None)
    half = float(stats.t.ppf(0.975, n - 1) * stats.sem(values))
    return Estimate(n, mean, mean - half, mean + half)


def differences(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """Value minus baseline for each seed that both have, so that effects of the seed cancel."""
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline)]


def p_value(values: Sequence[float]) -> float | None:
    """The two-sided p of Student's t against a mean of 0; None for fewer than `FEW` finite values.

    Values that are all the same say nothing about their spread: None, or 1 if all are 0.
    """
    if len(values) < FEW or not np.isfinite(values).all():
        return None
    same = {*np.round(values, 12).tolist()}  # but for the last digits
    if len(same) == 1:
        return None if same.pop() else 1.0
    test: Any = stats.ttest_1samp(values, 0.0)
    return float(test.pvalue)


def detectable(values: Sequence[float], power: float = 0.8) -> float | None:
    """The true mean that so many values of this spread would show, in a share `power` of all cases.

    To show it is to have a p-value below 5%. None of a single value, or of values without a spread.
    """
    n = len(values)
    if n == 1 or not (spread := float(stats.sem(np.round(values, 12)))):
        return None
    bound, parts = stats.t.ppf(0.975, n - 1), 2000
    # sample deviations over the true one, equally likely ones: scipy's noncentral t fails here
    spreads = np.sqrt(stats.chi2.ppf((np.arange(parts) + 0.5) / parts, n - 1) / (n - 1))
    sides = lambda x: stats.norm.cdf(x - bound * spreads) + stats.norm.cdf(-x - bound * spreads)
    at: Any = optimize.brentq(lambda x: np.mean(sides(x)) - power, 0.0, 50.0)
    return spread * float(at)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for their number by Holm's step-down method."""
    corrected, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        corrected[name] = largest = max(largest, min(1.0, (len(p_values) - rank) * p))
    return corrected


def finite(value: Any) -> Any:
    """The value of JSON with None for numbers in it that are not finite, which JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean(x: np.ndarray) -> float | None:
    """The mean of an array; None if it is empty."""
    return float(np.mean(x, dtype=np.float64)) if x.size else None


def correlation(x: Sequence[float], y: Sequence[float], *, ranks: bool = False) -> float | None:
    """Pearson's correlation, or Spearman's with `ranks`; None if one of the two is constant."""
    if len({*map(float, x)}) < 2 or len({*map(float, y)}) < 2:
        return None
    found: Any = (stats.spearmanr if ranks else stats.pearsonr)(x, y)
    return float(found.statistic)


def in_parts(values: Sequence[float], parts: int) -> Curve:
    """Means over up to `parts` equal stretches of a run's steps, each at its stretch's middle."""
    cuts = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [((a + 1 + b) / 2, fmean(values[a:b])) for a, b in pairwise(cuts) if b > a]


def plateau(curve: Curve) -> float:
    """The mean height of the last three points, or of all if there are fewer."""
    return fmean(y for _, y in curve[-3:])


def area(curve: Curve) -> float:
    """The mean height of the curve, linear between points, from the first step to the last."""
    steps, heights = zip(*curve, strict=True)
    if len(curve) == 1:
        return heights[0]
    return float(np.trapezoid(heights, steps)) / (steps[-1] - steps[0])


def steps_to(curve: Curve, level: float) -> float | None:
    """The step at which the curve, linear between points, first reaches a level; None if never."""
    curve = [(x, y) for x, y in curve if y is not None]
    if curve and curve[0][1] >= level:
        return curve[0][0]
    for (x, y), (after, higher) in pairwise(curve):
        if higher >= level:
            return x + (after - x) * (level - y) / (higher - y)
    return None
