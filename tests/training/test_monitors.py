"""Monitors against slow plain references; alarms on models built to fail, and silence on a healthy one."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from conftest import random_ids, tiny_config, tiny_model
from looplm import LoopLMForCausalLM
from looplm.data.packing import Document, packed_row
from looplm.data.rows import empty_row, stack
from looplm.models.context import build_context, real_tokens
from looplm.objectives import ExpectedLoss
from looplm.training.module import MetricSums
from looplm.training.monitors import (
    Monitors,
    NonFinite,
    NonFiniteGuard,
    diagnose,
    gradient_norms,
    measure_peak_flops,
    observe,
    training_flops,
)

HUGINN = {
    "prelude_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
    "injection": "concat", "state_init": "normal", "exit_gate": False, "tie_word_embeddings": True,
}  # fmt: skip
IDS = random_ids(3, 10)


def trace_of(model, loops=4):
    return model.model(IDS, loops=loops, keep_loops="all", use_cache=False)


def observed(model, trace, real=None):
    """The means that a log would hold, over all tokens unless `real` names some."""
    sums = MetricSums()
    for part, mass in observe(
        model, trace, torch.ones(trace.inputs.shape[:2], dtype=torch.bool) if real is None else real
    ):
        sums.add(part, mass)
    return sums.means(lambda tensor: tensor)


def watched(model, loops=4):
    """What a run's log would hold: the trajectory and the held-out losses by loop."""
    with torch.no_grad():
        trace = trace_of(model, loops)
        logits = [model.logits_at(trace, loop)[:, :-1].flatten(0, 1) for loop in range(1, loops + 1)]
    losses = {f"text/loss_loop{t}": F.cross_entropy(x, IDS[:, 1:].flatten()).item() for t, x in enumerate(logits, 1)}
    return observed(model, trace) | losses


def alarms(values, **thresholds):
    return [alarm.name for alarm in diagnose(values, Monitors(**thresholds))]


# What is observed ---------------------------------------------------------------------------------------------


def test_observed_numbers_equal_sums_over_tokens():
    model = tiny_model().double()
    trace = trace_of(model)
    seen = observed(model, trace)
    states = {loop: state.flatten(0, 1).tolist() for loop, state in trace.states.items()}

    def norm(vector):
        return math.sqrt(sum(x * x for x in vector))

    for loop in range(1, 5):
        norms = [norm(token) for token in states[loop]]
        assert seen[f"state_norm_loop{loop}"] == pytest.approx(sum(norms) / 30)
        if loop > 1:
            pairs = zip(states[loop], states[loop - 1], strict=True)
            steps = [norm([a - b for a, b in zip(*pair, strict=True)]) for pair in pairs]
            ratios = [step / size for step, size in zip(steps, norms, strict=True)]
            assert seen[f"step_ratio_loop{loop}"] == pytest.approx(sum(ratios) / 30)
    assert "step_ratio_loop1" not in seen


def test_observed_exits_equal_products_of_sigmoids():
    model = tiny_model()
    trace = trace_of(model, loops=3)
    seen = observed(model, trace)
    tokens = [[1 / (1 + math.exp(-g)) for g in gates] for gates in trace.gate_logits.flatten(0, 1).tolist()]
    pdfs = [[a, (1 - a) * b, (1 - a) * (1 - b)] for a, b, _ in tokens]
    for loop in range(3):
        assert seen[f"exit_loop{loop + 1}"] == pytest.approx(sum(p[loop] for p in pdfs) / 30, rel=1e-5)
    entropies = [-sum(x * math.log(x) for x in p) for p in pdfs]
    assert seen["exit_entropy"] == pytest.approx(sum(entropies) / 30, rel=1e-5)


def test_padding_counts_in_no_number():
    """Rows of 4 and 10 real tokens, the first packed of two documents, and one of padding alone."""
    documents = [Document(tokens=IDS[0, at].tolist(), is_target=[True] * 2) for at in (slice(0, 2), slice(2, 4))]
    whole = Document(tokens=IDS[1].tolist(), is_target=[True] * 10)
    batch = stack([packed_row(documents, 10, 0), packed_row([whole], 10, 0), empty_row(10, 0)])
    real = real_tokens(batch["position_ids"])
    assert real.sum(-1).tolist() == [4, 10, 0]
    assert real[0].tolist() == [True] * 4 + [False] * 6
    model = tiny_model().double()
    arguments = {"loops": 3, "keep_loops": "all", "use_cache": False}
    padded = model.model(batch["input_ids"], position_ids=batch["position_ids"], **arguments)
    short = model.model(batch["input_ids"][:1, :4], position_ids=batch["position_ids"][:1, :4], **arguments)
    long = model.model(IDS[1:2], **arguments)
    found, one, two = observed(model, padded, real), observed(model, short), observed(model, long)
    assert found.keys() == one.keys() == two.keys()
    for name, value in found.items():
        shares = (1, 1) if name == "token_correlation" else (4, 10)
        wanted = (shares[0] * one[name] + shares[1] * two[name]) / sum(shares)
        assert value == pytest.approx(wanted, rel=1e-9), name


