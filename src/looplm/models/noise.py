"""Random states that depend on a seed and a token's position alone: never on batch, order, chunking or cache."""

from functools import lru_cache

import torch
from torch import Tensor

_BLOCK = 64
_LIMIT = 3.0  # the truncated normal's cut, in standard deviations


def position_noise(position_ids: Tensor, size: int, std: float, seed: int, stream: int = 0) -> Tensor:
    """Truncated-normal noise [B, S, size], float32, for positions [B, S]; `stream` 0 is the start state.

    A normal of standard deviation `std` cut at three of them. Every position has its own fixed draw.
    """
    last = int(position_ids.max())
    blocks = [_block(seed, stream, index, size) for index in range(last // _BLOCK + 1)]
    table = torch.cat(blocks).to(position_ids.device)
    return table[position_ids.clamp(min=0)] * std


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # a cached tensor must serve training too
def _block(seed: int, stream: int, index: int, size: int) -> Tensor:
    # An integer mix, so that neighbouring seeds, streams and blocks share no generator state.
    mixed = (seed * 0x9E3779B97F4A7C15 + stream * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB) % 2**63
    generator = torch.Generator().manual_seed(mixed)
    noise = torch.empty(_BLOCK, size)
    return torch.nn.init.trunc_normal_(noise, std=1.0, a=-_LIMIT, b=_LIMIT, generator=generator)
