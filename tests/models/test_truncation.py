"""Truncated backpropagation changes gradients, never values, and its memory does not grow with the loops."""

import pytest
import torch

from conftest import random_ids, tiny_model
from looplm.analysis.allocations import peak_bytes

HUGINN = {
    "prelude_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
    "injection": "concat", "state_init": "normal", "rope": "adjacent",
}  # fmt: skip


def gradients(model, ids, **arguments):
    model.zero_grad()
    out = model(ids, labels=ids, **arguments)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("grad_loops", [1, 2, 5])
def test_values_stay_and_gradients_are_those_of_a_detached_start(grad_loops):
    """The last k loops see the state before them as a constant: as if it were given as the start state."""
    model, ids = tiny_model(**HUGINN).train(), random_ids(2, 7)
    full, whole = gradients(model, ids, loops=5)
    truncated, found = gradients(model, ids, loops=5, grad_loops=grad_loops)
    assert torch.equal(truncated.logits, full.logits)
    if grad_loops == 5:
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        return
    with torch.no_grad():
        before = model(ids, loops=5 - grad_loops).states[5 - grad_loops]
    _, wanted = gradients(model, ids, loops=grad_loops, init_state=before)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    assert not torch.allclose(found["model.core.0.mlp.up_proj.weight"], whole["model.core.0.mlp.up_proj.weight"])


def test_injected_inputs_still_train_the_prelude():
    _, found = gradients(tiny_model(**HUGINN).train(), random_ids(2, 7), loops=9, grad_loops=1)
    assert found["model.prelude.0.mlp.up_proj.weight"].abs().max() > 0
    assert found["model.embed_tokens.weight"].abs().max() > 0


def test_backward_memory_is_independent_of_the_loops():
    model, ids = tiny_model(**HUGINN).train(), random_ids(4, 64)
    held = {}
    for loops in (4, 32):
        held[loops] = peak_bytes(lambda loops=loops: model(ids, labels=ids, loops=loops, grad_loops=2).loss.backward())
        model.zero_grad()
    whole = peak_bytes(lambda: model(ids, labels=ids, loops=32).loss.backward())
    assert held[32] < 1.15 * held[4]  # each loop's gate logit is kept, nothing else
    assert whole > 3 * held[32]


def test_more_gradient_loops_than_loops_is_all_of_them():
    model, ids = tiny_model().train(), random_ids(1, 5)
    _, whole = gradients(model, ids, loops=2)
    _, found = gradients(model, ids, loops=2, grad_loops=8)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    with pytest.raises(ValueError, match="grad_loops=0 must be a whole number of at least 1"):
        model(ids, grad_loops=0)