def test_a_process_without_a_row_adds_nothing():
    model, empty = tiny_model(), stack([empty_row(10, 0)])
    trace = model.model(empty["input_ids"], position_ids=empty["position_ids"], keep_loops="all", use_cache=False)
    assert observed(model, trace, real_tokens(empty["position_ids"])) == {}


def test_only_what_is_there_is_observed():
    model = tiny_model(**HUGINN)
    trace = model.model(IDS[:, :1], loops=4, keep_loops=[2, 4], use_cache=False)
    assert set(observed(model, trace)) == {"state_norm_loop2", "state_norm_loop4"}


# Gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ({}, {"embed", "core", "norm", "gate", "head"}),
        (HUGINN, {"embed", "prelude", "injection", "core", "coda", "norm"}),
        ({"rope": "learned", "step_conditioning": True}, {"embed", "injection", "core", "norm", "gate", "head"}),
    ],
)
def test_gradient_norms_by_part_add_up_to_the_whole(shape, parts):
    model = tiny_model(**shape)
    out = model(IDS, labels=IDS, use_cache=False)
    (out.loss if out.gate_logits is None else out.loss + out.gate_logits.sum()).backward()
    found = gradient_norms(model)
    assert set(found) == {f"grad_norm/{part}" for part in parts}
    whole = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert math.sqrt(sum(norm**2 for norm in found.values())) == pytest.approx(whole.item(), rel=1e-5)
    core = torch.cat([p.grad.flatten() for p in model.model.core.parameters()])
    assert found["grad_norm/core"] == pytest.approx(core.norm().item(), rel=1e-5)


def test_gradient_norms_of_sharded_parameters_are_whole():
    whole, sharded = tiny_model(), tiny_model()
    whole(IDS, labels=IDS, use_cache=False).loss.backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        sharded(IDS, labels=IDS, use_cache=False).loss.backward()
        assert gradient_norms(sharded) == pytest.approx(gradient_norms(whole), rel=1e-5)
    finally:
        dist.destroy_process_group()


# Alarms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, HUGINN, {"prelude_layers": 1, "injection": "diagonal", "norm_placement": "pre"}])
def test_a_healthy_model_raises_no_alarm(shape):
    assert alarms(watched(tiny_model(**shape))) == []


@pytest.mark.parametrize(("bias", "place"), [(50.0, "first"), (-50.0, "last")])
def test_a_saturated_gate_is_named(bias, place):
    model = tiny_model()
    with torch.no_grad():
        model.model.exit_gate.bias.fill_(bias)
    values = watched(model)
    assert alarms(values) == [f"gate collapse to {place}"]
    assert values["exit_entropy"] < 1e-6
    assert alarms(watched(model, loops=1)) == []  # one loop leaves nothing to choose


def test_identical_states_are_named():
    """Huginn's first bad run: a norm without weights, additive injection, and every token comes to the same state."""
    model = tiny_model(norm="plain", injection="add", norm_in_loop=False, exit_gate=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight[:1].expand(61, -1))
    values = watched(model)
    assert values["token_correlation"] == pytest.approx(1.0, abs=1e-5)
    assert "representation collapse" in alarms(values)


def test_ignored_loops_are_named():
    """Huginn's second bad run: the adapter reads the inputs alone, so every loop computes the same."""
    model = tiny_model(injection="concat")
    with torch.no_grad():
        model.model.injection.adapter.weight[:, :32] = 0
    values = watched(model)
    assert alarms(values) == ["loops ignored"]
    assert alarms({name: value for name, value in values.items() if "loss" not in name}) == []
    assert alarms({"loss_loop1": 2.0, "loss_loop2": 2.0}) == []  # a training batch's losses say nothing yet
    assert alarms({"text/loss_loop1": 2.0, "text/loss_loop2": 2.0, "text/loss_loop3": 1.9}) == []


def test_an_exploding_state_is_named():
    model = tiny_model(injection="concat", norm_in_loop=False, norm_placement="pre", exit_gate=False)
    with torch.no_grad():
        model.model.injection.adapter.weight[:, :32] = 6 * torch.eye(32)
    values = watched(model)
    assert alarms(values) == ["norm explosion"]
    assert alarms(values, growth=1e3) == []
    assert alarms(values, growth=1e3, norm=values["state_norm_loop4"] / 2) == ["norm explosion"]


def test_what_is_not_finite_is_named():
    (alarm,) = diagnose({"loss": math.nan, "grad_norm": math.inf, "a": 1.0}, Monitors())
    assert alarm.name == "non-finite"
    assert alarm.message.startswith("grad_norm, loss not finite")
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(math.nan)
    assert "non-finite" in alarms(watched(model))


def test_every_message_is_one_line_with_a_cure():
    values = {"x": math.nan, "exit_loop1": 1.0, "exit_loop2": 0.0, "token_correlation": 1.0}
    values |= {"state_norm_loop1": 1.0, "state_norm_loop2": 9.0, "a/loss_loop1": 2.0, "a/loss_loop2": 2.0}
    found = diagnose(values, Monitors())
    assert len(found) == 5
    assert all("\n" not in alarm.message and "; " in alarm.message for alarm in found)


