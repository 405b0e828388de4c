"""Rotary position embedding (RoFormer, arXiv 2104.09864) in its two pairings."""

from collections.abc import Callable

import torch
from torch import Tensor

from looplm.models.precision import at_least_float32

Tables = tuple[Tensor, Tensor]


def rotary_tables(position_ids: Tensor, head_dim: int, theta: float, form: str, dtype: torch.dtype) -> Tables:
    """cos and sin for positions [B, S], computed in float32.

    form "split_half": [B, 1, S, head_dim], cast to `dtype` (Ouro, Llama), sin negative in its first half; else
    [B, 1, S, head_dim / 2], float32.
    """
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angles = position_ids[:, None, :, None].float() * theta**-exponents
    if form != "split_half":
        return angles.cos(), angles.sin()
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotate_halves(x: Tensor, tables: Tables) -> Tensor:
    """Rotate x [B, H, S, head_dim] with dimension i paired to i + head_dim/2."""
    cos, sin = tables
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def rotate_pairs(x: Tensor, tables: Tables) -> Tensor:
    """Rotate x [B, H, S, head_dim] with dimension 2i paired to 2i + 1, in float32 (Huginn)."""
    cos, sin = tables
    wide = at_least_float32(x)
    even, odd = wide[..., 0::2], wide[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def keep(x: Tensor, tables: Tables) -> Tensor:
    """x itself: positions enter elsewhere, or nowhere."""
    return x


ROTATIONS: dict[str, Callable[[Tensor, Tables], Tensor]] = {
    "split_half": rotate_halves,
    "adjacent": rotate_pairs,
    "learned": keep,
    "none": keep,
}
