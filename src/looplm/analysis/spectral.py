"""The spectral radius of a loop's Jacobian at a state, from Jacobian-vector products alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

# Suffixes: R rows, n the size of one row's state, m directions.

Phi = Callable[[Tensor], Tensor]
_LOOK_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Radius:
    """|lambda_max| [R] of each row's Jacobian (nan where not finite), and how far the pair is from an eigenpair.

    residual: ||J x - lambda x|| / |lambda| [R] for unit x: lambda is an eigenvalue of a matrix within that of J.
    products: Jacobian-vector products taken.
    """

    value: Tensor
    residual: Tensor
    products: int


@torch.no_grad()
def spectral_radius(
    phi: Phi, state_RX: Tensor, products: int = 100, tolerance: float = 1e-3, seed: int = 0
) -> Radius:  # fmt: skip
    """rho(J) of J = d phi / d state at `state_RX` [R, ...], for each row; rows must not see each other in `phi`.

    Arnoldi's method: the power iteration v <- J v / ||J v||, its directions kept, each made orthogonal to those before;
    the eigenvalues of J within their span hold the dominant one, real or one of a complex pair, on whose plane the
    iteration itself turns for ever. It ends at `products` products, or once every residual is below `tolerance`.
    Attention runs in its math form, which alone has a forward-mode derivative.

    Raises:
        ValueError: if `products` is below 1.
    """
    if products < 1:
        raise ValueError(f"products={products} must be at least 1; a few dozen settle most")
    generator = torch.Generator().manual_seed(seed)
    first_RX = torch.randn(state_RX.shape, generator=generator, dtype=torch.float64).to(state_RX)
    basis_mRn = [_unit(first_RX.flatten(1))]
    rows, size = basis_mRn[0].shape
    last = min(products, size)
    projected = torch.zeros(rows, last + 1, last, dtype=torch.float64)
    found = Radius(value=torch.empty(0), residual=torch.empty(0), products=0)
    for done in range(1, last + 1):
        image_Rn = _product(phi, state_RX, basis_mRn[-1].view_as(state_RX)).flatten(1)
        direction_Rn, projected[:, : done + 1, done - 1] = _orthogonal(image_Rn, torch.stack(basis_mRn))
        basis_mRn.append(direction_Rn)
        if done % _LOOK_EVERY == 0 or done == last:
            found = _dominant(projected[:, : done + 1, :done], done)
            if (found.residual < tolerance).all():
                break
    return found


def _product(phi: Phi, state: Tensor, direction: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        image = forward_ad.unpack_dual(phi(forward_ad.make_dual(state, direction))).tangent
        return torch.zeros_like(state) if image is None else image


def _orthogonal(image_Rn: Tensor, basis_mRn: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vector [R, n] of what `image_Rn` adds to the basis (0 if nothing), and its coordinates [R, m + 1]."""
    rest_Rn, coordinates_Rm = image_Rn, torch.zeros(image_Rn.shape[0], len(basis_mRn)).to(image_Rn)
    for _ in range(2):  # once leaves rounding errors along the basis that the next products would grow
        along_Rm = torch.einsum("mrn,rn->rm", basis_mRn, rest_Rn)
        rest_Rn = rest_Rn - torch.einsum("mrn,rm->rn", basis_mRn, along_Rm)
        coordinates_Rm = coordinates_Rm + along_Rm
    height_R1 = torch.linalg.vector_norm(rest_Rn, dim=-1, keepdim=True)
    rounding_R1 = 10 * torch.finfo(image_Rn.dtype).eps * torch.linalg.vector_norm(image_Rn, dim=-1, keepdim=True)
    height_R1 = height_R1.where(height_R1 > rounding_R1, 0.0)
    new_Rn = _unit(rest_Rn).where(height_R1 > 0, 0.0)
    return new_Rn, torch.cat([coordinates_Rm, height_R1], dim=-1).double().cpu()


def _dominant(projected: Tensor, done: int) -> Radius:
    """The eigenvalue of the largest modulus of each [m + 1, m] projection, whose last row is what leaves the span."""
    broken = ~projected.isfinite().all(-1).all(-1)
    values, vectors = torch.linalg.eig(projected[:, :-1].masked_fill(broken[:, None, None], 0.0))
    moduli = values.abs()
    index = moduli.argmax(-1, keepdim=True)
    value = moduli.gather(-1, index).squeeze(-1).masked_fill(broken, torch.nan)
    last_entry = vectors[:, -1].gather(-1, index).squeeze(-1).abs()
    leaves = projected[:, -1, -1] * last_entry
    return Radius(value=value, residual=leaves / value.clamp(min=torch.finfo(value.dtype).tiny), products=done)


def _unit(vectors_Rn: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(vectors_Rn, dim=-1, keepdim=True)
    return vectors_Rn / norms.clamp(min=torch.finfo(vectors_Rn.dtype).tiny)