@pytest.mark.parametrize("changes", [{"gate": 0.4}, {"correlation": 1.1}, {"growth": 1.0}, {"ignored": -1.0}])
def test_thresholds_that_always_fire_are_refused(changes):
    with pytest.raises(ValueError, match="Monitors"):
        Monitors(**changes)


def sums(seed):
    """Rows [8, 12] in which every number is the sum of the two before it, modulo 13."""
    numbers = list(torch.randint(0, 13, (2, 8), generator=torch.Generator().manual_seed(seed)))
    for _ in range(10):
        numbers.append((numbers[-1] + numbers[-2]) % 13)
    return torch.stack(numbers, dim=1)


def train_gate(beta, steps=300):
    """What the monitors see after Stage I on sums."""
    model = tiny_model(initializer_range=0.1, core_layers=1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = sums(step)
        trace = model.model(ids, loops=3, keep_loops="all", use_cache=False)
        loss, _ = ExpectedLoss(beta=beta)(model, trace, {"input_ids": ids, "labels": ids})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return observed(model, model.model(sums(steps), loops=3, keep_loops="all", use_cache=False))


def test_a_gate_without_entropy_collapses_and_is_reported():
    """The default entropy weight keeps more than a fifth of the greatest entropy, log 3."""
    without, default = train_gate(beta=0.0), train_gate(beta=ExpectedLoss().beta)
    assert any(name.startswith("gate collapse") for name in alarms(without)), without
    assert not any(name.startswith("gate collapse") for name in alarms(default)), default
    assert default["exit_entropy"] > 0.2 * math.log(3)


# Steps that are not finite ------------------------------------------------------------------------------------


def test_skipped_steps_are_counted_and_a_row_of_them_stops():
    guard = NonFiniteGuard(NonFinite(policy="skip", patience=3))
    norms = [1.0, math.nan, math.inf, 2.0, math.nan, -math.inf]
    assert [guard.admits(norm, step) for step, norm in enumerate(norms)] == [True, False, False, True, False, False]
    assert guard.state_dict() == {"skipped": 4, "in_row": 2}
    resumed = NonFiniteGuard(guard.settings)
    resumed.load_state_dict(guard.state_dict())
    with pytest.raises(ValueError, match="not finite at step 6, 3 times in a row"):
        resumed.admits(math.nan, 6)


def test_stop_stops_at_once_and_a_new_run_has_no_counts():
    guard = NonFiniteGuard(NonFinite(policy="stop"))
    guard.load_state_dict({})
    assert guard.admits(1.0, 0)
    with pytest.raises(ValueError, match="not finite at step 1; lower"):
        guard.admits(math.nan, 1)
    for changes in ({"policy": "pray"}, {"patience": 0}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            NonFinite(**changes)


# Speed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "loops", "grad_loops", "reads"),
    [
        ({}, 3, 3, 3),
        ({"tie_word_embeddings": True, "num_key_value_heads": 2}, 1, 1, 1),
        (HUGINN, 5, 5, 1),
        (HUGINN, 5, 2, 1),
        (HUGINN, 4, 3, 2),
        ({"prelude_layers": 2, "injection": "diagonal", "mlp": "gelu"}, 4, 1, 1),
        ({"prelude_layers": 1, "injection": "add"}, 3, 2, 2),
        ({"injection": "concat", "inject_once": True}, 3, 3, 2),
    ],
)
def test_training_flops_equal_what_torch_counts(shape, loops, grad_loops, reads):
    config, (rows, length) = tiny_config(**shape), IDS.shape
    model = LoopLMForCausalLM(config).train()
    model.set_attn_implementation("eager")
    backbone = model.model
    with FlopCounterMode(display=False) as counter:
        embeds = backbone.embed_tokens(IDS)
        context = build_context(config, embeds, None, None, None)
        keep = set(range(loops - reads + 1, loops + 1))
        states, gates = backbone.unroll(backbone.embed(embeds, context), context, loops, keep, None, grad_loops)
        read = sum(model.lm_head(backbone.readout(state, context)).sum() for state in states.values())
        (read if gates is None else read + gates.sum()).backward()
    assert counter.get_total_flops() == training_flops(config, loops, grad_loops, rows * length, length, reads)


def test_a_prelude_that_gets_no_gradient_costs_one_pass():
    """Without injection, truncation cuts the prelude off; with it, the inputs of the last loops still train it."""

    def prelude(**shape):
        sizes = [training_flops(tiny_config(prelude_layers=n, **shape), 3, 1, 1, 8, 1) for n in (0, 1)]
        return sizes[1] - sizes[0]

    assert prelude(injection="add") == 3 * prelude() == 3 * prelude(injection="add", inject_once=True)


def test_peak_flops_are_a_rate_and_draw_no_random_number():
    before = torch.get_rng_state()
    assert 1e8 < measure_peak_flops(torch.device("cpu"), seconds=0.05) < 1e14
    assert torch.get_rng_state().equal(before)
