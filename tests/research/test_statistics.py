"""Against numbers worked out by hand with a table of Student's t."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.research.statistics import (
    Estimate,
    area,
    correlation,
    detectable,
    differences,
    estimate,
    holm,
    in_parts,
    p_value,
    plateau,
    steps_to,
)


def test_correlations_of_numbers_and_of_ranks():
    x = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert correlation(x, [0.0, 0.1, 5.0, 1e3, 1e9], ranks=True) == pytest.approx(1.0)
    assert correlation(x, [2.0, 1.0, 3.0, 5.0, 4.0], ranks=True) == pytest.approx(0.8)
    assert correlation([1, 1, 2, 3], [2, 1, 3, 4], ranks=True) == pytest.approx(0.9486833)
    assert correlation(x, [2.0, 4.0, 6.0, 8.0, 10.0]) == pytest.approx(1.0)
    assert correlation([0.0, 0.0, 3.0], [0.0, 1.0, 2.0]) == pytest.approx(3**0.5 / 2)
    assert correlation(x, [1.0] * 5) is correlation([1.0] * 5, x, ranks=True) is None


def test_the_interval_is_students():
    """Deviation sqrt(5/3), t of 3 degrees of freedom 3.1824."""
    found = estimate([1.0, 2.0, 3.0, 4.0])
    half = 3.182446 * (5 / 3) ** 0.5 / 2
    assert (found.n, found.mean) == (4, 2.5)
    assert (found.low, found.high) == (
        pytest.approx(2.5 - half, abs=1e-6),
        pytest.approx(2.5 + half, abs=1e-6),
    )


def test_of_one_value_no_interval_is_known():
    assert estimate([3.0]) == Estimate(1, 3.0, None, None)


def test_pairs_are_made_by_seed():
    """The differences are 2, 1, 0: deviation 1, t of 2 degrees of freedom 4.3027; seed 7 has no partner."""
    apart = differences({0: 3.0, 1: 5.0, 2: 4.0}, {2: 4.0, 1: 4.0, 0: 1.0, 7: 9.0})
    assert apart == [2.0, 1.0, 0.0]
    assert estimate(apart).high - 1.0 == pytest.approx(4.302653 / 3**0.5, abs=1e-6)
    assert differences({0: 1.0}, {1: 1.0}) == []


def test_p_is_students():
    """Mean 1.5, deviation sqrt(5/3): t is sqrt 5.4, of 3 degrees of freedom, which have a closed form."""
    x = (5.4 / 3) ** 0.5
    beyond = 1 - 2 / math.pi * (math.atan(x) + x / (1 + x * x))
    values = [0.0, 1.0, 2.0, 3.0]
    assert p_value(values) == p_value([-x for x in values]) == pytest.approx(beyond)
    half = estimate([1.0, 2.0, 3.0, 4.0]).high - 2.5
    assert p_value([half + x for x in (-1.5, -0.5, 0.5, 1.5)]) == pytest.approx(0.05)


def test_few_values_or_equal_ones_say_nothing_of_p_value():
    """Accuracies come in steps: two seeds may differ by exactly the same."""
    assert p_value([3.0]) is p_value([0.5, 0.5]) is p_value([1.0, 1.1, 1.0]) is None
    assert p_value([1.0] * 4) is None
    assert p_value([0.0] * 4) == 1.0
    assert p_value([0.55 - 0.5, 0.35 - 0.3, 0.25 - 0.2, 0.45 - 0.4]) is None  # the same, rounded
    assert p_value([0.3 - (0.1 + 0.2), 0.0, 0.0, 0.0]) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_has_no_p_value(bad):
    assert p_value([bad, 1.0, 2.0, 4.0]) is p_value([1.0, 2.0, 4.0, bad]) is None
    assert p_value([bad] * 4) is None


def test_the_more_one_looks_at_the_less_a_small_chance_says():
    found = holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.5})
    assert found == pytest.approx({"b": 0.04, "c": 0.09, "a": 0.09, "d": 0.5})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("n", [2, 3, 5])
def test_what_so_many_values_would_show_is_what_drawn_ones_do(n):
    """Of 20,000 draws around the mean that is named, four in five have a p-value below 5%."""
    values = np.arange(n) - (n - 1) / 2
    shown = detectable(values.tolist())
    drawn = np.random.default_rng(0).normal(shown, values.std(ddof=1), (20_000, n))
    assert (stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05).mean() == pytest.approx(
        0.8, abs=0.01
    )
    half = detectable(values.tolist(), power=0.5)
    assert (
        stats.ttest_1samp(drawn - shown + half, 0.0, axis=1).pvalue < 0.05
    ).mean() == pytest.approx(0.5, abs=0.015)
    assert detectable([1.0]) is detectable([2.0] * n) is None


def test_figures_of_a_curve():
    curve = [(0, 0.0), (10, 1.0), (30, 1.0), (40, 0.4)]
    assert plateau(curve) == pytest.approx(0.8)
    assert plateau(curve[1:2]) == area(curve[1:2]) == 1.0
    assert area(curve) == pytest.approx((5 + 20 + 7) / 40)
    assert steps_to(curve, 0.25) == pytest.approx(2.5)
    assert steps_to(curve, 1.0) == 10
    assert steps_to(curve, 0.0) == 0
    assert steps_to(curve, 1.1) is None
    assert steps_to([curve[0], (5, None), *curve[1:]], 0.25) == pytest.approx(2.5)  # read again


def test_a_curve_of_parts():
    assert in_parts([1.0, 3.0, 5.0, 7.0], 2) == [(1.5, 2.0), (3.5, 6.0)]
    assert in_parts([1.0, 3.0, 5.0], 2) == [(1.5, 2.0), (3.0, 5.0)]
    assert in_parts([1.0, 3.0], 8) == [(1.0, 1.0), (2.0, 3.0)]  # fewer steps than parts
