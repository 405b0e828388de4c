"""The configuration of a looped language model: which parts it is built from and how often its core runs."""

import copy
import dataclasses
import difflib
import math
import typing
from typing import Literal

from transformers import PreTrainedConfig

# Keys that transformers itself hands to a config, beyond its declared fields.
_TRANSFORMERS_KEYS = frozenset(
    [
        "model_type",
        "name_or_path",
        "_name_or_path",
        "_commit_hash",
        "torch_dtype",
        "num_labels",
        "attn_implementation",
        "experts_implementation",
        "output_attentions",
        "quantization_config",
        "auto_map",
        "per_layer_config",
    ]
)
_DERIVED = ("num_key_value_heads", "head_dim")  # filled in where None


class LoopLMConfig(PreTrainedConfig):
    """Shape and parts of a looped model: prelude, a core block applied `loops` times, coda.

    The defaults are Ouro-1.4B's (arXiv 2510.25741), without its token ids.

    norm, norm_placement: the kind of norm, and which of the three slots of `models/block.py` hold one; "plain" is
        LayerNorm without affine parameters. `norm_in_loop` applies the final norm after every loop, so that the
        normed state is what the next loop receives.
    injection: how the prelude's output enters before each loop (`inject_once`: before the first alone).
    state_init: the state before the first loop: the inputs, zeros, or truncated-normal noise of std `state_std`.
    state_noise, step_conditioning: noise of that std added to the state, and an embedding of the loop's number, before
        each loop; variants that Huginn's authors rejected, for study.
    residual_scale: factor of every branch before it is added, such as 1 / loops.
    rope: rotary pairing, or learned absolute positions, or none.
    dropout: share of the channels of embeddings and branches that training drops (STARS' addition model).
    qk_bias, bias, qk_norm: biases of the query and key projections, or of all; then an RMS norm of each head's queries
        and keys, before rotation.
    embed_scale: factor of the token embeddings.
    init: "normal" draws matrices with std `initializer_range` (embeddings with `embedding_initializer_range` where that
        is given); "takase" is Huginn's scheme (arXiv 2502.05171, after Takase et al. 2024).
    num_key_value_heads, head_dim: default to plain multi-head attention.

    Raises:
        ValueError: for an unknown key, an unsupported value or parts that do not fit together.
    """

    model_type = "looplm"
    keys_to_ignore_at_inference: typing.ClassVar[list[str]] = ["cache", "gate_logits", "states", "context", "inputs"]

    auto_map: typing.ClassVar[dict[str, str]] = {}  # TRL reads it; no code of ours is ever fetched

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int = None  # ty: ignore[invalid-assignment]  (filled in below, as head_dim)
    head_dim: int = None  # ty: ignore[invalid-assignment]
    prelude_layers: int = 0
    core_layers: int = 24
    coda_layers: int = 0
    loops: int = 4
    norm: Literal["rms", "layer", "plain"] = "rms"
    norm_placement: Literal["pre", "post", "branch", "sandwich_branch", "sandwich_dual"] = "sandwich_branch"
    norm_in_loop: bool = True
    norm_eps: float = 1e-6
    injection: Literal["none", "add", "concat", "diagonal"] = "none"
    inject_once: bool = False
    state_init: Literal["embedding", "zero", "normal"] = "embedding"
    state_std: float = 0.4**0.5
    state_noise: float = 0.0
    step_conditioning: bool = False
    residual_scale: float = 1.0
    exit_gate: bool = True
    rope: Literal["split_half", "adjacent", "learned", "none"] = "split_half"
    rope_theta: float = 1e6
    max_position_embeddings: int = 65536
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    qk_norm: bool = False
    qk_bias: bool = False
    bias: bool = False
    dropout: float = 0.0
    embed_scale: float = 1.0
    init: Literal["normal", "takase"] = "normal"
    initializer_range: float = 0.02
    embedding_initializer_range: float | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: object) -> None:
        self._refuse_unknown(kwargs)
        for name, hint in LoopLMConfig.__annotations__.items():
            if name not in _DERIVED or getattr(self, name) is not None:
                _check_type(name, getattr(self, name), hint)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(1, self.num_attention_heads)
        self.validate_architecture()
        super().__post_init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """`slots` at the config's own loops. Every transformers cache is sized by it."""
        return self.slots(self.loops)

    def slots(self, loops: int) -> int:
        """Layer visits, each with a KV slot, in a call of `loops` loops: prelude + coda + loops x core."""
        return self.prelude_layers + self.coda_layers + loops * self.core_layers

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # ty: ignore[incompatible-property-override]
        """Tensor parallelism: every projection split by heads or by inner width, joined again by its output."""
        split = {"attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"}
        if self.mlp != "swiglu":
            split.remove("mlp.gate_proj")
        layer = dict.fromkeys(sorted(split), "colwise") | dict.fromkeys(
            ("attention.o_proj", "mlp.down_proj"), "rowwise"
        )
        if self.qk_norm:
            layer |= dict.fromkeys(("attention.q_norm", "attention.k_norm"), "replicated_with_grad_allreduce")
        return {f"{stack}.*.{name}": style for stack in self._stacks() for name, style in layer.items()}

    @property
    def base_model_fsdp_plan(self) -> dict[str, str]:  # ty: ignore[incompatible-property-override]
        """FSDP2: the core's weights stay gathered between loops, instead of once more for every loop."""
        stacks = {
            f"{stack}.*": "keep_full_weight" if stack == "core" else "free_full_weight" for stack in self._stacks()
        }
        return {"embed_tokens": "free_full_weight"} | stacks | {"norm": "keep_full_weight"}

    def _stacks(self) -> list[str]:
        sizes = {"prelude": self.prelude_layers, "core": self.core_layers, "coda": self.coda_layers}
        return [stack for stack, size in sizes.items() if size]

    def at_loops(self, loops: int) -> "LoopLMConfig":
        """A copy of this config that runs `loops` loops."""
        sized = copy.copy(self)
        sized.loops = loops
        return sized

    def validate_architecture(self) -> None:
        """Refuse sizes that no model can be built from, by name."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "core_layers",
            "loops",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("prelude_layers", "coda_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2 and self.rope in ("split_half", "adjacent"):
            raise ValueError(f"head_dim={self.head_dim} must be even for rope='{self.rope}'")
        for name in ("norm_eps", "rope_theta", "state_std", "initializer_range", "residual_scale", "embed_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number above 0")
        self._refuse_nonsense()

    def _refuse_nonsense(self) -> None:
        if self.injection == "none" and self.state_init != "embedding":
            raise ValueError(
                f"state_init='{self.state_init}' with injection='none' never shows the tokens to the loop; "
                "choose an injection, or state_init='embedding'"
            )
        if self.injection == "none" and self.inject_once:
            raise ValueError("inject_once=True needs an injection; injection='none' injects nothing")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if not 0 <= self.state_noise < math.inf:
            raise ValueError(f"state_noise={self.state_noise} must be a number and not negative")
        if self.embedding_initializer_range is not None:
            if not 0 < self.embedding_initializer_range < math.inf:
                raise ValueError(f"embedding_initializer_range={self.embedding_initializer_range} must be above 0")
            if self.init == "takase":
                raise ValueError("init='takase' draws the embedding by its own rule; leave embedding_initializer_range")

    def _refuse_unknown(self, kwargs: dict[str, object]) -> None:
        unknown = sorted(set(kwargs) - _TRANSFORMERS_KEYS)
        if not unknown:
            return
        close = difflib.get_close_matches(unknown[0], [field.name for field in dataclasses.fields(self)], n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"unknown config key '{unknown[0]}'{hint}")


def _check_type(name: str, value: object, hint: object) -> None:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(map(repr, choices))}")
        return
    accepted = [typing.get_origin(kind) or kind for kind in typing.get_args(hint) or (hint,)]
    exact = type(value) in accepted or (type(value) is int and float in accepted)
    if typing.get_origin(hint) is not typing.ClassVar and not exact:
        names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in accepted)
        raise ValueError(f"{name}={value!r} must be of type {names}")
