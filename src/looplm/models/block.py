"""One transformer block with three norm slots around each branch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from looplm.models.config import LoopLMConfig
from looplm.models.context import Loop, LoopContext
from looplm.models.mlp import MLPS, DampedLinear
from looplm.models.norm import RMSNorm, build_norm
from looplm.models.rotary import ROTATIONS

# norm_placement -> which of the slots (pre, branch, post) hold a norm.
_SLOTS = {
    "pre": (True, False, False),
    "post": (False, False, True),
    "branch": (False, True, False),
    "sandwich_branch": (True, True, False),
    "sandwich_dual": (True, False, True),
}


def math_attention(
    module: "Attention", query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by plain matrix products: every derivative exists, which fused kernels do not offer.

    Shapes: query [B, H, S, head_dim], key and value [B, G, K, head_dim], additive mask [B, 1, S, K].
    Returns the output [B, S, H, head_dim] and the weights [B, H, S, K].
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = F.dropout(scores.softmax(-1, dtype=softmax_dtype).to(query.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    """Grouped-query self-attention; `config._attn_implementation` picks sdpa, flex or the math form ('eager')."""

    is_causal = True

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.rotate = ROTATIONS[config.rope]
        heads, key_heads, width = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        query_bias = config.bias or config.qk_bias
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=query_bias)
        self.k_proj = nn.Linear(width, key_heads * config.head_dim, bias=query_bias)
        self.v_proj = nn.Linear(width, key_heads * config.head_dim, bias=config.bias)
        self.o_proj = DampedLinear(heads * config.head_dim, width, bias=config.bias)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, D] -> query [B, S, H, head_dim], key and value [B, S, G, head_dim]."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return query, key, value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """query [B, H, S, head_dim], key and value [B, G, K, head_dim] -> [B, S, H, head_dim] and perhaps weights."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, math_attention)
        return attend(self, query, key, value, mask, dropout=0.0, scaling=self.scaling)

    def forward(self, x: Tensor, layer: int, loop: Loop, context: LoopContext) -> tuple[Tensor, Tensor | None]:
        """x [B, S, D] -> [B, S, D], and the weights where the implementation gives them.

        Keys and values pass through the context's store at (layer, loop).
        """
        query, key, value = self.project(x)
        query, key = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2)
        query, key = self.rotate(query, context.rotary), self.rotate(key, context.rotary)
        key, value = context.store.update(key, value.transpose(1, 2), layer, loop)
        out, weights = self.attend(query, key, value, context.mask)
        return self.o_proj(out.flatten(-2)), weights


class ResidualNorms(nn.Module):
    """The three norm slots of one sub-layer f: post(x + scale * branch(f(pre(x)))); an absent norm is the identity."""

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__()
        self.pre, self.branch, self.post = (
            build_norm(config) if present else nn.Identity() for present in _SLOTS[config.norm_placement]
        )
        self.scale = config.residual_scale
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the sub-layer's output y = f(pre(x)) to x."""
        y = self.dropout(self.branch(y))
        return self.post(x + (y if self.scale == 1.0 else self.scale * y))


class Block(GradientCheckpointingLayer):
    """Attention then MLP, each between its norm slots:

        x ── pre ── attention ── branch ─(+ x)─ post ── pre ── mlp ── branch ─(+)─ post ──►

    pre: GPT, Llama · post: the original transformer · pre + branch: Ouro · pre + post: Huginn.
    """

    def __init__(self, config: LoopLMConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attention = Attention(config)
        self.attention_norms = ResidualNorms(config)
        self.mlp = MLPS[config.mlp](config)
        self.mlp_norms = ResidualNorms(config)

    def forward(self, x: Tensor, loop: Loop, context: LoopContext) -> Tensor:
        attended, _ = self.attention(self.attention_norms.pre(x), self.layer, loop, context)
        x = self.attention_norms.join(x, attended)
        return self.mlp_norms.join(x, self.mlp(self.mlp_norms.pre(x)))
