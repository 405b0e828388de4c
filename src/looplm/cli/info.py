"""`looplm info`: shape and costs of a checkpoint or preset, without loading weights."""

from typing import Any

from looplm.cli.paths import open_checkpoint
from looplm.models.accounting import count_parameters, flops_per_token, kv_bytes_per_token
from looplm.models.presets import PRESETS
from looplm.models.reading import read_layout

_SHOWN = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "prelude_layers",
    "core_layers",
    "coda_layers",
    "loops",
    "norm_placement",
    "norm_in_loop",
    "exit_gate",
    "rope_theta",
    "tie_word_embeddings",
]


def describe(checkpoint: str, loops: str) -> dict[str, Any]:
    """Parameters, config and, for each loop count in `loops` ("1,2,4"), FLOPs and KV bytes of a token."""
    if checkpoint in PRESETS:
        layout, config = "preset", PRESETS[checkpoint]()
    else:
        found, config = read_layout(open_checkpoint(checkpoint, weights=False))
        layout = found.model_type
    return {
        "parameters": count_parameters(config),
        "layout": layout,
        "config": {name: getattr(config, name) for name in _SHOWN},
        "cost": [
            {
                "loops": count,
                "forward_MFLOP_per_token": round(flops_per_token(config, count) / 1e6, 3),
                "kv_bytes_per_token_bf16": kv_bytes_per_token(config, count),
            }
            for count in _counts(loops)
        ],
    }


def _counts(loops: str) -> list[int]:
    try:
        counts = [int(part) for part in loops.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"--loops '{loops}' must be whole numbers of at least 1, joined by commas")
    return counts
