"""Random states that depend on a seed and a token's position alone: never on batch, order, chunking or cache."""

import math

import torch
from torch import Tensor

_LIMIT = 3.0  # the truncated normal's cut, in standard deviations
_BELOW = math.erfc(_LIMIT / math.sqrt(2)) / 2  # probability of a normal below -3
_SEED, _STREAM = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


def position_noise(
    position_ids: Tensor, size: int, std: float, seed: int | Tensor, stream: int | Tensor = 0
) -> Tensor:  # fmt: skip
    """Truncated-normal noise [B, S, size], float32, for positions [B, S]; seed and stream as in `position_bits`.

    A normal of standard deviation `std` cut at three of them.
    """
    bits = position_bits(position_ids, size, seed, stream)
    uniform = _shift(bits, 40).float() * 2**-24 + 2**-25
    between = _BELOW + uniform * (1 - 2 * _BELOW)
    return torch.erfinv(2 * between - 1) * (math.sqrt(2) * std)


def position_gumbel(position_ids: Tensor, size: int, seed: int | Tensor, stream: int | Tensor) -> Tensor:
    """Standard Gumbel noise [B, S, size], float64, for positions [B, S]; seed and stream as in `position_bits`."""
    return -torch.log(-torch.log(position_uniform(position_ids, size, seed, stream)))


def position_uniform(position_ids: Tensor, size: int, seed: int | Tensor, stream: int | Tensor) -> Tensor:
    """Numbers strictly between 0 and 1 [..., size], float64; arguments as in `position_bits`."""
    return _shift(position_bits(position_ids, size, seed, stream), 11).double() * 2**-53 + 2**-54


def position_bits(position_ids: Tensor, size: int, seed: int | Tensor, stream: int | Tensor) -> Tensor:
    """64 random bits [..., size], int64, of positions [B, S] or [B] under a seed and a stream, or one each a row [B].

    Every number is a hash of (seed, stream, position, channel), so nothing is stored, no order of drawing matters, and
    the cost does not depend on the position. Stream 0 is the start state, 1 and up the loops; who draws for another
    purpose takes a negative one.
    """
    channels = torch.arange(size, device=position_ids.device)
    axes = (1,) * position_ids.ndim
    key = _times(seed, _SEED, axes) + _times(stream, _STREAM, axes)
    if isinstance(key, int):
        key = _signed(key)
    counter = position_ids.long()[..., None] * _signed(0xA0761D6478BD642F) + channels * _signed(0xE7037ED1A0B428DB)
    return _mix(_mix(counter + key) + key)


def _times(value: int | Tensor, factor: int, axes: tuple[int, ...]) -> int | Tensor:
    """The int64 product, [B, *axes] for a tensor [B]; it wraps alike in both forms."""
    if isinstance(value, Tensor):
        return value.long().view(-1, *axes) * _signed(factor)
    return _signed(value * factor)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, whose products wrap: every input bit reaches every output bit."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right (int64's own keeps the sign)."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
