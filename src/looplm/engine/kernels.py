"""A model's blocks laid out for decoding: fewer and larger calls, over the model's own weights.

With few tokens in the loop most of a block's time goes into calls, not into arithmetic. Here all tokens of a call lie
in one matrix [T, D], whichever rows they belong to, and what reads one input is one product.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from looplm.engine.compiled import compiled
from looplm.engine.store import PAGE, PagedContext, Part
from looplm.models import LoopLMConfig, LoopLMForCausalLM
from looplm.models.backbone import LoopLMModel
from looplm.models.block import Attention, Block, ResidualNorms
from looplm.models.context import Loop
from looplm.models.int8 import is_int8
from looplm.models.mlp import SwiGLU
from looplm.models.norm import RMSNorm
from looplm.models.rotary import rotate_halves

# So many rows a CPU multiplies faster as W x^T, by up to two: its product is tuned for wide results.
BY_COLUMNS = range(10, 64)
_WIDE = (torch.float32, torch.float64)
FEW_KEYS = 256  # of all rows together: with more, PyTorch's threads are faster than one compiled loop


class Projection:
    """y = x W^T + b, in the order that is faster for the rows at hand."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.columns = self.weight.t()
        self.by_columns = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O]; it may lie transposed in memory."""
        if self.by_columns and x.shape[0] in BY_COLUMNS:
            y = torch.mm(self.weight, x.t()).t()
            return y if self.bias is None else y + self.bias
        return torch.mm(x, self.columns) if self.bias is None else torch.addmm(self.bias, x, self.columns)


class Apart:
    """Linear maps of one input whose int8 weights cannot be joined: products of their own, side by side."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = [layer.forward for layer in layers]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O]; it may lie transposed in memory."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


class PlainNorm:
    """A norm as it is, or none."""

    def __init__(self, source: nn.Module) -> None:
        self.norm = source.forward

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, D], normed."""
        return self.norm(x)

    def onto(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        """x + scale * norm(y)."""
        return torch.add(x, self.norm(y), alpha=scale)


class FourCallNorm:
    """`RMSNorm` of a float32 or float64 model: x / rms(x) * weight in four calls, a sum with it included.

    rms(x) = hypot(|x|, sqrt(eps D)) / sqrt(D).
    """

    def __init__(self, source: RMSNorm) -> None:
        self.weight = source.weight.detach()
        size = len(self.weight)
        self.root, self.floor = size**0.5, self.weight.new_tensor((source.eps * size) ** 0.5)
        self.zero = self.weight.new_zeros(())

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, D], normed."""
        return self.onto(self.zero, x, 1.0)

    def onto(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        """x + scale * norm(y)."""
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True).hypot_(self.floor)
        return torch.addcdiv(x, y * self.weight, length, value=scale * self.root)


class CompiledNorm:
    """`RMSNorm` of a float32 model on a CPU as one compiled loop, a sum with it included."""

    def __init__(self, source: RMSNorm) -> None:
        self.weight, self.eps, self.loops = source.weight.detach().numpy(), source.eps, compiled()

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, D], normed."""
        x, out = x.contiguous(), torch.empty(x.shape)
        self.loops.normed(x.numpy(), self.weight, self.eps, out.numpy())
        return out

    def onto(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        """x + scale * norm(y)."""
        x, y, out = x.contiguous(), y.contiguous(), torch.empty(x.shape)
        self.loops.add_normed(x.numpy(), y.numpy(), self.weight, self.eps, scale, out.numpy())
        return out


Norm = PlainNorm | FourCallNorm | CompiledNorm


class JoiningNorms:
    """`ResidualNorms`: post(x + scale * branch(f(pre(x))))."""

    def __init__(self, source: ResidualNorms, fast: bool = False) -> None:
        self.pre, self.branch = decoding_norm(source.pre, fast), decoding_norm(source.branch, fast)
        self.post = None if isinstance(source.post, nn.Identity) else decoding_norm(source.post, fast)
        self.scale = source.scale

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the sub-layer's output y = f(pre(x)) to x."""
        x = self.branch.onto(x, y, self.scale)
        return x if self.post is None else self.post(x)


