"""The norms a block may hold: RMS, LayerNorm, or LayerNorm without affine parameters."""

import torch
from torch import Tensor, nn

from looplm.models.config import LoopLMConfig
from looplm.models.precision import at_least_float32


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, the variance in float32; cast back before the weight, as Ouro does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size], normed."""
        wide = at_least_float32(x)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


def build_norm(config: LoopLMConfig) -> nn.Module:
    """A norm over the model's width, of the kind that `config.norm` names."""
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, elementwise_affine=config.norm == "layer")
