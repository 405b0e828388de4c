"""How sure every loop is of its tokens, against whole distributions of one row at a time."""

import pytest
import torch

from conftest import tiny_model
from looplm.models.replay import replay
from looplm.objectives import PolicyGradient
from looplm.rl.batches import Scored
from looplm.rl.rollouts import Rollout
from looplm.rl.signals import signals

LOOPS = ([1, 3, 2, 1], [2, 1])


def rollout(loops, seed):
    ids = torch.randint(61, (3 + len(loops),), generator=torch.Generator().manual_seed(seed)).tolist()
    return Rollout(
        prompt_ids=ids[:3], token_ids=ids[3:], loops=loops, logprobs=[-1.0] * len(loops), text="", finished=True,
        max_loops=3,
    )  # fmt: skip


def test_a_loops_entropy_is_that_of_the_tokens_that_did_it():
    model = tiny_model(exit_gate=True)
    rollouts = [rollout(loops, seed) for seed, loops in enumerate(LOOPS)]
    by_loop = {1: [], 2: [], 3: []}
    for one in rollouts:
        ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
        read, keys = torch.full_like(ids, 3), torch.full_like(ids, 3)
        read[0, 2:-1], keys[0, 3:-1] = torch.tensor(one.loops), torch.tensor(one.loops[1:])
        trace = replay(model.model, ids, None, exits=keys, read=read, loops=3)
        for place, left in enumerate(one.loops, start=2):
            for loop in range(1, left + 1):
                log_p = (model.logits_at(trace, loop)[0, place] / 0.7).log_softmax(-1)
                by_loop[loop].append(-(log_p.exp() * log_p).sum().item())
    group = [Scored(rollout=one, advantage=value) for one, value in zip(rollouts, (1.0, -1.0), strict=True)]
    found = signals(model, PolicyGradient(temperature=0.7), group, 3, 0, full_keys=False)
    assert [len(values) for values in by_loop.values()] == [6, 3, 1]
    for loop, values in by_loop.items():
        assert found[f"entropy_loop{loop}"] == pytest.approx(sum(values) / len(values), abs=1e-5)


def test_a_loop_that_no_token_did_has_no_entropy():
    group = [Scored(rollout=rollout([1, 2], 0), advantage=1.0)]
    found = signals(tiny_model(exit_gate=True), PolicyGradient(), group, 3, 0, full_keys=False)
    assert "entropy_loop2" in found
    assert "entropy_loop3" not in found
