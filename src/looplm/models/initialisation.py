"""How a new model's weights are drawn."""

import math

from torch import Tensor, nn
from transformers import initialization as init

from looplm.models.config import LoopLMConfig
from looplm.models.injection import DiagonalInjection
from looplm.models.mlp import DampedLinear


def initialise(module: nn.Module, config: LoopLMConfig) -> None:
    """What `config` asks for beyond transformers' defaults (normal matrices, unit norms, zero biases)."""
    if isinstance(module, nn.Embedding) and config.embedding_initializer_range is not None:
        init.normal_(module.weight, mean=0.0, std=config.embedding_initializer_range)
    if isinstance(module, DiagonalInjection):
        init.zeros_(module.log_decay)
        init.zeros_(module.step_size)
        init.eye_(module.input_proj)
    if config.init == "takase":
        _takase(module, config)


def _takase(module: nn.Module, config: LoopLMConfig) -> None:
    """Truncated normals, variance 2/(5h); output projections and the SwiGLU's up half 1/(5 h l), l the depth in layers.

    Huginn, arXiv 2502.05171, after Takase et al. 2024; the depth counts the core once a loop.
    """
    wide = math.sqrt(2 / (5 * config.hidden_size))
    narrow = math.sqrt(1 / (5 * config.hidden_size * config.num_hidden_layers))
    if isinstance(module, DampedLinear):
        _truncated(module.weight, narrow)
    elif isinstance(module, nn.Linear | nn.Embedding):
        _truncated(module.weight, wide)


def _truncated(weight: Tensor, std: float) -> None:
    init.trunc_normal_(weight, mean=0.0, std=std, a=-3 * std, b=3 * std)
