"""What the engine recorded, run again in one parallel call: log-probabilities of every token at its own loop."""

import pytest
import torch
from tests.conftest import tiny_model

import looplm
from looplm.models.replay import replay

PROMPTS = [[5, 9, 11, 3, 20, 8, 4], [7, 2], [1, 30, 44, 18, 6, 9, 12, 13, 14, 15, 16, 17, 40, 41, 42, 43, 45, 46]]
HUGINN = {
    "prelude_layers": 1, "core_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
    "injection": "concat", "state_init": "normal", "exit_gate": True,
}  # fmt: skip


def batch_of(done, loops):
    """Padded ids [B, S] with their mask, and for every position the loops of its keys and of its reading."""
    texts = [[*one.prompt_token_ids, *one.token_ids] for one in done]
    width = max(map(len, texts))
    ids, mask = torch.zeros(len(done), width, dtype=torch.long), torch.zeros(len(done), width, dtype=torch.long)
    exits, read = torch.full((len(done), width), loops), torch.full((len(done), width), loops)
    for row, (one, text) in enumerate(zip(done, texts, strict=True)):
        first = len(one.prompt_token_ids)
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
        read[row, first - 1 : first - 1 + len(one.loops)] = torch.tensor(one.loops)
        exits[row, first : first - 1 + len(one.loops)] = torch.tensor(one.loops[1:])
    return ids, mask, exits, read


def replayed(model, done, loops, temperature=1.0, **more):
    """The log-probability of every completion's tokens, at the loop each was read at."""
    ids, mask, exits, read = batch_of(done, loops)
    trace = replay(model.model, ids, mask, exits=exits, read=read, loops=loops, **more)
    log_p = (model.lm_head(trace.last_hidden_state) / temperature).log_softmax(-1)
    found = []
    for row, one in enumerate(done):
        first = len(one.prompt_token_ids)
        places = torch.arange(first - 1, first - 1 + len(one.token_ids))
        found.append(log_p[row, places, torch.tensor(one.token_ids)])
    return found


@pytest.mark.parametrize("parts", [{"exit_gate": True}, HUGINN], ids=["ouro-like", "huginn-like"])
@pytest.mark.parametrize("depth", [looplm.ExitCDF(0.5), looplm.Margin(0.2), looplm.FixedLoops(4)], ids=str)
def test_every_token_has_the_log_probability_that_it_was_drawn_with(parts, depth):
    model = tiny_model(loops=4, **parts).double()
    engine = looplm.Engine(model, depth=depth, loops=4)
    params = looplm.SamplingParams(
        max_tokens=12, temperature=0.6, ignore_eos=True, n=2, logprobs_mode="processed", seed=3
    )
    done = engine.generate(PROMPTS, params)
    loops = {loop for one in done for loop in one.loops}
    assert len(loops) > 1 or isinstance(depth, looplm.FixedLoops)
    with torch.no_grad():
        for one, found in zip(done, replayed(model, done, 4, temperature=0.6), strict=True):
            torch.testing.assert_close(found, torch.tensor(one.logprobs, dtype=torch.float64), atol=1e-9, rtol=0)


def test_tokens_that_left_early_do_not_run_on():
    """Without the fill the parallel call disagrees: the test above would see a store that is not filled."""
    model = tiny_model(loops=4, exit_gate=True)
    done = looplm.Engine(model, depth=looplm.ExitCDF(0.5)).generate(
        PROMPTS, looplm.SamplingParams(max_tokens=12, temperature=0.6, ignore_eos=True, logprobs_mode="processed")
    )
    ids, mask, exits, read = batch_of(done, 4)
    with torch.no_grad():
        right, wrong = (
            replay(model.model, ids, mask, exits=given, read=read, loops=4).last_hidden_state
            for given in (exits, torch.full_like(exits, 4))
        )
    assert (right - wrong).abs().max() > 1e-3


@pytest.mark.parametrize("unit", ["block", "loop"])
def test_gradients_survive_activation_checkpointing(unit):
    """Activation checkpointing runs loops again, and the store gives them the same keys."""
    model = tiny_model(loops=3, exit_gate=True, core_layers=2).double().train()
    done = looplm.Engine(tiny_model(loops=3, exit_gate=True, core_layers=2), depth=looplm.ExitCDF(0.5)).generate(
        PROMPTS, looplm.SamplingParams(max_tokens=6, ignore_eos=True)
    )
    ids, mask, exits, read = batch_of(done, 3)
    (wanted,) = _gradient(model, ids, mask, exits, read)
    if unit == "block":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif unit == "loop":
        model.model.checkpoint_loops()
    (found,) = _gradient(model, ids, mask, exits, read)
    torch.testing.assert_close(found, wanted)


def _gradient(model, ids, mask, exits, read):
    trace = replay(model.model, ids, mask, exits=exits, read=read, loops=3)
    loss = sum(state.square().mean() for state in trace.states.values()) + trace.last_hidden_state.sum()
    return torch.autograd.grad(loss, [model.model.core[1].attention.k_proj.weight])


def test_no_early_exit_is_the_plain_call():
    model = tiny_model(loops=3, exit_gate=True)
    ids = torch.tensor([PROMPTS[0]])
    full = torch.full(ids.shape, 3)
    trace = replay(model.model, ids, None, exits=full, read=full, loops=3)
    plain = model(ids, keep_loops="all")
    torch.testing.assert_close(trace.last_hidden_state, model.hidden_at(plain, 3), atol=0, rtol=0)
    for loop in (1, 2, 3):
        torch.testing.assert_close(trace.states[loop], plain.states[loop], atol=0, rtol=0)
