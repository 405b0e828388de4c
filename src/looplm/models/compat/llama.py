"""Llama's layout in transformers (`LlamaForCausalLM`): an ordinary decoder is a looped model of one loop."""

from typing import Any

from looplm.models.compat.layout import Layout, TensorTable, check_keys, check_parts, rope_theta
from looplm.models.config import LoopLMConfig

# Llama's config key -> ours, where the value carries over unchanged.
CONFIG_KEYS = {
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
    "tie_word_embeddings": "tie_word_embeddings",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "use_cache": "use_cache",
}
REQUIRED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
]
# Keys that would change the computation, with the only values that we compute.
FIXED = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "attention_bias": (False, None),
    "rope_scaling": (None,),
}
# Keys that do not touch the computation.
IGNORED = frozenset(
    [
        "model_type",
        "architectures",
        "auto_map",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "rope_theta",
        "rope_parameters",
        "_name_or_path",
        "_attn_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    ]
)
# The parts that every such decoder shares; a family adds its own.
PARTS: dict[str, Any] = {
    "prelude_layers": 0,
    "coda_layers": 0,
    "norm": "rms",
    "norm_in_loop": True,
    "injection": "none",
    "state_init": "embedding",
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
LAYER_NAMES = {
    "attention_norms.pre": "input_layernorm",
    "mlp_norms.pre": "post_attention_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
GLOBAL_NAMES = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_OWN_PARTS: dict[str, Any] = PARTS | {"norm_placement": "pre", "exit_gate": False, "loops": 1}
# With the value that transformers takes where a config leaves it out.
_OWN_DEFAULTS: dict[str, Any] = {"rope_theta": 1e4, "max_position_embeddings": 2048, "tie_word_embeddings": False}


def read_config(values: dict[str, Any]) -> LoopLMConfig:
    """Our config of one loop; a key that changes the computation and is not supported is refused."""
    values: dict[str, Any] = _OWN_DEFAULTS | {
        key: value for key, value in values.items() if key != "rope_theta" or value is not None
    }
    if values.get("rope_parameters"):
        values.pop("rope_theta")  # transformers reads the newer key where there are both
    fixed = FIXED | {"mlp_bias": (False, None), "pretraining_tp": (1, None)}
    check_keys("Llama", values, REQUIRED, fixed, {*CONFIG_KEYS, *IGNORED})
    ours: dict[str, Any] = {our: values[key] for key, our in CONFIG_KEYS.items() if key in values}
    theta = rope_theta("Llama", values)
    return LoopLMConfig(**ours, rope_theta=theta, **_OWN_PARTS, architectures=["LoopLMForCausalLM"])


def write_config(config: LoopLMConfig) -> dict[str, Any]:
    """Llama's config.json for our config, if our model has Llama's parts and one loop."""
    check_parts("Llama", config, _OWN_PARTS)
    return {key: getattr(config, ours) for key, ours in CONFIG_KEYS.items()} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "torch_dtype": str(config.dtype or "float32").removeprefix("torch."),
    }


def tensors(config: LoopLMConfig) -> TensorTable:
    """Llama's tensor name -> ours, one to one."""
    return named(config, GLOBAL_NAMES, LAYER_NAMES)


def named(config: LoopLMConfig, whole: dict[str, str], layer: dict[str, str]) -> TensorTable:
    """The table of a layout that names its layers `model.layers.N`; `whole` and `layer` map our names to theirs."""
    layers = {
        f"model.layers.{number}.{theirs}.weight": (f"model.core.{number}.{ours}.weight",)
        for number in range(config.core_layers)
        for ours, theirs in layer.items()
    }
    return {theirs: (ours,) for ours, theirs in whole.items()} | layers


LLAMA = Layout(model_type="llama", read_config=read_config, write_config=write_config, tensors=tensors)
