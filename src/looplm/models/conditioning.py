"""Telling the core which loop it is in: a sinusoidal embedding of the loop's number, projected and added."""

import torch
from torch import Tensor, nn

from looplm.models.config import LoopLMConfig
from looplm.models.mlp import DampedLinear


class LoopEmbedding(nn.Module):
    """state + W sin/cos(loop): any loop count has an embedding, also beyond the trained ones."""

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__()
        self.frequencies = (config.hidden_size + 1) // 2
        self.proj = DampedLinear(2 * self.frequencies, config.hidden_size, bias=False)

    def forward(self, state: Tensor, loop: int) -> Tensor:
        """state [B, S, D] at 1-based `loop` -> [B, S, D]."""
        steps = torch.arange(self.frequencies, device=state.device, dtype=torch.float32) / self.frequencies
        angles = loop * 10_000.0**-steps
        return state + self.proj(torch.cat([angles.sin(), angles.cos()]).to(state.dtype))


class NoLoopEmbedding(nn.Module):
    """Every loop alike."""

    def forward(self, state: Tensor, loop: int) -> Tensor:
        """state [B, S, D], untouched."""
        return state
