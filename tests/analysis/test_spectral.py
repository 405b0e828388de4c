"""Spectral radii of matrices of chosen eigenvalues, and of a model whose whole Jacobian is written out."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from conftest import random_ids, tiny_model
from looplm.analysis.capture import walk
from looplm.analysis.spectral import spectral_radius


def linear(*matrices):
    """phi: row r of [R, n] by its own matrix."""
    stacked = torch.stack(matrices)
    return lambda state: torch.einsum("rij,rj->ri", stacked, state)


def of_eigenvalues(real, pairs, seed=0):
    """A matrix with these eigenvalues: real ones, and complex pairs (modulus, angle), in a skewed basis."""
    blocks = [torch.tensor([[value]], dtype=torch.float64) for value in real]
    for modulus, angle in pairs:
        cos, sin = math.cos(angle), math.sin(angle)
        blocks.append(modulus * torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64))
    diagonal = torch.block_diag(*blocks)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.eye(len(diagonal), dtype=torch.float64) + 0.3 * torch.randn(
        diagonal.shape, generator=generator, dtype=torch.float64
    )
    return basis @ diagonal @ torch.linalg.inv(basis)


@pytest.mark.parametrize(
    ("matrix", "radius"),
    [
        ([[0.5, 0.5], [0.5, 0.5]], 1.0),
        ([[0.0, -0.9], [0.9, 0.0]], 0.9),
        ([[0.5, 10.0], [0.0, 0.5]], 0.5),
        ([[0.7, 0.0], [0.0, 0.7]], 0.7),
        ([[-2.0, 0.0], [0.0, 1.0]], 2.0),
        ([[0.0, 1.0], [0.0, 0.0]], 0.0),
    ],
)
def test_two_by_two_matrices_of_known_radius(matrix, radius):
    found = spectral_radius(linear(torch.tensor(matrix, dtype=torch.float64)), torch.zeros(1, 2, dtype=torch.float64))
    assert found.value.item() == pytest.approx(radius, abs=1e-6)


@pytest.mark.parametrize(
    ("real", "pairs", "radius"),
    [
        ([1.3, -0.4, 0.9], [(1.2, 1.0), (0.5, 2.0)], 1.3),
        ([-1.1, 0.3], [(1.0, 0.5)], 1.1),
        ([0.8, 0.1, -0.6], [(0.95, 2.2), (0.9, 0.1)], 0.95),
    ],
)
def test_the_radius_of_chosen_eigenvalues_complex_pairs_included(real, pairs, radius):
    small = [0.01 * index for index in range(30)]
    matrix = of_eigenvalues(real + small, pairs)
    assert torch.linalg.eigvals(matrix).abs().max().item() == pytest.approx(radius, rel=1e-6)
    found = spectral_radius(linear(matrix), torch.zeros(1, len(matrix), dtype=torch.float64), tolerance=1e-6)
    assert found.value.item() == pytest.approx(radius, rel=1e-4)
    assert found.residual.item() < 1e-6


def test_every_row_has_its_own_radius_and_large_random_matrices_settle():
    """Random matrices crowd their eigenvalues at the edge of a disc, the worst case, in float32 too."""
    size = 60
    matrices = [torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) / 8 for seed in range(4)]
    expected = [torch.linalg.eigvals(matrix.double()).abs().max().item() for matrix in matrices]
    found = spectral_radius(linear(*matrices), torch.zeros(4, size))
    assert found.value.tolist() == pytest.approx(expected, rel=1e-3)
    assert found.products <= size


def test_an_unsettled_pair_says_so():
    matrix = torch.randn(200, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 14
    found = spectral_radius(linear(matrix), torch.zeros(1, 200, dtype=torch.float64), products=5)
    assert found.products == 5
    assert found.residual.item() > 0.1
    with pytest.raises(ValueError, match="products=0 must be at least 1"):
        spectral_radius(linear(matrix), torch.zeros(1, 200), products=0)


def test_a_row_whose_derivative_is_not_finite_is_nan_and_spoils_no_other():
    broken = torch.full((2, 2), torch.inf, dtype=torch.float64)
    found = spectral_radius(linear(broken, torch.eye(2).double() * 0.5), torch.zeros(2, 2, dtype=torch.float64))
    assert math.isnan(found.value[0])
    assert found.value[1].item() == pytest.approx(0.5)


def test_the_derivative_is_taken_at_the_state():
    states = torch.tensor([[0.0, 0.0], [1.0, -2.0]], dtype=torch.float64)
    found = spectral_radius(lambda state: state.tanh() * 3, states)
    assert found.value.tolist() == pytest.approx([3.0, 3 * (1 - math.tanh(1.0) ** 2)], rel=1e-9)


def test_a_real_model_agrees_with_its_whole_jacobian_and_with_its_blocks_by_position():
    model = tiny_model(hidden_size=16, intermediate_size=24, num_attention_heads=2, core_layers=1).double()
    model.requires_grad_(False)
    *_, visit = walk(model, random_ids(1, 5), 3)
    with sdpa_kernel(SDPBackend.MATH):
        whole = torch.autograd.functional.jacobian(visit.step, visit.state).squeeze(0).squeeze(2)  # [S, D, S, D]
    expected = torch.linalg.eigvals(whole.reshape(80, 80)).abs().max().item()
    by_position = max(torch.linalg.eigvals(whole[at, :, at]).abs().max().item() for at in range(5))
    assert by_position == pytest.approx(expected, rel=1e-6)
    found = spectral_radius(visit.step, visit.state)
    assert found.value.item() == pytest.approx(expected, rel=1e-3)
