"""A model's projections laid out for decoding: fused where several read one input, in the model's own storage."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from looplm.models import LoopLMForCausalLM
from looplm.models.block import Attention
from looplm.models.context import Loop, LoopContext
from looplm.models.mlp import SwiGLU
from looplm.models.norm import RMSNorm


class Projection(nn.Module):
    """y = x W^T + b, for the few rows of decoding."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        return F.linear(x, self.weight, self.bias)


class FusedRMSNorm(nn.Module):
    """`RMSNorm` in float32 by PyTorch's own: the same numbers in fewer calls."""

    def __init__(self, source: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = source.weight, source.eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size], normed."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FusedAttention(Attention):
    """The same attention with one product for queries, keys and values."""

    def __init__(self, source: Attention) -> None:
        nn.Module.__init__(self)
        self.config, self.head_dim, self.scaling = source.config, source.head_dim, source.scaling
        self.num_key_value_groups, self.rotate = source.num_key_value_groups, source.rotate
        self.q_norm, self.k_norm = source.q_norm, source.k_norm
        self.qkv = fused([source.q_proj, source.k_proj, source.v_proj])
        self.o_proj = Projection(source.o_proj.weight, source.o_proj.bias)
        heads, groups = source.config.num_attention_heads, source.config.num_key_value_heads
        self.heads = [heads, groups, groups]

    def forward(self, x: Tensor, layer: int, loop: Loop, context: LoopContext) -> tuple[Tensor, Tensor | None]:
        """As in `Attention`; queries and keys are rotated together."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split(self.heads, dim=1)
        if self.config.qk_norm:
            query, key = self.rotate(self.q_norm(query), context.rotary), self.rotate(self.k_norm(key), context.rotary)
        else:
            query, key = self.rotate(heads[:, : sum(self.heads[:2])], context.rotary).split(self.heads[:2], dim=1)
        key, value = context.store.update(key, value, layer, loop)
        out, weights = self.attend(query, key, value, context.mask)
        return self.o_proj(out.flatten(-2)), weights

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """PyTorch's fused attention."""
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.scaling, enable_gqa=self.num_key_value_groups > 1
        )
        return out.transpose(1, 2), None


class FusedSwiGLU(nn.Module):
    """SwiGLU with one product for gate and up."""

    def __init__(self, source: SwiGLU) -> None:
        super().__init__()
        self.gate_up = fused([source.gate_proj, source.up_proj])
        self.down_proj = Projection(source.down_proj.weight, source.down_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def for_decoding(model: LoopLMForCausalLM) -> LoopLMForCausalLM:
    """A second model over the weights of `model`, whose projections are fused.

    No weight is held twice: the parameters of `model` become parts of the fused matrices, so what is trained or loaded
    into them is seen here (one layer's matrices exist twice while it is fused).

    Raises:
        ValueError: if the model has parts of its own, such as adapters, which would not be computed.
    """
    with torch.device("meta"):
        twin = LoopLMForCausalLM(model.config)
    odd = sorted(model.state_dict().keys() ^ twin.state_dict().keys())
    if odd:
        raise ValueError(f"the model is not plain ('{odd[0]}'); merge its adapters, or load what was saved, first")
    for stack, ours in zip(_stacks(twin), _stacks(model), strict=True):
        for block, source in zip(stack, ours, strict=True):
            block.attention = FusedAttention(cast(Attention, source.attention))
            if isinstance(source.mlp, SwiGLU):
                block.mlp = FusedSwiGLU(source.mlp)
    fused_parts = (FusedAttention, FusedSwiGLU)
    inside = {name for name, module in twin.named_modules() if isinstance(module, fused_parts)}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if not any(owner == part or owner.startswith(f"{part}.") for part in inside):
            setattr(twin.get_submodule(owner), leaf, parameter)
    twin.tie_weights()
    if model.dtype == torch.float32:  # below, it would round in another order
        for owner in list(twin.modules()):
            for name, child in owner.named_children():
                if isinstance(child, RMSNorm):
                    setattr(owner, name, FusedRMSNorm(child))
    return twin.eval()


def fused(layers: Sequence[nn.Linear]) -> Projection:
    """Several linear maps of one input as one; their parameters become parts of its matrix."""
    weight = _joined([layer.weight for layer in layers])
    if all(layer.bias is None for layer in layers):
        return Projection(weight)
    # Huginn has biases on queries and keys alone.
    zeros = [torch.zeros(len(layer.weight), dtype=weight.dtype, device=weight.device) for layer in layers]
    biases = [zero if layer.bias is None else layer.bias for layer, zero in zip(layers, zeros, strict=True)]
    return Projection(weight, _joined(biases))


@torch.no_grad()
def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts end to end along the first axis; each then lies in the whole, and stays there if it did already."""
    first, start, together = parts[0], parts[0].storage_offset(), True
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        together = together and same and part.is_contiguous() and part.storage_offset() == start
        start += part.numel()
    if together:
        return first.detach().as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, piece in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = piece
    return whole


def _stacks(model: LoopLMForCausalLM) -> tuple[nn.ModuleList, nn.ModuleList, nn.ModuleList]:
    return model.model.prelude, model.model.core, model.model.coda
