"""Huginn's released layout (`tomg-group-umd/huginn-0125`): config keys and tensor names, both ways."""

import math
from typing import Any

import torch
from torch import Tensor

from looplm.models.compat.layout import Layout, TensorTable, check_keys, check_parts
from looplm.models.config import LoopLMConfig

# Huginn's config key -> ours, where the value carries over unchanged.
_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "intermediate_size": "intermediate_size",
    "n_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_layers_in_prelude": "prelude_layers",
    "n_layers_in_recurrent_block": "core_layers",
    "n_layers_in_coda": "coda_layers",
    "mean_recurrence": "loops",
    "block_size": "max_position_embeddings",
    "rope_base": "rope_theta",
    "norm_eps": "norm_eps",
    "qk_bias": "qk_bias",
    "bias": "bias",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "use_cache": "use_cache",
}
_REQUIRED = tuple(key for key in _CONFIG_KEYS if not key.endswith("token_id") and key not in ("head_dim", "use_cache"))
# Keys that would change the computation, with the only values that we compute.
_FIXED = {
    "injection_type": ("linear",),
    "state_init": ("like-init",),
    "norm_class_name": ("RMSNorm_llama",),
    "mlp_class_name": ("GatedMLP",),
    "nonlin_name": ("SiLU",),
    "block_class_name": ("SandwichBlock",),
    "architecture_class_name": ("RecurrentGPT",),
    "init_strategy": ("takase",),
    "init_orthogonal": (False,),
    "test_time_noise": (0, 0.0),
    "bias": (False,),
    "qk_bias": (True,),
}
# Keys that do not touch the computation, or that others imply.
_IGNORED = frozenset(
    [
        "model_type",
        "architectures",
        "auto_map",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "_name_or_path",
        "n_layers",
        "padding_multiple",
        "padded_vocab_size",
        "mean_backprop_depth",
        "sampling_scheme",
        "activation_checkpoint_impl",
        "init_values",
        "return_dict",
        "effective_expected_depth",
        "tie_embeddings",
        "tie_word_embeddings",
        "num_attention_heads",
        "hidden_size",
        "num_hidden_layers",
        "test_time_noise_type",
        "max_position_embeddings",
        "randomize_positions_from",
    ]
)
# The parts of our architecture that make a model Huginn's; the gate is not one of them, and embed_scale is sqrt(width).
_PARTS: dict[str, Any] = {
    "norm": "rms",
    "norm_placement": "sandwich_dual",
    "norm_in_loop": False,
    "injection": "concat",
    "inject_once": False,
    "state_init": "normal",
    "state_std": 0.4**0.5,
    "state_noise": 0.0,
    "step_conditioning": False,
    "residual_scale": 1.0,
    "exit_gate": False,
    "rope": "adjacent",
    "mlp": "swiglu",
    "qk_norm": False,
    "init": "takase",
}
_BLOCK_NAMES = {
    "norm_1.weight": ("attention_norms.pre.weight",),
    "norm_2.weight": ("attention_norms.post.weight",),
    "norm_3.weight": ("mlp_norms.pre.weight",),
    "norm_4.weight": ("mlp_norms.post.weight",),
    "attn.Wqkv.weight": tuple(f"attention.{part}_proj.weight" for part in "qkv"),
    "attn.qk_bias": ("attention.q_proj.bias", "attention.k_proj.bias"),
    "attn.proj.weight": ("attention.o_proj.weight",),
    "mlp.fc.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.proj.weight": ("mlp.down_proj.weight",),
}
_GLOBAL_NAMES = {
    "transformer.wte.weight": ("model.embed_tokens.weight",),
    "transformer.adapter.weight": ("model.injection.adapter.weight",),
    "transformer.ln_f.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}
_STACKS = {"prelude": "prelude", "core_block": "core", "coda": "coda"}


def read_config(values: dict[str, Any]) -> LoopLMConfig:
    """Our config for Huginn's config.json; a key that changes the computation and is not supported is refused."""
    check_keys("Huginn", values, _REQUIRED, _FIXED, {*_CONFIG_KEYS, *_IGNORED})
    _refuse_contradictions(values)
    ours: dict[str, Any] = {our: values[key] for key, our in _CONFIG_KEYS.items() if key in values}
    ours["rope_theta"] = float(ours["rope_theta"])
    ours["tie_word_embeddings"] = values.get("tie_word_embeddings", values.get("tie_embeddings", True))
    ours["embed_scale"] = (values.get("init_values") or {}).get("embed_scale", math.sqrt(values["n_embd"]))
    return LoopLMConfig(**ours, **_PARTS, architectures=["LoopLMForCausalLM"])


def _refuse_contradictions(values: dict[str, Any]) -> None:
    """Huginn's files say several things twice; both must say the same."""
    stacks = ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")
    for key in (*stacks, "n_embd", "n_heads"):
        if type(values[key]) is not int or values[key] < 1:
            raise ValueError(f"the Huginn config has {key}={values[key]!r}, which must be a whole number of at least 1")
    implied = {
        "num_attention_heads": values["n_heads"],
        "num_key_value_heads": values["n_heads"],
        "hidden_size": values["n_embd"],
        "max_position_embeddings": values["block_size"],
        "n_layers": sum(values[key] for key in stacks),
        "num_hidden_layers": sum(values[key] for key in stacks),
        "tie_embeddings": values.get("tie_word_embeddings", values.get("tie_embeddings")),
    }
    for key, value in implied.items():
        if key in values and values[key] != value:
            raise ValueError(f"the Huginn config has {key}={values[key]!r} where its other keys imply {value!r}")
    std = (values.get("init_values") or {}).get("std")
    if std is not None and not math.isclose(std, _weight_std(values["n_embd"]), rel_tol=1e-4):
        raise ValueError(f"the Huginn config has init_values.std={std!r}; only sqrt(2 / (5 n_embd)) is supported")


def _weight_std(width: int) -> float:
    return math.sqrt(2 / (5 * width))


def write_config(config: LoopLMConfig) -> dict[str, Any]:
    """Huginn's config.json for our config, if our model has Huginn's parts."""
    needed = {"bias": False, "num_key_value_heads": config.num_attention_heads, "qk_bias": True}
    check_parts("Huginn", config, _PARTS | needed)
    if not (config.prelude_layers and config.coda_layers):
        raise ValueError("Huginn's layout needs a prelude and a coda of at least one layer")
    values = {key: getattr(config, ours) for key, ours in _CONFIG_KEYS.items()}
    fixed = {key: allowed[0] for key, allowed in _FIXED.items()}
    std = _weight_std(config.hidden_size)
    depth = config.num_hidden_layers
    return (
        values
        | fixed
        | {
            "architectures": ["RavenForCausalLM"],
            "model_type": "huginn_raven",
            "n_layers": config.prelude_layers + config.core_layers + config.coda_layers,
            "tie_embeddings": config.tie_word_embeddings,
            "tie_word_embeddings": config.tie_word_embeddings,
            "effective_expected_depth": depth,
            "init_values": {
                "std": std,
                "out_proj": math.sqrt(1 / (5 * config.hidden_size * depth)),
                "embedding": std,
                "embed_scale": config.embed_scale,
            },
        }
    )


def tensors(config: LoopLMConfig) -> TensorTable:
    """Huginn's tensor name -> ours; Wqkv, fc and qk_bias join several of ours."""
    sizes = {"prelude": config.prelude_layers, "core": config.core_layers, "coda": config.coda_layers}
    blocks = {
        f"transformer.{theirs}.{layer}.{name}": tuple(f"model.{ours}.{layer}.{part}" for part in parts)
        for theirs, ours in _STACKS.items()
        for layer in range(sizes[ours])
        for name, parts in _BLOCK_NAMES.items()
    }
    return _GLOBAL_NAMES | blocks


def stored_shapes(config: LoopLMConfig) -> dict[str, tuple[int, ...]]:
    """qk_bias is stored as [2, 1, heads, head_dim], ours as two flat biases."""
    shape = (2, 1, config.num_attention_heads, config.head_dim)
    return {name: shape for name in tensors(config) if name.endswith("attn.qk_bias")}


def constants(config: LoopLMConfig) -> dict[str, Tensor]:
    """The rotary table [1, positions, 1, head_dim / 2, 2] that Huginn's files store: cos and sin, float32."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
    return {"freqs_cis": torch.stack([angles.cos(), angles.sin()], dim=-1)[None, :, None]}


HUGINN = Layout(
    model_type="huginn_raven",
    read_config=read_config,
    write_config=write_config,
    tensors=tensors,
    stored_shapes=stored_shapes,
    constants=constants,
)
