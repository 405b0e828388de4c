"""Tests and intervals against scipy's own, against formulas and against numbers worked by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from looplm.evals.statistics import bootstrap_difference, holm, mcnemar, over_seeds, paired_t, wilson

# Student's sleep data: hours gained by ten patients under two drugs; t = 4.0621 on 9 degrees, p = 0.002833.
FIRST = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
SECOND = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]


def test_paired_t_on_students_own_data():
    found = paired_t(FIRST, SECOND)
    assert found.t == pytest.approx(4.0621, abs=1e-4)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    assert found.freedom == 9
    assert [found.difference.low, found.difference.high] == pytest.approx([0.7001, 2.4599], abs=1e-4)
    assert found.difference.value == pytest.approx(1.58)


@pytest.mark.parametrize("side", ["two-sided", "greater", "less"])
@pytest.mark.parametrize("seed", range(3))
def test_paired_t_is_scipys(side, seed):
    a, b = np.random.default_rng(seed).normal(size=(2, 30 + seed))
    found, theirs = paired_t(a, b, 0.9, side), stats.ttest_rel(a, b, alternative=side)
    assert [found.t, found.p] == pytest.approx([theirs.statistic, theirs.pvalue], rel=1e-12)
    ends = stats.ttest_rel(a, b).confidence_interval(0.9)
    assert [found.difference.low, found.difference.high] == pytest.approx([ends.low, ends.high], rel=1e-12)


def test_differences_without_any_noise():
    same, more = paired_t([1, 2, 3], [1, 2, 3]), paired_t([2, 3, 4], [1, 2, 3])
    assert (same.t, same.p, same.difference.low, same.difference.high) == (0.0, 1.0, 0.0, 0.0)
    assert (more.t, more.p, more.difference.low, more.difference.high) == (math.inf, 0.0, 1.0, 1.0)
    assert paired_t([2, 3], [1, 2], side="less").p == 1.0
    assert paired_t([1, 2], [2, 3], side="less").p == 0.0


def marks(both: int, only_a: int, only_b: int, neither: int):
    return [1] * (both + only_a) + [0] * (only_b + neither), [1] * both + [0] * only_a + [1] * only_b + [0] * neither


def test_mcnemar_by_hand():
    found = mcnemar(*marks(5, 10, 2, 7))
    assert (found.only_a, found.only_b) == (10, 2)
    assert found.exact == pytest.approx(2 * (1 + 12 + 66) / 2**12, rel=1e-12)
    assert found.mid_p == pytest.approx((2 * (1 + 12) + 66) / 2**12, rel=1e-12)
    assert found.chi_square == pytest.approx(math.erfc(math.sqrt(64 / 12 / 2)), rel=1e-12)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 7), (4, 4), (1, 0), (30, 51), (3, 2)])
def test_mcnemar_is_the_binomial_test_of_what_one_alone_got_right(only_a, only_b):
    found, swapped = mcnemar(*marks(3, only_a, only_b, 9)), mcnemar(*reversed(marks(3, only_a, only_b, 9)))
    exact = stats.binomtest(only_a, only_a + only_b).pvalue
    assert found.exact == pytest.approx(exact, rel=1e-9)
    assert (found.exact, found.mid_p, found.chi_square) == (swapped.exact, swapped.mid_p, swapped.chi_square)
    assert found.mid_p <= found.exact
    assert (found.mid_p == 1.0) == (only_a == only_b)


def test_mcnemar_where_both_agree_everywhere():
    found = mcnemar([1, 0, 1], [1, 0, 1])
    assert (found.exact, found.mid_p, found.chi_square) == (1.0, 1.0, 1.0)


def test_the_bootstrap_is_fixed_by_its_seed_and_near_a_plain_one():
    rng = np.random.default_rng(1)
    a, b = rng.exponential(size=(2, 200))
    found = bootstrap_difference(a, b, seed=3)
    assert found == bootstrap_difference(a, b, seed=3)
    assert found != bootstrap_difference(a, b, seed=4)
    plain = [np.mean(rng.choice(a - b, 200)) for _ in range(4_000)]
    assert [found.low, found.high] == pytest.approx(np.quantile(plain, [0.025, 0.975]), abs=0.02)
    assert found.value == pytest.approx(np.mean(a) - np.mean(b))
    flat = bootstrap_difference([2, 3], [1, 2])
    assert (flat.value, flat.low, flat.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("right", "total"), [(8, 10), (0, 5), (5, 5), (733, 1319)])
def test_wilson_by_its_formula(right, total):
    found, z, p = wilson(right, total), stats.norm.ppf(0.975), right / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    reach = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total**2))
    assert [found.low, found.high] == pytest.approx([middle - reach, middle + reach], abs=1e-12)
    assert found.value == p


def test_a_mean_over_seeds():
    found = over_seeds([0.2, 0.4, 0.9])
    assert (found.mean, found.runs) == (pytest.approx(0.5), 3)
    assert found.deviation == pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 2))
    assert over_seeds([0.3]).deviation is None


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: paired_t([1.0], [2.0]), "2 items at least, got 1"),
        (lambda: paired_t([1, 2], [1, 2, 3]), "got 2 and 3"),
        (lambda: paired_t([1, math.nan], [1, 2]), "finite numbers"),
        (lambda: paired_t([1, 2], [2, 1], confidence=95), "between 0 and 1"),
        (lambda: mcnemar([0.5, 1], [1, 0]), "marks of 0 and 1"),
        (lambda: mcnemar([], []), "1 items at least"),
        (lambda: wilson(3, 2), "got 3 of 2"),
        (lambda: over_seeds([]), "a value at least"),
    ],
)
def test_mistakes_are_named(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()
