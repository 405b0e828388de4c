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


def test_backward_memory_at_64_loops_is_that_at_8():
    model, ids = tiny_model(**HUGINN).train(), random_ids(4, 64)
    held = {}
    for loops in (8, 64):
        held[loops] = peak_bytes(lambda loops=loops: model(ids, labels=ids, loops=loops, grad_loops=4).loss.backward())
        model.zero_grad()
    assert held[64] <= 1.1 * held[8]


@pytest.mark.parametrize("changes", [{}, HUGINN, HUGINN | {"state_noise": 0.1, "step_conditioning": True}])
@pytest.mark.parametrize("grad_loops", [None, 3])
def test_checkpointed_loops_change_no_bit(changes, grad_loops):
    ids, found = random_ids(2, 7), []
    for enable in (False, True):
        model = tiny_model(**changes).train()
        model.model.checkpoint_loops(enable)
        out = model.model(ids, loops=5, keep_loops="all", use_cache=False, grad_loops=grad_loops)
        loss = sum(model.lm_head(model.hidden_at(out, loop)).pow(2).mean() for loop in out.states)
        (loss if out.gate_logits is None else loss + out.gate_logits.sigmoid().mean()).backward()
        found.append((loss.detach(), out.gate_logits, {n: p.grad for n, p in model.named_parameters()}))
    (loss, gates, gradients), (other_loss, other_gates, other_gradients) = found
    assert torch.equal(loss, other_loss)
    assert torch.equal(gates, other_gates)
    for name, gradient in gradients.items():
        assert (gradient is None) == (other_gradients[name] is None), name
        assert gradient is None or torch.equal(gradient, other_gradients[name]), name


def test_checkpointed_loops_hold_their_states_and_one_inside():
    model, ids = tiny_model(core_layers=3).train(), random_ids(4, 64)
    held = {}
    for enable, loops in ((False, 16), (True, 16), (True, 32)):
        model.model.checkpoint_loops(enable)
        held[enable, loops] = peak_bytes(lambda loops=loops: model(ids, labels=ids, loops=loops).loss.backward())
        model.zero_grad()
    assert held[True, 16] < held[False, 16] / 5
    state = ids.numel() * model.config.hidden_size * 4
    per_loop = (held[True, 32] - held[True, 16]) / 16
    assert state < per_loop < 1.25 * state  # the state, and a few numbers a token for its gate


def test_checkpointed_loops_go_with_no_cache():
    model, ids = tiny_model().train(), random_ids(1, 4)
    cache = model(ids, use_cache=True).cache
    model.model.checkpoint_loops()
    for arguments in ({"use_cache": True}, {"cache": cache}):
        with pytest.raises(ValueError, match="does not go with gradient checkpointing"):
            model(ids, **arguments)
    assert model(ids).cache is None
    assert model.eval()(ids).cache is not None


@pytest.mark.parametrize("changes", [HUGINN | {"state_noise": 0.1}, {"state_noise": 0.1}])
def test_a_seed_per_row_is_that_of_the_row_alone(changes):
    model, ids = tiny_model(**changes), random_ids(3, 6)
    seeds = [7, 2**62 + 11, -5]
    together = model.model(ids, state_seed=torch.tensor(seeds), use_cache=False)
    for row, seed in enumerate(seeds):
        alone = model.model(ids[[row]], state_seed=seed, use_cache=False)
        torch.testing.assert_close(together.last_hidden_state[[row]], alone.last_hidden_state, atol=1e-5, rtol=1e-5)
        wanted = alone.context.noise(alone.inputs, 1.0, stream=2)
        assert torch.equal(together.context.noise(together.inputs, 1.0, stream=2)[[row]], wanted)
        assert torch.equal(together.context.rows(torch.tensor([row])).noise(alone.inputs, 1.0, stream=2), wanted)
    assert not torch.equal(
        together.context.noise(together.inputs, 1.0)[0], together.context.noise(together.inputs, 1.0)[1]
    )
    for wrong in (torch.tensor([1, 2]), torch.tensor([1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match=r"expected \[3\] of torch.int64"):
            model(ids, state_seed=wrong)


def test_the_trace_carries_what_may_be_injected():
    model, ids = tiny_model(**HUGINN), random_ids(2, 6)
    out = model(ids, loops=2, keep_loops="all", use_cache=False)
    assert torch.equal(out.inputs, model.model.embed(model.model.embed_tokens(ids), out.context))
    assert torch.equal(model.model.step(out.states[1], out.inputs, 2, out.context), out.states[2])
