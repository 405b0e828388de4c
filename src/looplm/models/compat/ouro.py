"""Ouro's released layout (`ByteDance/Ouro-*`): config keys and tensor names, both ways."""

from typing import Any

from looplm.models.compat.layout import Layout, TensorTable, check_keys, check_parts
from looplm.models.config import LoopLMConfig

# Ouro's config key -> ours, where the value carries over unchanged.
_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "core_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "initializer_range",
    "total_ut_steps": "loops",
    "tie_word_embeddings": "tie_word_embeddings",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "use_cache": "use_cache",
}
_REQUIRED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "total_ut_steps",
]
# Keys that would change the computation, with the only values that we compute.
_FIXED = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "early_exit_step": (None,),
}
# Keys that do not touch the computation.
_IGNORED = frozenset(
    [
        "model_type",
        "architectures",
        "auto_map",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "max_window_layers",
        "chunk_size",
        "_name_or_path",
        "_attn_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    ]
)
# The parts of our architecture that make a model Ouro's.
_PARTS = {
    "prelude_layers": 0,
    "coda_layers": 0,
    "norm": "rms",
    "norm_placement": "sandwich_branch",
    "norm_in_loop": True,
    "injection": "none",
    "state_init": "embedding",
    "exit_gate": True,
    "residual_scale": 1.0,
    "step_conditioning": False,
    "state_noise": 0.0,
    "rope": "split_half",
    "mlp": "swiglu",
    "qk_norm": False,
    "qk_bias": False,
    "bias": False,
    "embed_scale": 1.0,
}
_LAYER_NAMES = {
    "attention_norms.pre": "input_layernorm",
    "attention_norms.branch": "input_layernorm_2",
    "mlp_norms.pre": "post_attention_layernorm",
    "mlp_norms.branch": "post_attention_layernorm_2",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "model.exit_gate.weight": "model.early_exit_gate.weight",
    "model.exit_gate.bias": "model.early_exit_gate.bias",
    "lm_head.weight": "lm_head.weight",
}


def read_config(values: dict[str, Any]) -> LoopLMConfig:
    """Our config for Ouro's config.json; a key that changes the computation and is not supported is refused."""
    if values.get("early_exit_threshold", 1.0) not in (1.0, None):
        threshold = f"early_exit_threshold={values['early_exit_threshold']}"
        raise ValueError(f"{threshold} is not read from a config; set it to 1.0 and ask for exits by q at run time")
    known = {*_CONFIG_KEYS, *_IGNORED, "early_exit_threshold", "layer_types", "rope_theta", "rope_parameters"}
    check_keys("Ouro", values, _REQUIRED, _FIXED, known)
    if set(values.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise ValueError(_refusal("layer_types", values["layer_types"]))
    ours = {our: values[key] for key, our in _CONFIG_KEYS.items() if key in values}
    return LoopLMConfig(**ours, rope_theta=_rope_theta(values), **_PARTS, architectures=["LoopLMForCausalLM"])


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
    layers = {
        f"model.layers.{layer}.{theirs}.weight": (f"model.core.{layer}.{ours}.weight",)
        for layer in range(config.core_layers)
        for ours, theirs in _LAYER_NAMES.items()
    }
    return {theirs: (ours,) for ours, theirs in _GLOBAL_NAMES.items()} | layers


def _rope_theta(values: dict[str, Any]) -> float:
    rope = values.get("rope_parameters") or {}
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    if any(value != plain.get(key) for key, value in rope.items() if key != "rope_theta"):
        raise ValueError(_refusal("rope_parameters", rope))
    thetas = {source["rope_theta"] for source in (values, rope) if source.get("rope_theta") is not None}
    if not thetas:
        raise ValueError("the Ouro config lacks 'rope_theta'")
    if len(thetas) > 1:
        raise ValueError(f"the Ouro config gives two values of rope_theta, {min(thetas)} and {max(thetas)}")
    return float(thetas.pop())


def _refusal(key: str, value: object) -> str:
    return f"the Ouro config has {key}={value!r}, which is not supported"


OURO = Layout(model_type="ouro", read_config=read_config, write_config=write_config, tensors=tensors)