class PagedAttention:
    """Attention with one product for queries, keys and values, which are turned where they lie."""

    def __init__(self, source: Attention) -> None:
        self.qkv = fused([source.q_proj, source.k_proj, source.v_proj])
        self.out = projection(source.o_proj)
        self.heads, self.groups = source.config.num_attention_heads, source.config.num_key_value_heads
        self.head_dim, self.scaling, self.rotate = source.head_dim, source.scaling, source.rotate
        self.norms = (source.q_norm, source.k_norm) if source.config.qk_norm else None

    def __call__(self, x: Tensor, layer: int, context: PagedContext) -> Tensor:
        """x [T, D] -> [T, D]; keys and values go to the context's pages, and all of their rows' come back."""
        heads = self.qkv(x).contiguous().view(x.shape[0], -1, self.head_dim)
        if len(context.parts) == 1:
            return self.out(self.attend(heads, layer, context.parts[0]))
        sizes = [len(part.positions) for part in context.parts]
        pieces = zip(heads.split(sizes), context.parts, strict=True)
        return self.out(torch.cat([self.attend(piece, layer, part) for piece, part in pieces]))

    def attend(self, heads: Tensor, layer: int, part: Part) -> Tensor:
        """Queries, keys, values [T, H + 2 G, head_dim] of one part, turned in place -> [T, H * head_dim]."""
        self._turn(heads[:, : self.heads + self.groups], part)
        seen = part.pages.exchange(heads[:, self.heads :], layer)
        key, value = seen.transpose(1, 2).chunk(2, dim=1)
        query = heads[:, : self.heads].view(part.blocks, -1, self.heads, self.head_dim).transpose(1, 2)
        found = F.scaled_dot_product_attention(
            query, key, value, part.mask, scale=self.scaling, enable_gqa=self.heads > self.groups
        )
        return found.transpose(1, 2).reshape(len(heads), -1)

    def _turn(self, heads: Tensor, part: Part) -> None:
        """Norm and rotate queries and keys [T, H + G, head_dim] in place."""
        if self.norms is not None:
            query, key = heads.split([self.heads, self.groups], dim=1)
            query.copy_(self.norms[0](query))
            key.copy_(self.norms[1](key))
        if self.rotate is rotate_halves:
            cos, sin = part.rotary
            swapped = heads.view(*heads.shape[:2], 2, self.head_dim // 2).flip(2).view_as(heads)
            torch.addcmul(heads * cos, swapped, sin, out=heads)
        else:
            heads.copy_(self.rotate(heads, part.rotary))


class CompiledAttention(PagedAttention):
    """The same with rotation, pages and attention of few single tokens in one compiled loop, which has one thread."""

    def __init__(self, source: Attention) -> None:
        super().__init__(source)
        self.loops = compiled()

    def attend(self, heads: Tensor, layer: int, part: Part) -> Tensor:
        """As there."""
        keys = part.blocks * part.mask.shape[-1]
        if part.blocks < len(heads) or keys > FEW_KEYS or part.pages.sharing is not None:
            return super().attend(heads, layer, part)
        out = torch.empty(len(heads), self.heads, self.head_dim)
        tokens, places = part.pages.place(layer)
        (cos, sin, positions), (write, tables) = part.arrays, places.arrays
        self.loops.attend(
            heads.numpy(), cos, sin, tokens.numpy(), write, tables, positions, PAGE, self.scaling, out.numpy()
        )  # fmt: skip
        return out.view(len(heads), -1)


class OneProductSwiGLU:
    """SwiGLU with one product for gate and up."""

    def __init__(self, source: SwiGLU) -> None:
        self.gate_up = fused([source.gate_proj, source.up_proj])
        self.down = projection(source.down_proj)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class PlainGate:
    """The exit gate of a float32 or float64 model without the care that half precision takes."""

    def __init__(self, source: nn.Linear) -> None:
        self.weight, self.bias = source.weight.detach()[0], source.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, 1]."""
        return torch.addmv(self.bias, x, self.weight)[:, None]


class DecodingBlock(nn.Module):
    """A `Block` on flat tokens and paged keys and values; it holds no parameter of its own."""

    def __init__(self, source: Block, fast: bool = False) -> None:
        super().__init__()
        self.layer = source.layer
        turns = source.attention.rotate is rotate_halves and not source.attention.config.qk_norm
        self.attention = (CompiledAttention if fast and turns else PagedAttention)(source.attention)
        self.mlp = OneProductSwiGLU(source.mlp) if isinstance(source.mlp, SwiGLU) else source.mlp.forward
        self.attention_norms = JoiningNorms(source.attention_norms, fast)
        self.mlp_norms = JoiningNorms(source.mlp_norms, fast)

    def forward(self, x: Tensor, loop: Loop, context: PagedContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        norms = self.attention_norms
        x = norms.join(x, self.attention(norms.pre(x), self.layer, context))
        norms = self.mlp_norms
        return norms.join(x, self.mlp(norms.pre(x)))


def for_decoding(model: LoopLMForCausalLM, fast: bool = False) -> LoopLMModel:
    """The verbs of the backbone of `model` on flat tokens [T, D] and a `PagedContext`.

    fast: norms and single tokens' attention by compiled loops, where the model has forms that they know.

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
    backbone, source = twin.model, model.model
    for name, part in source.named_children():
        if name != "dropout":  # the one part that is not the same in training
            setattr(backbone, name, part)
    for name in ("prelude", "core", "coda"):
        setattr(backbone, name, nn.ModuleList(DecodingBlock(block, fast) for block in getattr(source, name)))
    if source.exit_gate is not None and source.exit_gate.weight.dtype in _WIDE:
        del backbone.exit_gate
        backbone.exit_gate = PlainGate(source.exit_gate)  # ty: ignore[invalid-assignment]
    del backbone.norm
    backbone.norm = decoding_norm(source.norm, fast)  # ty: ignore[invalid-assignment]
    backbone.dropout.eval()
    # A transformers config takes microseconds to answer, and the verbs ask it at every loop.
    backbone.config = cast(LoopLMConfig, SimpleNamespace(**vars(model.config)))
    return backbone


def decoding_norm(source: nn.Module, fast: bool = False) -> Norm:
    """The norm in as few calls as rounding allows: below float32, its own order of rounding is the model's."""
    if fast and isinstance(source, RMSNorm):
        return CompiledNorm(source)
    if isinstance(source, RMSNorm) and source.weight.dtype in _WIDE:
        return FourCallNorm(source)
    return PlainNorm(source)


def projection(layer: nn.Linear) -> Projection | Apart:
    """One linear map."""
    return Apart([layer]) if is_int8(layer) else Projection(layer.weight, layer.bias)


def fused(layers: Sequence[nn.Linear]) -> Projection | Apart:
    """Several linear maps of one input as one; their parameters become parts of its matrix, unless they are int8."""
    if any(is_int8(layer) for layer in layers):
        return Apart(layers)
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
