"""pass@k against every subset of samples, and its error against what is known of means."""

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from looplm.evals.pass_at_k import pass_at_k
from looplm.evals.results import Item, averages


@pytest.mark.parametrize("samples", range(1, 8))
def test_it_is_the_mean_over_all_subsets(samples):
    for passed in range(samples + 1):
        outcomes = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            assert pass_at_k(samples, passed, k) == pytest.approx(fmean(map(any, combinations(outcomes, k))), abs=1e-15)


def test_large_counts_equal_the_product_of_the_paper():
    """Figure 3 of Chen et al. computes 1 - prod(1 - k / (n - c + 1 ... n)), so as not to overflow."""
    for samples, passed, k in ((200, 3, 100), (1000, 1, 10), (2000, 700, 5), (200, 150, 60)):
        product = 1.0 if samples - passed < k else 1 - np.prod(1 - k / np.arange(samples - passed + 1, samples + 1))
        assert pass_at_k(samples, passed, k) == pytest.approx(product, rel=1e-12)


def test_it_is_unbiased():
    """Of a solver that is right with probability p, pass@k is 1 - (1 - p)^k; the mean over all outcomes is exact."""
    p, samples, k = 0.3, 6, 3
    weights = [len(list(combinations(range(samples), c))) * p**c * (1 - p) ** (samples - c) for c in range(samples + 1)]
    expected = sum(weight * pass_at_k(samples, c, k) for c, weight in enumerate(weights))
    assert expected == pytest.approx(1 - (1 - p) ** k, rel=1e-12)


def test_mean_and_error_over_problems():
    counts = [(4, 0), (4, 1), (4, 4), (8, 2), (2, 1)]
    values = np.array([pass_at_k(samples, passed, 2) for samples, passed in counts])
    items = [Item(id=str(number), metrics={"pass@2": value}) for number, value in enumerate(values)]
    (found,) = averages("code", "loops=1", items, ["pass@2"])
    assert found.value == pytest.approx(values.mean())
    resampled = np.random.default_rng(0).choice(values, (100_000, len(values))).mean(1)
    correction = np.sqrt(len(values) / (len(values) - 1))  # the bootstrap divides by n
    assert found.stderr == pytest.approx(resampled.std() * correction, rel=0.01)
    (alone,) = averages("code", "loops=1", items[:1], ["pass@2"])
    assert (alone.value, alone.stderr, found.items) == (0.0, None, 5)


def test_what_cannot_be_estimated_is_refused():
    for samples, passed, k in ((4, 1, 5), (4, 5, 1), (4, 1, 0), (0, 0, 1), (4, -1, 1)):
        with pytest.raises(ValueError, match=rf"pass@{k} cannot be estimated from {samples} samples of which {passed}"):
            pass_at_k(samples, passed, k)
