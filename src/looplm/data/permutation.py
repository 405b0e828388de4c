"""A seeded order of many rows that needs no memory: a Feistel network with cycle walking."""

from collections.abc import Sequence

import numpy as np

_ROUNDS = 8
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)


def permute(indices: np.ndarray | Sequence[int], size: int, seed: Sequence[int]) -> np.ndarray:
    """Where a permutation of range(`size`) drawn by `seed` (non-negative) sends `indices`; int64, of the same shape.

    A Feistel network permutes the smallest range of 4^k numbers that holds them all; a number sent past `size` is sent
    on until it falls inside (cycle walking), four times in the mean at worst.

    Raises:
        ValueError: if an index is outside range(`size`).
    """
    found = np.atleast_1d(np.asarray(indices, dtype=np.uint64)).copy()
    if size < 1 or (found >= size).any():
        raise ValueError(f"an index to permute lies outside range({size})")
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64)
    outside = np.ones(found.shape, dtype=bool)
    while outside.any():
        found[outside] = _network(found[outside], half, keys)
        outside = found >= size
    return found.astype(np.int64).reshape(np.shape(indices))


def _network(numbers: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(numbers: np.ndarray) -> np.ndarray:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MULTIPLIER
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MULTIPLIER
    return numbers ^ (numbers >> np.uint64(31))
