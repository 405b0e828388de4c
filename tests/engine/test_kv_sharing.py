"""Every key/value policy, at any exit depths, equals decoding written out under the named policy."""

import random

import pytest
import torch
from engine_models import huginn_like, ouro_like
from plain_decoding import decode_plainly

from looplm.analysis.exit_decoding import decode_with_exits
from looplm.engine import (
    AdjacentKV,
    AveragedKV,
    Engine,
    ExitCDF,
    FirstKV,
    FullKV,
    KVPolicy,
    RingKV,
    SamplingParams,
)
from looplm.models.exits import exit_loops

POLICIES = [FullKV(), RingKV(1), RingKV(2), RingKV(3), AdjacentKV(2), AdjacentKV(3), FirstKV(), AveragedKV()]
NUM_TOKENS = 20


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("family", [ouro_like, huginn_like])
@pytest.mark.parametrize("deterministic", [False, True])
def test_any_exit_depths_under_any_policy(policy: KVPolicy, family, deterministic: bool) -> None:
    model = family()
    choice = random.Random(repr(policy))
    prompts = [[choice.randrange(61) for _ in range(length)] for length in (1, 16, 17, 37)]
    depths = [[choice.randint(1, 4) for _ in range(NUM_TOKENS)] for _ in prompts]
    engine = Engine(model, kv=policy, max_length=64, deterministic=deterministic)
    numbers = [
        engine.submit(prompt, SamplingParams(max_tokens=NUM_TOKENS), replay=depth)[0]
        for prompt, depth in zip(prompts, depths, strict=True)
    ]
    done = {}
    while engine.busy:
        done |= {event.number: event.completion for event in engine.tick() if event.completion is not None}
    for number, prompt, depth in zip(numbers, prompts, depths, strict=True):
        tokens, _, logits = decode_plainly(model, prompt, policy, 4, lambda i, _, depth=depth: depth[i], NUM_TOKENS)
        assert done[number].token_ids == tokens
        assert done[number].loops == depth
        wanted = [row.log_softmax(-1)[token].item() for row, token in zip(logits, tokens, strict=True)]
        assert done[number].logprobs == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_gate_decides_as_it_does_in_plain_decoding(policy: KVPolicy) -> None:
    model = ouro_like(seed=3)
    with torch.no_grad():
        model.model.exit_gate.weight.mul_(20)
    prompt = [5, 9, 2, 44, 17]
    tokens, depths, _ = decode_plainly(
        model, prompt, policy, 4, lambda _, gates: int(exit_loops(gates, 0.6)), NUM_TOKENS
    )  # fmt: skip
    done = Engine(model, kv=policy, depth=ExitCDF(0.6), max_length=64).generate(
        [prompt], SamplingParams(max_tokens=NUM_TOKENS)
    )  # fmt: skip
    assert len(set(depths)) > 1
    assert (done[0].token_ids, done[0].loops) == (tokens, depths)


def test_recomputed_keys_are_those_of_running_every_loop() -> None:
    """Then tokens and loops are what reading all loops afterwards gives, and no loop is run that nobody asks for."""
    model = ouro_like(seed=3)
    with torch.no_grad():
        model.model.exit_gate.weight.mul_(20)
    prompts = [[5, 9, 2, 44, 17], [1] * 20, [7]]
    engine = Engine(model, kv="recomputed", depth=ExitCDF(0.6), max_length=64)
    done = engine.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS))
    for prompt, completion in zip(prompts, done, strict=True):
        made = decode_with_exits(model, torch.tensor([prompt]), 0.6, NUM_TOKENS)
        assert completion.token_ids == [one.token for one in made]
        assert completion.loops == [one.loop for one in made]
    assert engine.stats.core_steps < 4 * 3 * (NUM_TOKENS - 1)
    shallow = Engine(model, kv="recomputed", max_length=64)
    shallow.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS), replay=[1] * NUM_TOKENS)
    assert shallow.stats.core_steps == 3 * (NUM_TOKENS - 1)
    one_deep = Engine(model, kv="recomputed", max_length=64)
    one_deep.generate([[7]], SamplingParams(max_tokens=4), replay=[1, 1, 1, 3])
    assert one_deep.stats.core_steps == 1 + 1 + 3 + 2 * 2  # two tokens catch up two loops each


def test_tokens_start_warm_from_their_predecessors_state() -> None:
    model = huginn_like(seed=1)
    depths = [1, 4, 2, 3] * 5
    tokens, _, _ = decode_plainly(
        model, [1, 2, 3], FullKV(), 4, lambda i, _: depths[i], NUM_TOKENS, state_seed=7, warm_start=True
    )  # fmt: skip
    engine = Engine(model, max_length=64)
    done = engine.generate(
        [[1, 2, 3]], SamplingParams(max_tokens=NUM_TOKENS), replay=depths, state_seed=7, warm_start=True
    )  # fmt: skip
    cold = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=NUM_TOKENS), replay=depths, state_seed=7)
    assert done[0].token_ids == tokens
    assert cold[0].token_ids != tokens


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_pages_held_are_those_of_the_policys_slots(policy: KVPolicy) -> None:
    engine = Engine(ouro_like(), kv=policy, max_length=128)
    engine.submit(list(range(40)), SamplingParams(max_tokens=60))
    for _ in range(20):
        engine.tick()
    (row,) = engine.scheduler.rows
    assert {len(block.core) for block in row.blocks} == {policy.slots(4)}
    cached = 0 if engine.memory.prefixes is None else 2 * 4  # two full blocks of the prompt, all loops of them
    in_both = 0 if engine.memory.prefixes is None else 2 * policy.slots(4)
    used = engine.memory.core_pages.num_pages - engine.memory.core_pages.num_free
    assert used == len(row.blocks) * policy.slots(4) + cached - in_both
