"""The exit distribution against products of probabilities and hand-computed values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import random_ids, tiny_model
from looplm.models.exits import exit_cdf, exit_log_pdf, exit_loops, exit_pdf

logits = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=8)


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_by_hand():
    gate = torch.tensor([logit(0.3)] * 4)
    expected = [0.3, 0.7 * 0.3, 0.49 * 0.3, 0.343]
    torch.testing.assert_close(exit_pdf(gate), torch.tensor(expected))
    torch.testing.assert_close(exit_cdf(gate), torch.tensor([0.3, 0.51, 0.657, 1.0]))
    assert exit_loops(gate, 0.5) == 2
    assert exit_loops(gate, 0.0) == 1
    assert exit_loops(gate, 0.3 - 1e-6) == 1
    assert exit_loops(gate, 0.66) == 4


@settings(max_examples=200, deadline=None)
@given(logits)
def test_probabilities_sum_to_one_and_agree_with_the_product_form(values):
    gate = torch.tensor(values)
    pdf = exit_pdf(gate)
    assert pdf.isfinite().all()
    assert exit_log_pdf(gate).isfinite().all()
    assert abs(pdf.sum().item() - 1) < 1e-6
    hazard = torch.sigmoid(gate.double())
    survival = torch.cumprod(torch.cat([torch.ones(1).double(), 1 - hazard]), 0)
    product = torch.cat([hazard[:-1] * survival[:-2], survival[-2:-1]])
    torch.testing.assert_close(pdf.double(), product, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(exit_cdf(gate)[:-1], pdf.cumsum(0)[:-1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_threshold_one_is_all_loops_even_when_saturated(dtype):
    gate = torch.tensor([[50.0, 50.0, 50.0, 50.0], [-3.0, 2.9, 3.2, 0.0]], dtype=dtype)
    assert exit_loops(gate, 1.0).tolist() == [4, 4]
    assert exit_pdf(gate).dtype == torch.float32


def test_bfloat16_gates_do_not_round_the_survival_away():
    hazards = (0.3, 0.95, 0.96, 0.5)  # S_3 = 0.0014: a bfloat16 CDF would round to 1 at loop 3
    gate = torch.tensor([logit(p) for p in hazards])
    assert exit_loops(gate, 0.9999) == 4
    assert exit_loops(gate, 0.998) == 3


@pytest.mark.parametrize("q", [-0.1, float("nan")])
def test_a_threshold_that_is_no_probability_is_refused(q):
    with pytest.raises(ValueError, match="exit threshold"):
        exit_loops(torch.zeros(4), q)


def test_extreme_gates_have_finite_gradients():
    gate = torch.tensor([50.0, -50.0, 50.0], requires_grad=True)
    log_pdf = exit_log_pdf(gate)
    (log_pdf.exp() * log_pdf).sum().backward()
    assert gate.grad.isfinite().all()


@pytest.mark.parametrize("q", [0.0, 0.29, 0.5, 0.66, 1.0])
def test_no_token_leaves_before_the_floor(q):
    gate = torch.tensor([[logit(0.3)] * 4, [50.0] * 4, [-50.0] * 4])
    free = exit_loops(gate, q)
    for floor in (1, 2, 3, 4):
        assert torch.equal(exit_loops(gate, q, floor), free.clamp(min=floor))


@pytest.mark.parametrize("floor", [0, 5, -1])
@pytest.mark.parametrize("q", [0.5, 1.0])
def test_a_floor_outside_the_loops_is_refused(floor, q):
    with pytest.raises(ValueError, match=f"min_loops={floor} must be between 1 and the call's loops, 4"):
        exit_loops(torch.zeros(2, 4), q, floor)


def test_a_model_reads_from_the_floor_on():
    model, ids = tiny_model(), random_ids(2, 6)
    model.model.exit_gate.bias.data.fill_(50.0)
    out = model(ids, keep_loops="all")
    assert (model.exit_loops(out, 0.5) == 1).all()
    assert (model.exit_loops(out, 0.5, min_loops=2) == 2).all()
    torch.testing.assert_close(model.logits_at_exit(out, 0.5, min_loops=2), model.logits_at(out, 2))
    torch.testing.assert_close(model.model.hidden_at_exit(out, 0.5, min_loops=2), model.hidden_at(out, 2))
