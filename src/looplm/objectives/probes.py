"""Probes of the core's Jacobian at the state a trace ended in: exact products, and a cheap difference."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from looplm.models import LoopLMForCausalLM, Trace
from looplm.models.context import real_tokens
from looplm.models.noise import position_noise
from looplm.models.precision import at_least_float32

# Suffixes: R probed rows, S tokens, D width. n is the size of one row's state: D times its real tokens, which alone are
# moved, and whose images alone are measured.

Phi = Callable[[Tensor], Tensor]
Measured = tuple[Tensor, Tensor]
DIRECTIONS = -1  # the noise stream of v; those of the start state and of the loops are 0 and up


@dataclass(frozen=True, kw_only=True)
class Form:
    """What every regulariser has: a `kind`, and one row in `every` of the optimiser step, which it reads alone."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1; 1 reads every row, 8 one row in eight")


@dataclass(frozen=True, kw_only=True)
class Probe(Form):
    """One more application phi of the core, at the last state held constant: the gradient reaches the weights alone.

    That state stands in for the fixed point (STARS, arXiv 2605.26733, section 4). v is a unit vector per row.
    """

    def needs(self, loops: int) -> set[int]:
        """The last loop's state is read."""
        return {loops}

    def draw(self, seeds_R: Tensor, like_RSD: Tensor, real_RS: Tensor | None = None) -> Tensor:
        """v [R, S, D]: independent symmetric noise by each row's own seed, of norm 1 per row; on real tokens alone."""
        return unit_rows(row_noise(seeds_R, like_RSD, real_RS))


@dataclass(frozen=True, kw_only=True)
class JacobianVector(Probe):
    """||J v||^2 per row, in forward mode: STARS' equation 4. `steps` > 1 turns v towards J's dominant direction first.

    The earlier steps, v <- J v / ||J v||, carry no gradient, which would chain through all of them. `warm` keeps one v
    for all rows between optimiser steps instead of drawing it: see `StabilityTerm`.
    """

    kind: Literal["jacobian_vector"] = "jacobian_vector"
    steps: int = 1
    warm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_steps(self.steps)

    @property
    def estimates(self) -> str:
        """What the mean over v says."""
        if self.warm:
            return _WARM
        return _FROBENIUS if self.steps == 1 else _POWER.format(steps=self.steps, matrix="J")

    def measure(self, phi: Phi, x_RSD: Tensor, v_RSD: Tensor) -> Measured:
        """The value [R] of every row, whose mean over rows is the penalty, and J v [R, S, D] without gradient."""
        with math_attention_only():
            with torch.no_grad():
                for _ in range(self.steps - 1):
                    v_RSD = unit_rows(_jacobian_vector(phi, x_RSD, v_RSD))
            image_RSD = _jacobian_vector(phi, x_RSD, v_RSD)
        return squared_norms(image_RSD), image_RSD.detach()


