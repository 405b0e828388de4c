"""Telling the core which loop it is in: a sinusoidal embedding of the loop's number, projected and added."""

import torch
from torch import Tensor, nn

from looplm.models.config import LoopLMConfig
from looplm.models.context import Loop, by_row
from looplm.models.mlp import DampedLinear


class LoopEmbedding(nn.Module):
    """state + W sin/cos(loop): any loop count has an embedding, also beyond the trained ones."""

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__()
        self.frequencies = (config.hidden_size + 1) // 2
        self.proj = DampedLinear(2 * self.frequencies, config.hidden_size, bias=False)

    def forward(self, state: Tensor, loop: Loop) -> Tensor:
        """state [B, ..., D] at 1-based `loop`, one for all rows or one each [B] -> [B, ..., D]."""
        steps = torch.arange(self.frequencies, device=state.device, dtype=torch.float32) / self.frequencies
        number = by_row(loop, state.ndim) if isinstance(loop, Tensor) else loop
        angles = number * 10_000.0**-steps
        return state + self.proj(torch.cat([angles.sin(), angles.cos()], dim=-1).to(state.dtype))


class NoLoopEmbedding(nn.Module):
    """Every loop alike."""

    def forward(self, state: Tensor, loop: Loop) -> Tensor:
        """state [B, S, D], untouched."""
        return state
