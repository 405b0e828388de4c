"""Costs beside a score: published counts, numbers by hand, and what torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import random_ids, tiny_config, tiny_model
from looplm.evals.accounting import (
    DENSE,
    Rollout,
    costs_of,
    dense,
    multiplier,
    qwen3_1_7b,
    qwen3_4b,
    rollout_flops_per_token,
    rollout_multiplier,
)
from looplm.models.accounting import count_parameters, flops_per_token
from looplm.models.presets import ouro_1_4b, ouro_2_6b

AT_THE_LIMIT = Rollout(prompt=200, generated=3072, attention_counted=sum(range(1, 31)) / 30)


def test_dense_shapes_have_the_published_parameter_counts():
    assert {name: count_parameters(shape()) for name, shape in DENSE.items()} == {
        "Qwen3-1.7B": 1_720_574_976,
        "Qwen3-4B": 4_022_468_096,
    }


def test_multipliers_by_hand():
    """Per layer Ouro has 4 x 2048^2 + 3 x 2048 x 5632 weights, Qwen3 those of its 16 or 32 query and 8 key heads."""
    ouro, layer = ouro_2_6b(), 4 * 2048**2 + 3 * 2048 * 5632
    small = 2048 * 128 * (2 * 16 + 2 * 8) + 3 * 2048 * 6144
    large = 2560 * 128 * (2 * 32 + 2 * 8) + 3 * 2560 * 9728
    gates = 4 * 2048
    for against, weights, head, attention in (
        (qwen3_1_7b(), 28 * small, 2048 * 151936, 28 * 16),
        (qwen3_4b(), 36 * large, 2560 * 151936, 36 * 32),
    ):
        found = multiplier(ouro, against, context_length=1000)
        assert found.weights == pytest.approx((192 * layer + gates) / weights, rel=1e-12)
        assert found.attention == pytest.approx(192 * 16 / attention, rel=1e-12)
        assert found.parameters == pytest.approx(4 * 2_667_974_657 / count_parameters(against), rel=1e-12)
        ours = 192 * layer + gates + 2048 * 49152 + 2 * 1000 * 192 * 16 * 128
        assert found.flops == pytest.approx(ours / (weights + head + 2 * 1000 * attention * 128), rel=1e-12)
    assert multiplier(ouro, qwen3_4b(), loops=2).weights == pytest.approx(found.weights / 2, rel=1e-5)


def test_no_count_of_shapes_gives_what_rltt_measured_but_its_profiler_does():
    """RLTT's 6.75 and 2.63: the attention of its k-th of 30 rollouts was counted k times, and some ended early."""
    ouro = ouro_2_6b()
    small, large = (rollout_multiplier(ouro, against, AT_THE_LIMIT) for against in (qwen3_1_7b(), qwen3_4b()))
    assert (round(small, 2), round(large, 2)) == (6.49, 2.61)
    assert small == pytest.approx(6.75, rel=0.04)
    assert large == pytest.approx(2.63, rel=0.01)
    for against, generated, published in ((qwen3_1_7b(), 2850, 6.75), (qwen3_4b(), 3020, 2.63)):
        shorter = Rollout(prompt=200, generated=generated, attention_counted=15.5)
        assert round(rollout_multiplier(ouro, against, AT_THE_LIMIT, shorter), 2) == published
    once = Rollout(prompt=200, generated=3072)
    assert [round(rollout_multiplier(ouro, against(), once), 2) for against in DENSE.values()] == [5.95, 2.51]


@pytest.mark.parametrize("shape", [{}, {"num_key_value_heads": 2, "prelude_layers": 1, "coda_layers": 1}])
@torch.no_grad()
def test_a_rollout_costs_what_torch_counts(shape):
    config, prompt, generated = tiny_config(**shape), 7, 5
    model = tiny_model(**shape)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model.generate(
            random_ids(1, prompt), attention_mask=torch.ones(1, prompt, dtype=torch.long), do_sample=False, loops=2,
            max_new_tokens=generated, min_new_tokens=generated, pad_token_id=0,
        )  # fmt: skip
    rollout = Rollout(prompt=prompt, generated=generated)
    assert counter.get_total_flops() == pytest.approx(
        generated * rollout_flops_per_token(config, rollout, 2), rel=1e-12
    )
    twice = Rollout(prompt=prompt, generated=generated, attention_counted=2)
    keys = prompt**2 + 8 + 9 + 10 + 11
    more = rollout_flops_per_token(config, twice, 2) - rollout_flops_per_token(config, rollout, 2)
    layers = config.slots(2)
    assert more * generated == pytest.approx(4 * keys * layers * 32, rel=1e-12)


def test_costs_of_a_fixed_depth():
    costs = costs_of(ouro_1_4b(), 4, against={"itself": dense(24, hidden_size=2048, intermediate_size=5632,
                     vocab_size=49152, num_attention_heads=16, num_key_value_heads=16, head_dim=128)})  # fmt: skip
    core, head = 24 * 51_380_224, 2048 * 49152
    assert costs == {
        "mean loops": 4.0,
        "flops per token": 2 * (4 * core + 4 * 2048 + head),
        "kv bytes per token": 768 * 1024,
        "x itself": pytest.approx((4 * core + 4 * 2048 + head) / (core + head), rel=1e-12),
    }
    assert costs_of(ouro_1_4b(), 2)["kv bytes per token"] == 384 * 1024
    assert costs_of(ouro_1_4b(), 4, kv="last")["kv bytes per token"] == 192 * 1024


def test_costs_of_exits_are_the_mean_over_tokens_and_keep_the_slots_of_all_loops():
    config = tiny_config(prelude_layers=1, exit_gate=True)
    costs = costs_of(config, {1: 3, 2: 1}, 10, dtype=torch.float32)
    by_depth = [flops_per_token(config, loops, 10) for loops in (1, 2)]
    assert costs == {
        "mean loops": 1.25,
        "flops per token": (3 * by_depth[0] + by_depth[1]) / 4,
        "kv bytes per token": 2 * 32 * 4 * (1 + 3 * 2),
    }
    assert costs_of(config, {1: 0.75, 2: 0.25}, 10) == costs_of(config, {1: 3, 2: 1}, 10)
    assert costs_of(config, {5: 1.0})["kv bytes per token"] == 2 * 32 * 2 * (1 + 5 * 2)


@pytest.mark.parametrize("depth", [0, {}, {0: 1.0}, {1: 0.0}, {1: 2.0, 2: -1.0}])
def test_a_depth_without_loops_is_refused(depth):
    with pytest.raises(ValueError, match="must be at least 1 loop, or tokens by the loop"):
        costs_of(tiny_config(), depth)


def test_an_empty_rollout_is_refused():
    with pytest.raises(ValueError, match="must be at least 1 token"):
        Rollout(prompt=0, generated=3)
