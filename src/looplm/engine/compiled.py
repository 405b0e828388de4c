"""A block's small work as compiled loops: on a CPU, calls cost more than what they compute.

The functions are plain Python on arrays; `compiled` gives them compiled by numba. Every row is computed by itself, in
one order, whatever runs beside it.
"""

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np

# Sums may be taken in vectors; what is no number stays none.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


def add_normed(
    x: np.ndarray, y: np.ndarray, weight: np.ndarray, eps: float, scale: float, out: np.ndarray
) -> None:  # fmt: skip
    """out = x + scale * y / rms(y) * weight, each [T, D]."""
    size = y.shape[1]
    for row in range(y.shape[0]):
        total = np.float32(0)
        for i in range(size):
            total += y[row, i] * y[row, i]
        factor = np.float32(scale / math.sqrt(total / size + eps))
        for i in range(size):
            out[row, i] = x[row, i] + y[row, i] * factor * weight[i]


def normed(y: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """out = y / rms(y) * weight, each [T, D]."""
    size = y.shape[1]
    for row in range(y.shape[0]):
        total = np.float32(0)
        for i in range(size):
            total += y[row, i] * y[row, i]
        factor = np.float32(1 / math.sqrt(total / size + eps))
        for i in range(size):
            out[row, i] = y[row, i] * factor * weight[i]


def attend(
    heads: np.ndarray, cos: np.ndarray, sin: np.ndarray, tokens: np.ndarray, write: np.ndarray, tables: np.ndarray,
    positions: np.ndarray, page: int, scale: float, out: np.ndarray,
) -> None:  # fmt: skip
    """One token of each of N rows: rotate by halves, write keys and values to their pages, attend up to its position.

    heads: [N, H + 2 G, width], queries, keys and values; turned in place · cos, sin: [N, 1, width], sin negative in its
    first half · tokens: [pages * page, 2 G, width] · write: [N] · tables: [N or 1, P] · out: [N, H, width].
    """
    count, _, width = heads.shape
    groups, half = tokens.shape[1] // 2, width // 2
    queries = heads.shape[1] - 2 * groups
    for row in range(count):
        for head in range(queries + groups):
            for i in range(half):
                first, second = heads[row, head, i], heads[row, head, half + i]
                heads[row, head, i] = first * cos[row, 0, i] + second * sin[row, 0, i]
                heads[row, head, half + i] = second * cos[row, 0, half + i] + first * sin[row, 0, half + i]
        for head in range(2 * groups):
            for i in range(width):
                tokens[write[row], head, i] = heads[row, queries + head, i]
    scores = np.empty(tables.shape[1] * page, dtype=np.float32)
    for row in range(count):
        table = tables[row if tables.shape[0] > 1 else 0]
        seen = positions[row] + 1
        for head in range(queries):
            group = head * groups // queries
            most = np.float32(-np.inf)
            for key in range(seen):
                place, score = table[key // page] * page + key % page, np.float32(0)
                for i in range(width):
                    score += heads[row, head, i] * tokens[place, group, i]
                scores[key] = score * scale
                most = max(most, scores[key])
            total = np.float32(0)
            for key in range(seen):
                scores[key] = np.exp(scores[key] - most)
                total += scores[key]
            for i in range(width):
                out[row, head, i] = 0
            for key in range(seen):
                place, share = table[key // page] * page + key % page, scores[key] / total
                for i in range(width):
                    out[row, head, i] += share * tokens[place, groups + group, i]


def is_installed() -> bool:
    """Whether numba is there, which the `cpu` extra brings."""
    return find_spec("numba") is not None


@cache
def compiled() -> SimpleNamespace:
    """The functions above, compiled at their first call and kept on disk.

    Raises:
        ValueError: without numba.
    """
    try:
        from numba import njit
    except ImportError as error:
        raise ValueError("compiled=True needs numba: pip install 'looplm[cpu]'") from error
    functions: tuple[Callable[..., None], ...] = (add_normed, normed, attend)
    return SimpleNamespace(**{one.__name__: njit(fastmath=_FAST, cache=True)(one) for one in functions})