@dataclass(frozen=True, kw_only=True)
class VectorJacobian(Probe):
    """||J^T v||^2 per row, differentiated twice in reverse mode: the published code's form.

    `whole_tensor` gives v norm 1 over all probed rows of the batch together, as that code does: the value then falls as
    1 / rows, and micro-batches no longer add up to their batch.
    """

    kind: Literal["vector_jacobian"] = "vector_jacobian"
    steps: int = 1
    whole_tensor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_steps(self.steps)
        if self.whole_tensor and self.steps > 1:
            raise ValueError("whole_tensor=True is the published form, which takes one step; set steps=1")

    @property
    def estimates(self) -> str:
        """What the mean over v says."""
        if self.whole_tensor:
            return "||J||_F^2 / (B n), all rows of a batch as one matrix (depends on the batch)"
        return _FROBENIUS if self.steps == 1 else _POWER.format(steps=self.steps, matrix="J^T")

    def draw(self, seeds_R: Tensor, like_RSD: Tensor, real_RS: Tensor | None = None) -> Tensor:
        """v [R, S, D], of norm 1 per row, or over all of them; on real tokens alone."""
        if not self.whole_tensor:
            return super().draw(seeds_R, like_RSD, real_RS)
        noise_RSD = row_noise(seeds_R, like_RSD, real_RS)
        return (noise_RSD / torch.linalg.vector_norm(noise_RSD)).to(like_RSD.dtype)

    def measure(self, phi: Phi, x_RSD: Tensor, v_RSD: Tensor) -> Measured:
        """The value [R] of every row, whose mean over rows is the penalty, and J^T v [R, S, D] without gradient."""
        with math_attention_only(), torch.enable_grad():
            x_RSD = x_RSD.detach().requires_grad_()
            y_RSD = phi(x_RSD)
            for _ in range(self.steps - 1):
                (image_RSD,) = torch.autograd.grad(y_RSD, x_RSD, v_RSD.to(y_RSD), retain_graph=True)
                v_RSD = unit_rows(image_RSD)
            (image_RSD,) = torch.autograd.grad(y_RSD, x_RSD, v_RSD.to(y_RSD), create_graph=True)
        rows = len(x_RSD) if self.whole_tensor else 1
        return squared_norms(image_RSD) * rows, image_RSD.detach()


@dataclass(frozen=True, kw_only=True)
class FiniteDifference(Probe):
    """||phi(x + e v) - phi(x)||^2 / e^2 per row, rows [x; x + e v] through one ordinary step, both with gradient.

    e = `epsilon` ||x||, so that e v moves an entry by about `epsilon` times the row's root mean square. Any attention
    kernel will do. Autocast is off inside, since half precision would leave nothing but rounding in the difference.
    """

    kind: Literal["finite_difference"] = "finite_difference"
    epsilon: float = 1e-2
    warm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.epsilon <= 1:
            raise ValueError(
                f"epsilon={self.epsilon} must lie in (0, 1]: the share of the state's size that it moves by"
            )

    @property
    def estimates(self) -> str:
        """What the mean over v says."""
        return (_WARM if self.warm else _FROBENIUS) + f", up to O(epsilon = {self.epsilon:g})"

    def measure(self, phi: Phi, x_RSD: Tensor, v_RSD: Tensor) -> Measured:
        """The value [R] of every row, whose mean over rows is the penalty, and about J v [R, S, D] without gradient."""
        x_RSD = at_least_float32(x_RSD)
        tiny = torch.finfo(x_RSD.dtype).tiny
        size_R11 = (self.epsilon * row_norms(x_RSD)).clamp(min=tiny)
        with torch.autocast(x_RSD.device.type, enabled=False):
            at_x_RSD, moved_RSD = phi(torch.cat([x_RSD, x_RSD + size_R11 * v_RSD.to(x_RSD)])).chunk(2)
            image_RSD = (moved_RSD - at_x_RSD) / size_R11
        return squared_norms(image_RSD), image_RSD.detach()


AnyProbe = JacobianVector | VectorJacobian | FiniteDifference


