"""Ouro's released layout (`ByteDance/Ouro-*`): config keys and tensor names, both ways."""

from typing import Any

from looplm.models.compat import llama
from looplm.models.compat.layout import Layout, TensorTable, check_keys, check_parts, rope_theta
from looplm.models.config import LoopLMConfig

_CONFIG_KEYS = llama.CONFIG_KEYS | {"total_ut_steps": "loops"}
_REQUIRED = [*llama.REQUIRED, "total_ut_steps"]
_FIXED = llama.FIXED | {"use_sliding_window": (False, None), "sliding_window": (None,), "early_exit_step": (None,)}
_IGNORED = llama.IGNORED | {"max_window_layers", "chunk_size"}
_PARTS: dict[str, Any] = llama.PARTS | {"norm_placement": "sandwich_branch", "exit_gate": True}
_LAYER_NAMES = llama.LAYER_NAMES | {
    "attention_norms.branch": "input_layernorm_2",
    "mlp_norms.branch": "post_attention_layernorm_2",
}
_GLOBAL_NAMES = llama.GLOBAL_NAMES | {
    "model.exit_gate.weight": "model.early_exit_gate.weight",
    "model.exit_gate.bias": "model.early_exit_gate.bias",
}


def read_config(values: dict[str, Any]) -> LoopLMConfig:
    """Our config for Ouro's config.json; a key that changes the computation and is not supported is refused."""
    if values.get("early_exit_threshold", 1.0) not in (1.0, None):
        threshold = f"early_exit_threshold={values['early_exit_threshold']}"
        raise ValueError(f"{threshold} is not read from a config; set it to 1.0 and ask for exits by q at run time")
    known = {*_CONFIG_KEYS, *_IGNORED, "early_exit_threshold", "layer_types"}
    check_keys("Ouro", values, _REQUIRED, _FIXED, known)
    if set(values.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise ValueError(f"the Ouro config has layer_types={values['layer_types']!r}, which is not supported")
    ours = {our: values[key] for key, our in _CONFIG_KEYS.items() if key in values}
    return LoopLMConfig(**ours, rope_theta=rope_theta("Ouro", values), **_PARTS, architectures=["LoopLMForCausalLM"])


def write_config(config: LoopLMConfig) -> dict[str, Any]:
    """Ouro's config.json for our config, if our model has Ouro's parts."""
    check_parts("Ouro", config, _PARTS)
    values = {key: getattr(config, ours) for key, ours in _CONFIG_KEYS.items()}
    return values | {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.core_layers,
        "layer_types": ["full_attention"] * config.core_layers,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "early_exit_threshold": 1.0,
        "torch_dtype": str(config.dtype or "float32").removeprefix("torch."),
    }


def tensors(config: LoopLMConfig) -> TensorTable:
    """Ouro's tensor name -> ours, one to one."""
    return llama.named(config, _GLOBAL_NAMES, _LAYER_NAMES)


OURO = Layout(model_type="ouro", read_config=read_config, write_config=write_config, tensors=tensors)
