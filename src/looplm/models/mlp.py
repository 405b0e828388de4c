"""The MLP forms of a block."""

from torch import Tensor, nn
from torch.nn import functional as F

from looplm.models.config import LoopLMConfig


class DampedLinear(nn.Linear):
    """A linear map that depth-aware initialisation draws with a smaller variance; otherwise like any other."""


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.up_proj = DampedLinear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = DampedLinear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GELUMLP(nn.Module):
    """down(gelu(up(x))), the GPT-2 form."""

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = DampedLinear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return self.down_proj(F.gelu(self.up_proj(x)))


MLPS: dict[str, type[nn.Module]] = {"swiglu": SwiGLU, "gelu": GELUMLP}