def core_step(model: LoopLMForCausalLM, trace: Trace, loop: int, rows_R: Tensor) -> Phi:
    """phi: states [k R, S, D] of the trace's rows, k times over, to those of real tokens after one loop more."""
    inputs, real_BS = trace.inputs.detach(), real_tokens(trace.context.position_ids)

    def phi(state: Tensor) -> Tensor:
        index = rows_R.repeat(len(state) // len(rows_R))
        after = model.model.step(state, inputs[index].to(state.dtype), loop + 1, trace.context.rows(index))
        return only(real_BS[index], after)

    return phi


def check_probe(form: AnyProbe, model: LoopLMForCausalLM) -> None:
    """Refuse what the probe cannot differentiate, or could not resolve.

    Raises:
        ValueError: for an attention implementation beside sdpa and eager, a difference in half precision, and exact
            products through weights sharded by FSDP2, whose hooks take neither forward mode nor a second backward.
    """
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"stability.form '{form.kind}' cannot go through attn_implementation='{attention}'; "
            "call model.set_attn_implementation('sdpa')"
        )
    dtype = model.get_input_embeddings().weight.dtype
    if isinstance(form, FiniteDifference) and dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"a finite difference drowns in the rounding of {dtype} weights; keep them in float32 under autocast, "
            "or take the form 'jacobian_vector'"
        )
    if is_sharded(model) and not isinstance(form, FiniteDifference):
        raise ValueError(
            f"stability.form '{form.kind}' cannot go through FSDP's shards; take 'finite_difference', or parallel: ddp"
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards any of the model."""
    return any(isinstance(part, FSDPModule) for part in model.modules())


@contextmanager
def in_evaluation(module: nn.Module) -> Generator[None]:
    """Inside, no dropout is drawn (two branches would differ by it) and no layer is checkpointed."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def math_attention_only() -> AbstractContextManager[None]:
    """Inside, sdpa is the math form, whatever was set outside: fused kernels have no jvp and no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def only(real_RS: Tensor, x_RSD: Tensor) -> Tensor:
    """x where tokens are real, 0 at padding."""
    return x_RSD.masked_fill(~real_RS[..., None], 0.0)


def row_noise(seeds_R: Tensor, like_RSD: Tensor, real_RS: Tensor | None = None) -> Tensor:
    """Noise [R, S, D] in at least float32 that depends on each row's seed, the token's place and the channel alone.

    The place is the column, not the position id, which repeats in packed documents. It is 0 at padding.
    """
    columns = torch.arange(like_RSD.shape[1], device=like_RSD.device).expand(len(seeds_R), -1)
    noise_RSD = position_noise(columns, like_RSD.shape[-1], 1.0, seeds_R.to(like_RSD.device), DIRECTIONS)
    noise_RSD = noise_RSD.to(at_least_float32(like_RSD).dtype)
    return noise_RSD if real_RS is None else only(real_RS, noise_RSD)


def unit_rows(v_RSD: Tensor) -> Tensor:
    """Each row divided by its norm over [S, D]; a row of zeros stays."""
    wide_RSD = at_least_float32(v_RSD)
    return (wide_RSD / row_norms(wide_RSD).clamp(min=torch.finfo(wide_RSD.dtype).tiny)).to(v_RSD.dtype)


def row_norms(x_RSD: Tensor) -> Tensor:
    """||x|| [R, 1, 1] over [S, D]."""
    return torch.linalg.vector_norm(x_RSD, dim=(1, 2), keepdim=True)


def squared_norms(x_RSD: Tensor) -> Tensor:
    """||x||^2 [R] over [S, D], in at least float32."""
    return at_least_float32(x_RSD).pow(2).flatten(1).sum(-1)


_FROBENIUS = "||J||_F^2 / n, the mean squared singular value"
_POWER = "|lambda_max|^2 as steps grow (real, simple), by {steps} power iterations on {matrix}"
_WARM = "||J v||^2 along the rows' common dominant direction, |lambda_max|^2 once v has settled (real, simple)"


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1; 1 is STARS' own")


def _jacobian_vector(phi: Phi, x_RSD: Tensor, v_RSD: Tensor) -> Tensor:
    # PyTorch's forward rule of softmax overwrites a tensor that its own backward needs (seen in 2.13): keep copies.
    with forward_ad.dual_level(), saved_tensors_hooks(_copied, lambda saved: saved):
        dual = phi(forward_ad.make_dual(x_RSD, v_RSD.to(x_RSD)))
        primal, tangent = forward_ad.unpack_dual(dual)
    return torch.zeros_like(primal) if tangent is None else tangent


def _copied(saved: Tensor) -> Tensor:
    return saved if saved.is_leaf else saved.detach().clone()
