"""Speculation changes no token: greedy or sampled, at every entry loop and width, with early exits and stops."""

import itertools

import pytest
import torch
from engine_models import huginn_like, ouro_like
from torch.nn import functional as F

from looplm.engine import Engine, ExitCDF, LogitsKL, SamplingParams, Speculation, StateConverged
from looplm.engine.speculation import RowAcceptance, TickCost

PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44], [7] * 17]


def trained(family, steps: int = 250):
    """A model that has learnt a text with choices in it, read at every loop: its early loops are often right."""
    model = family(dtype=torch.float32, core_layers=1, hidden_size=32, initializer_range=0.05)
    choice = torch.Generator().manual_seed(0)
    follows = torch.randint(61, (61, 3), generator=choice)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        ids = torch.randint(61, (8, 1), generator=choice)
        for _ in range(15):
            pick = torch.randint(6, (8,), generator=choice).clamp(max=2)
            ids = torch.cat([ids, follows[ids[:, -1], pick][:, None]], dim=1)
        out = model(ids, keep_loops="all", use_cache=False)
        losses = [
            F.cross_entropy(model.logits_at(out, loop)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            for loop in range(1, 5)
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def ouro_trained():
    return trained(ouro_like)


WAYS = [
    Speculation(entry=entry, width=width, reread=reread)
    for entry, width, reread in itertools.product((1, 2, 3), (None, 2, 3), (True, False))
] + [Speculation()]  # fmt: skip


@pytest.mark.parametrize("speculate", WAYS, ids=lambda way: f"{way.entry}-{way.width}-{way.reread}")
def test_greedy_and_sampled_tokens_are_those_of_plain_decoding(ouro_trained, speculate):
    engines = [Engine(ouro_trained, max_length=128, deterministic=True, speculate=way) for way in (None, speculate)]
    for params in (
        SamplingParams(max_tokens=60),
        SamplingParams(max_tokens=60, temperature=0.9, seed=1, top_p=0.9, repetition_penalty=1.1),
    ):
        plain, fast = (engine.generate(PROMPTS, params) for engine in engines)
        assert [one.token_ids for one in fast] == [one.token_ids for one in plain]
        assert [one.logprobs for one in fast] == [one.logprobs for one in plain]
    plain, fast = (engine.stats for engine in engines)
    assert fast.agreed > 0.3 * fast.proposed > 0
    assert fast.ticks < plain.ticks


@pytest.mark.parametrize("policy", [ExitCDF(0.6), StateConverged(0.5), LogitsKL(0.3)], ids=repr)
def test_it_composes_with_early_exit(ouro_trained, policy):
    plain, fast = (
        Engine(ouro_trained, depth=policy, max_length=128, deterministic=True, speculate=way).generate(
            PROMPTS, SamplingParams(max_tokens=50, temperature=0.7, seed=2)
        )
        for way in (None, Speculation(entry=1))
    )
    assert [(one.token_ids, one.loops) for one in fast] == [(one.token_ids, one.loops) for one in plain]


def test_it_composes_with_prelude_and_coda():
    model = trained(huginn_like, steps=120)
    for policy in (None, StateConverged(0.5)):
        plain, fast = (
            Engine(model, depth=policy, max_length=128, deterministic=True, speculate=way).generate(
                PROMPTS, SamplingParams(max_tokens=50, temperature=0.7, seed=2)
            )
            for way in (None, Speculation(entry=2))
        )
        assert [(one.token_ids, one.loops) for one in fast] == [(one.token_ids, one.loops) for one in plain]


def test_an_end_inside_an_accepted_run_ends_the_text_there(ouro_trained):
    plain = Engine(ouro_trained, max_length=128, deterministic=True)
    fast = Engine(ouro_trained, max_length=128, deterministic=True, speculate=Speculation())
    free = plain.generate([PROMPTS[0]], SamplingParams(max_tokens=40))[0].token_ids
    for stop in set(free[3:]):
        params = SamplingParams(max_tokens=40, stop_token_ids=[stop])
        ended = fast.generate([PROMPTS[0]], params)[0]
        assert ended.token_ids == free[: free.index(stop) + 1]
        assert ended.finish_reason == "stop"
    assert not fast.scheduler.rows


def agreeing(loops: int = 4):
    """A model whose core does nothing: every loop reads the same."""
    model = ouro_like(dtype=torch.float32, norm_placement="pre", norm_in_loop=False, loops=loops)
    with torch.no_grad():
        for block in model.model.core:
            block.attention.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize(("entry", "a_token"), [(1, 1), (2, 2), (3, 3)])
def test_where_every_proposal_is_right_a_token_takes_as_many_ticks_as_its_entry_loop(entry, a_token):
    engine = Engine(agreeing(), max_length=256, speculate=Speculation(entry=entry))
    engine.generate([[5]], SamplingParams(max_tokens=100))
    assert engine.stats.agreed == engine.stats.proposed > 90
    assert engine.stats.rejected == 0
    assert 99 * a_token <= engine.stats.ticks <= 99 * a_token + 4
    assert engine.stats.core_steps <= 4 * 99 + 8  # what was begun behind the last token is all that is wasted


def test_proposals_are_reported_and_corrected(ouro_trained):
    engine = Engine(ouro_trained, max_length=128, speculate=Speculation(entry=1, anytime=True))
    shown: dict[int, int] = {}
    final: dict[int, int] = {}
    early = 0
    for event in engine.stream(PROMPTS[0], SamplingParams(max_tokens=50, temperature=0.9, seed=4)):
        if event.completion is not None:
            assert [final[index] for index in range(50)] == event.completion.token_ids
        elif event.provisional:
            shown[event.index] = event.token
        else:
            early += shown.get(event.index) == event.token
            final[event.index] = event.token
    assert 10 < early < 50  # most were shown before they were final; some were wrong and are corrected


def test_the_entry_loop_follows_acceptance_and_cost():
    cost = TickCost()
    for lanes in (1, 2, 3, 4) * 5:
        cost.add(lanes, 1.0)  # lanes are free
    row = RowAcceptance(4)
    assert row.entry(4, 0, cost) == 1
    for _ in range(200):
        row.add({1: 0, 2: 1, 3: 1}, 1)  # loop 1 is always wrong, loop 2 always right
    assert row.entry(4, 0, cost) == 2
    for _ in range(200):
        row.add({1: 0, 2: 0, 3: 0}, 1)
    assert row.entry(4, 0, TickCost()) == 4  # nothing is right: no speculation
    dear = TickCost()
    for lanes in (1, 2, 3, 4) * 20:
        dear.add(lanes, float(lanes))  # lanes cost in full: two at once gain nothing
    assert dear.at(3) == pytest.approx(3.0)
    mixed = RowAcceptance(4)
    for _ in range(200):
        mixed.add({1: 0, 2: 0, 3: 1}, 1)
    assert mixed.entry(4, 0, dear) == 4
