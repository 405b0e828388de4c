"""How the prelude's output enters the loop before each application of the core."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from looplm.models.config import LoopLMConfig


class NoInjection(nn.Module):
    """The state alone (Ouro)."""

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        """state [B, S, D], untouched."""
        return state


class AddInjection(nn.Module):
    """state + inputs."""

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        """state and inputs [B, S, D] -> [B, S, D]."""
        return state + inputs


class ConcatInjection(nn.Module):
    """A linear adapter on cat[state, inputs] (Huginn, arXiv 2502.05171)."""

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__()
        self.adapter = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        """state and inputs [B, S, D] -> [B, S, D]."""
        return self.adapter(torch.cat([state, inputs], dim=-1))


class DiagonalInjection(nn.Module):
    """exp(-dt * A) * state + dt * B(inputs), with dt = softplus(.) and A = exp(.) > 0 per channel.

    The state's factor lies in (0, 1), so the injection alone has spectral radius below 1 (Parcae, arXiv 2604.12946).
    B starts as the identity, dt as softplus(0) and A as 1.
    """

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.zeros(config.hidden_size))
        self.step_size = nn.Parameter(torch.zeros(config.hidden_size))
        self.input_proj = nn.Parameter(torch.eye(config.hidden_size))

    def decay(self) -> Tensor:
        """The state's factor [D], in (0, 1)."""
        return torch.exp(-F.softplus(self.step_size) * torch.exp(self.log_decay))

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        """state and inputs [B, S, D] -> [B, S, D]."""
        return state * self.decay() + F.softplus(self.step_size) * F.linear(inputs, self.input_proj)


def build_injection(config: LoopLMConfig) -> nn.Module:
    """The injection that `config.injection` names."""
    if config.injection == "concat":
        return ConcatInjection(config)
    if config.injection == "diagonal":
        return DiagonalInjection(config)
    return AddInjection() if config.injection == "add" else NoInjection()
