"""Whether a difference is real: paired tests, intervals and spreads, of what was measured on the same items."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Side = Literal["two-sided", "greater", "less"]
Numbers = Sequence[float] | np.ndarray
_AT_ONCE = 2**22  # numbers that the bootstrap holds at a time


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate between the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class PairedT:
    """A mean difference with its two-sided interval, Student's t of it, and the p of the side that was asked."""

    difference: Interval
    t: float
    freedom: int
    p: float


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """Items that only one of two got right, and three p that this would be so uneven by chance, all two-sided.

    exact: binomial; never too small · mid_p: the exact one with half the weight of what was seen, for what the exact
    one lacks in power · chi_square: (a - b)² / (a + b) without correction, for 25 such items and more.
    """

    only_a: int
    only_b: int
    exact: float
    mid_p: float
    chi_square: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The mean of runs that differ by their seed alone, and their standard deviation (of one run, None)."""

    mean: float
    deviation: float | None
    runs: int


def paired_t(a: Numbers, b: Numbers, confidence: float = 0.95, side: Side = "two-sided") -> PairedT:
    """The t-test of a - b, item by item; "greater" asks whether `a` is more.

    Where all differences are one number there is no noise to compare with: p is 1 for zero, else 0 or (of the other
    side) 1, and t is infinite.

    Raises:
        ValueError: for less than two pairs, unequal counts, or what is no number.
    """
    differences = _differences(a, b)
    mean, count = float(differences.mean()), len(differences)
    error = float(differences.std(ddof=1)) / count**0.5
    t = mean / error if error else float(np.copysign(np.inf, mean)) if mean else 0.0
    reach = float(stats.t.ppf((1 + _share(confidence)) / 2, count - 1)) * error
    return PairedT(
        difference=Interval(value=mean, low=mean - reach, high=mean + reach), t=t, freedom=count - 1,
        p=_p_of_t(t, count - 1, side) if error or mean else 1.0,
    )  # fmt: skip


def mcnemar(a: Numbers, b: Numbers) -> McNemar:
    """Of items marked 1 or 0 by two models: whether one gets more of those right that the other misses.

    Raises:
        ValueError: for marks other than 0 and 1, unequal counts, or no item.
    """
    differences = _differences(a, b, least=1)
    if not is_binary(a) or not is_binary(b):
        raise ValueError("McNemar's test takes marks of 0 and 1; compare others by paired_t")
    only_a, only_b = int((differences > 0).sum()), int((differences < 0).sum())
    odd = only_a + only_b
    if not odd:
        return McNemar(only_a=0, only_b=0, exact=1.0, mid_p=1.0, chi_square=1.0)
    fewer = min(only_a, only_b)
    tail, seen = stats.binom.cdf(fewer, odd, 0.5), stats.binom.pmf(fewer, odd, 0.5)
    return McNemar(
        only_a=only_a, only_b=only_b, exact=min(1.0, float(2 * tail)), mid_p=min(1.0, float(2 * tail - seen)),
        chi_square=float(stats.chi2.sf((only_a - only_b) ** 2 / odd, 1)),
    )  # fmt: skip


def bootstrap_difference(
    a: Numbers, b: Numbers, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:  # fmt: skip
    """The mean of a - b, and the percentiles of it over draws of as many items with replacement, fixed by `seed`.

    Raises:
        ValueError: for less than two pairs, unequal counts, or what is no number.
    """
    differences = _differences(a, b)
    found = stats.bootstrap(
        (differences,), np.mean, n_resamples=resamples, confidence_level=_share(confidence), method="percentile",
        batch=max(1, _AT_ONCE // len(differences)), rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Interval(value=float(differences.mean()), low=float(found.low), high=float(found.high))


def wilson(right: int, total: int, confidence: float = 0.95) -> Interval:
    """An accuracy with Wilson's interval, which stays between 0 and 1 and holds for few items, too.

    Raises:
        ValueError: unless 0 <= right <= total and total >= 1.
    """
    if not 0 <= right <= total or total < 1:
        raise ValueError(f"an accuracy needs 0 <= right <= total and an item at least, got {right} of {total}")
    found = stats.binomtest(right, total).proportion_ci(_share(confidence), method="wilson")
    return Interval(value=right / total, low=float(found.low), high=float(found.high))


def over_seeds(values: Numbers) -> Spread:
    """The mean and the standard deviation (of a sample: n - 1) of one value for each seed.

    Raises:
        ValueError: for no value, or what is no number.
    """
    runs = _finite(values)
    if not len(runs):
        raise ValueError("a mean over seeds needs a value at least")
    deviation = float(runs.std(ddof=1)) if len(runs) > 1 else None
    return Spread(mean=float(runs.mean()), deviation=deviation, runs=len(runs))


def holm(ps: Sequence[float]) -> list[float]:
    """Each p as it is after so many tests, by Holm's step-down method, in the order given.

    Of the p below a level, the chance that any is false is at most that level, however the tests depend on each other.
    """
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[place]))
        adjusted[place] = worst
    return adjusted


def is_binary(marks: Numbers) -> bool:
    """Whether every mark is 0 or 1."""
    return bool(np.isin(np.asarray(marks, dtype=np.float64), (0.0, 1.0)).all())


def _p_of_t(t: float, freedom: int, side: Side) -> float:
    if side == "two-sided":
        return float(2 * stats.t.sf(abs(t), freedom))
    return float(stats.t.sf(t if side == "greater" else -t, freedom))


def _differences(a: Numbers, b: Numbers, least: int = 2) -> np.ndarray:
    first, second = _finite(a), _finite(b)
    if len(first) != len(second):
        raise ValueError(f"paired tests need both values of every item, got {len(first)} and {len(second)}")
    if len(first) < least:
        raise ValueError(f"paired tests need {least} items at least, got {len(first)}")
    return first - second


def _finite(values: Numbers) -> np.ndarray:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ValueError("statistics need one row of finite numbers; leave out or mark what is none")
    return found


def _share(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1, such as 0.95")
    return confidence
