"""pass@k: how often at least one of k programs solves a problem, estimated from n of them."""

import math


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
