"""What a looped model costs as a function of its loops: parameters, FLOPs and key/value bytes per token."""

import torch

from looplm.models.causal_lm import LoopLMForCausalLM
from looplm.models.config import LoopLMConfig

# How many widths the injection's matrix reads: cat[state, inputs], or the inputs.
_INJECTED_WIDTHS = {"none": 0, "add": 0, "concat": 2, "diagonal": 1}


def count_parameters(config: LoopLMConfig) -> int:
    """Distinct parameters of the model that `config` describes; nothing is allocated."""
    with torch.device("meta"):
        model = LoopLMForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(config: LoopLMConfig, loops: int | None = None, context_length: int = 0) -> int:
    """Forward FLOPs of one token (two per multiply-add) that attends to `context_length` tokens.

    Matrix products only: projections, MLP, injection, gate, head and, for a context, the attention scores and their
    sum. What a call pays once whatever its tokens (the loop's embedding) is left out.
    """
    loops = config.loops if loops is None else loops
    part = flops_by_part(config, context_length)
    injections = 1 if config.inject_once else loops
    once = part["prelude"] + part["coda"] + part["head"]
    return once + loops * (part["core"] + part["gate"]) + injections * part["injection"]


def flops_by_part(config: LoopLMConfig, context_length: int = 0) -> dict[str, int]:
    """Forward FLOPs of one token in one visit of the prelude, injection, core (one loop), gate, coda and head."""
    attended = 4 * context_length * config.num_attention_heads * config.head_dim
    layer = 2 * _layer_weights(config) + attended
    return {
        "prelude": config.prelude_layers * layer,
        "injection": 2 * _INJECTED_WIDTHS[config.injection] * config.hidden_size**2,
        "core": config.core_layers * layer,
        "gate": 2 * config.hidden_size if config.exit_gate else 0,
        "coda": config.coda_layers * layer,
        "head": 2 * config.hidden_size * config.vocab_size,
    }


def kv_bytes_per_token(config: LoopLMConfig, loops: int | None = None, dtype: torch.dtype = torch.bfloat16) -> int:
    """Key and value bytes that one token keeps when every loop has a slot of its own."""
    loops = config.loops if loops is None else loops
    return config.slots(loops) * 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize


def _layer_weights(config: LoopLMConfig) -> int:
    attention = 2 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    matrices = 3 if config.mlp == "swiglu" else 2
    return attention + matrices * config.hidden_size * config.intermediate_size
