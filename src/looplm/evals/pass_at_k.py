"""pass@k: how often at least one of k programs solves a problem, estimated from n of them."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class PassAtK(NamedTuple):
    """The mean over problems, and its standard error: None for one problem."""

    value: float
    stderr: float | None


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), unbiased for k programs when c of n pass (Chen et al. 2021, arXiv 2107.03374, Eq. 1).

    Raises:
        ValueError: if there are fewer samples than k, or than those that passed.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(
            f"pass@{k} cannot be estimated from {samples} samples of which {passed} pass; it takes k or more"
        )
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> PassAtK:
    """Mean pass@k over problems, each given as (samples, passed).

    The standard error is that of a mean of independent problems: it holds what problems differ by, and what the draw of
    samples adds.

    Raises:
        ValueError: without problems, or as `pass_at_k` does.
    """
    if not counts:
        raise ValueError("pass@k is a mean over problems, and there are none")
    values = [pass_at_k(samples, passed, k) for samples, passed in counts]
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return PassAtK(statistics.fmean(values), stderr)
