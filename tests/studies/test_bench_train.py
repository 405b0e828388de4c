"""The training benchmark: the hand-written model is the same model, and all three are measured."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from looplm.models import LoopLMForCausalLM
from looplm.objectives import ExpectedLoss
from looplm.studies.bench_train import TrainProblem, _our_loss, bench_train, step_flops
from looplm.studies.plain_model import PlainLoopedModel
from looplm.training.module import ObjectiveModule

PROBLEM = TrainProblem(width=64, layers=2, loops=3, vocab=97, rows=2, length=16)


def copied(model, loops):
    """The hand-written model with our weights."""
    config = model.config
    plain = PlainLoopedModel(97, 64, config.intermediate_size, 1, config.core_layers, loops).double()
    ours = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    state = {
        "embed.weight": ours["embed_tokens.weight"], "norm.weight": ours["norm.weight"],
        "head.weight": ours["lm_head.weight"], "exit_gate.weight": ours["exit_gate.weight"],
        "exit_gate.bias": ours["exit_gate.bias"],
    }  # fmt: skip
    for i in range(config.core_layers):
        core, block = f"core.{i}.", f"blocks.{i}."
        state[block + "qkv.weight"] = torch.cat([ours[f"{core}attention.{p}_proj.weight"] for p in "qkv"])
        state[block + "out.weight"] = ours[core + "attention.o_proj.weight"]
        for part in ("gate", "up", "down"):
            state[f"{block}{part}.weight"] = ours[f"{core}mlp.{part}_proj.weight"]
        slots = ("attention_norms.pre", "attention_norms.branch", "mlp_norms.pre", "mlp_norms.branch")
        for j, slot in enumerate(slots):
            state[f"{block}norms.{j}.weight"] = ours[f"{core}{slot}.weight"]
    plain.load_state_dict(state, strict=True)
    return plain


@pytest.mark.parametrize("loops", [1, 3])
def test_the_yardstick_computes_what_ours_does(loops):
    torch.manual_seed(0)
    model = LoopLMForCausalLM(PROBLEM.config(2, loops)).double()
    ids = torch.randint(97, (2, 16))
    ours = _our_loss(ObjectiveModule(model, ExpectedLoss()), ids)
    torch.testing.assert_close(copied(model, loops)(ids), ours, atol=1e-5, rtol=1e-5)


def test_all_three_are_measured_at_equal_flops():
    ours, plain, unlooped = bench_train(PROBLEM, repeats=1)
    assert [row.model for row in (ours, plain, unlooped)] == ["looplm", "plain looped", "unlooped"]
    assert ours.step_gflops == plain.step_gflops
    one_layer = (step_flops(PROBLEM, 2, 1) - step_flops(PROBLEM, 1, 1)) / 1e9
    assert abs(ours.step_gflops - unlooped.step_gflops) <= one_layer / 2
    assert unlooped.layers >= 6
    assert min(row.seconds for row in (ours, plain, unlooped)) > 0


def test_flops_are_counted_as_torch_counts_them():
    """The hand-written model's products, and the causal half of the attention scores."""
    ids = torch.randint(97, (2, 16))
    plain = copied(LoopLMForCausalLM(PROBLEM.config(2, 3)).double(), 3)
    with FlopCounterMode(display=False) as counter:
        plain(ids)
    scores = 2 * 3 * 4 * 16 * 64 * 32  # of all pairs
    assert counter.get_total_flops() + scores / 2 == step_flops(PROBLEM, 2, 3) / 3  # its kernel on CPU is not counted
