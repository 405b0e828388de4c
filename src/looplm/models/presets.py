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


PRESETS: dict[str, Callable[[], LoopLMConfig]] = {"ouro_1_4b": ouro_1_4b, "ouro_2_6b": ouro_2_6b}
