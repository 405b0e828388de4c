"""Small models of both families, in float64 unless asked otherwise."""

import torch

from looplm.models import LoopLMConfig, LoopLMForCausalLM


def ouro_like(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object) -> LoopLMForCausalLM:
    torch.manual_seed(seed)
    values = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "core_layers": 2, "loops": 4, "initializer_range": 0.3,
        "max_position_embeddings": 512,
    }  # fmt: skip
    return LoopLMForCausalLM(LoopLMConfig(**(values | changes))).to(dtype).eval()


def huginn_like(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object) -> LoopLMForCausalLM:
    return ouro_like(
        seed, dtype, prelude_layers=1, coda_layers=2, norm_placement="sandwich_dual", norm_in_loop=False,
        injection="concat", state_init="normal", exit_gate=False, rope="adjacent", qk_bias=True,
        tie_word_embeddings=True, **changes,
    )  # fmt: skip
