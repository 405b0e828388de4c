"""Configurations of published looped models, by name."""

from collections.abc import Callable
from typing import Any

from looplm.models.config import LoopLMConfig


def ouro_1_4b() -> LoopLMConfig:
    """Ouro-1.4B (arXiv 2510.25741): 24 layers looped 4 times, 1,434,652,673 parameters."""
    return LoopLMConfig(
        vocab_size=49152, hidden_size=2048, intermediate_size=5632, num_attention_heads=16, core_layers=24, loops=4,
        rope_theta=1e6, max_position_embeddings=65536, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def ouro_2_6b() -> LoopLMConfig:
    """Ouro-2.6B: the 24-layer checkpoint with its layers duplicated to 48, 2,667,974,657 parameters."""
    values: dict[str, Any] = ouro_1_4b().to_dict() | {"core_layers": 48}
    return LoopLMConfig(**values)


def huginn_3_5b() -> LoopLMConfig:
    """Huginn-0125 (arXiv 2502.05171): 2 prelude, 4 core and 2 coda layers, 32 loops, 3,564,976,800 parameters."""
    return LoopLMConfig(
        vocab_size=65536,
        hidden_size=5280,
        intermediate_size=17920,
        num_attention_heads=55,
        prelude_layers=2,
        core_layers=4,
        coda_layers=2,
        loops=32,
        norm_placement="sandwich_dual",
        norm_in_loop=False,
        injection="concat",
        state_init="normal",
        exit_gate=False,
        rope="adjacent",
        rope_theta=5e4,
        max_position_embeddings=4096,
        qk_bias=True,
        embed_scale=5280**0.5,
        init="takase",
        tie_word_embeddings=True,
        bos_token_id=65504,
        eos_token_id=65505,
        pad_token_id=65509,
    )


PRESETS: dict[str, Callable[[], LoopLMConfig]] = {
    "ouro_1_4b": ouro_1_4b,
    "ouro_2_6b": ouro_2_6b,
    "huginn_3_5b": huginn_3_5b,
}
