"""Means over seeds with their intervals, and differences between runs that share a seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.special import stdtr, stdtrit

FEW = 4  # values below which an interval says less than the values themselves


@dataclass(frozen=True)
class Estimate:
    """The mean of n values and its 95% interval, by Student's t; of one value no interval is known."""

    n: int
    mean: float
    low: float | None
    high: float | None


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return math.fsum(values) / len(values)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values."""
    n, middle = len(values), mean(values)
    if n == 1:
        return Estimate(n, middle, None, None)
    half = float(stdtrit(n - 1, 0.975)) * _error(values)
    return Estimate(n, middle, middle - half, middle + half)


def _error(values: Sequence[float]) -> float:
    """The standard error of the mean of at least two values."""
    n, middle = len(values), mean(values)
    return math.sqrt(math.fsum((x - middle) ** 2 for x in values) / (n - 1) / n)


def chance(values: Sequence[float]) -> float | None:
    """How likely a mean as far from 0 would be if it were 0: p of Student's t; None of fewer than `FEW` values.

    Values that are all the same say nothing of how they spread, but for those that are all 0.
    """
    if len(values) < FEW:
        return None
    middle, error = abs(mean(values)), _error(values)
    if not error:
        return None if middle else 1.0
    return 2 * float(stdtr(len(values) - 1, -middle / error))


def holm(chances: Mapping[str, float]) -> dict[str, float]:
    """What is likely by chance, corrected for how many were looked at (Holm)."""
    out: dict[str, float] = {}
    least = 0.0
    for done, (name, p) in enumerate(sorted(chances.items(), key=lambda item: item[1])):
        out[name] = least = max(least, min(1.0, (len(chances) - done) * p))
    return out


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """The mean difference over the seeds that both have; None if they share none.

    What a seed does to both cancels, so this interval is narrower than the two means suggest.
    """
    apart = differences(values, baseline)
    return estimate(apart) if apart else None


def differences(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """Of each seed that both have."""
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline)]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's; None where one of the two does not vary."""
    from scipy.stats import rankdata  # slow to import

    if len({*x}) < 2 or len({*y}) < 2:
        return None
    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


# Of a learning curve: (step, accuracy) pairs.

Curve = Sequence[tuple[float, float]]


def smoothed(values: Sequence[float], parts: int) -> Curve:
    """The curve of the means over equal parts of a run's steps, each at the middle of its part."""
    cuts = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [
        ((begin + 1 + end) / 2, mean(values[begin:end]))
        for begin, end in pairwise(cuts)
        if end > begin
    ]


def plateau(curve: Curve) -> float:
    """The mean of the last three points, of fewer if there are no more."""
    return mean([y for _, y in curve[-3:]])


def area(curve: Curve) -> float:
    """The mean height of the polygon, from the first step to the last."""
    if len(curve) == 1:
        return curve[0][1]
    total = math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(curve))
    return total / (curve[-1][0] - curve[0][0])


def steps_to(curve: Curve, level: float) -> float | None:
    """Where the polygon first reaches a level; None if it does not."""
    if curve[0][1] >= level:
        return curve[0][0]
    for (x, y), (after, higher) in pairwise(curve):
        if higher >= level:
            return x + (after - x) * (level - y) / (higher - y)
    return None
