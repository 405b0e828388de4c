"""Every objective against float64 formulas written out here, and what all of them must hold."""

import math

import pytest
import torch

from conftest import random_ids, tiny_model
from looplm.objectives import (
    ExpectedLoss,
    FixedPrior,
    GateRegression,
    GeometricPrior,
    LastLoop,
    OracleDecider,
    PoissonLogNormalPrior,
    UniformPrior,
)

EVERY = [
    ExpectedLoss(),
    ExpectedLoss(beta=0.0),
    ExpectedLoss(prior=GeometricPrior(p=0.3)),
    GateRegression(),
    GateRegression(label="lookahead"),
    FixedPrior(),
    FixedPrior(prior=PoissonLogNormalPrior(mean=2.0)),
    LastLoop(),
    OracleDecider(),
    OracleDecider(floor=1, delta=0.1),
]
GATE_ONLY = [objective for objective in EVERY if isinstance(objective, GateRegression | OracleDecider)]
GATE_FREE = [objective for objective in EVERY if isinstance(objective, FixedPrior | LastLoop)]
GATE = {"model.exit_gate.weight", "model.exit_gate.bias"}
every_objective = pytest.mark.parametrize("objective", EVERY, ids=str)


def trace_of(model, ids):
    return model.model(ids, keep_loops="all", use_cache=False)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def pieces(model, ids, labels):
    """Plain Python floats per target token: gate probabilities [token][loop] and cross-entropies [token][loop]."""
    out = model(ids, keep_loops="all", use_cache=False)
    loops = out.gate_logits.shape[-1]
    hazards, losses = [], []
    for b in range(ids.shape[0]):
        for s in range(ids.shape[1] - 1):
            if labels[b, s + 1] == -100:
                continue
            hazards.append([sigmoid(out.gate_logits[b, s, t].item()) for t in range(loops)])
            rows = [model.logits_at(out, t + 1)[b, s].double() for t in range(loops)]
            losses.append([(row.logsumexp(-1) - row[labels[b, s + 1]]).item() for row in rows])
    return hazards, losses


@pytest.fixture
def double_model():
    return tiny_model().double()


def test_stage_one_by_hand_on_two_tokens_and_three_loops(double_model):
    ids, beta = random_ids(1, 3), 0.07
    hazards, losses = pieces(double_model, ids, ids)
    assert (len(hazards), len(hazards[0])) == (2, 3)
    wanted = 0.0
    for (l1, l2, _), ce in zip(hazards, losses, strict=True):
        p = [l1, (1 - l1) * l2, (1 - l1) * (1 - l2)]
        assert abs(sum(p) - 1) < 1e-12
        wanted += sum(pt * ct for pt, ct in zip(p, ce, strict=True)) / 2
        wanted += beta * sum(pt * math.log(pt) for pt in p) / 2
    loss, metrics = ExpectedLoss(beta=beta)(double_model, trace_of(double_model, ids), {"labels": ids})
    assert abs(loss.item() - wanted) < 1e-9
    for loop in range(3):
        assert abs(metrics[f"loss_loop{loop + 1}"].item() - sum(ce[loop] for ce in losses) / 2) < 1e-9


GEOMETRIC = [0.3 / 0.657, 0.21 / 0.657, 0.147 / 0.657]  # 0.3 + 0.7 * 0.3 + 0.49 * 0.3 = 0.657


@pytest.mark.parametrize(
    ("beta", "prior", "log_prior"),
    [
        (0.05, UniformPrior(), [0.0, 0.0, 0.0]),  # its constant is dropped
        (0.0, UniformPrior(), [0.0, 0.0, 0.0]),
        (0.05, GeometricPrior(p=0.3), [math.log(pi) for pi in GEOMETRIC]),
        (0.0, GeometricPrior(p=0.3), [1e3, 1e3, 1e3]),
    ],
)
def test_expected_loss_and_gradients_equal_those_of_the_plain_formula(double_model, beta, prior, log_prior):
    ids = random_ids(2, 6)
    labels = ids.clone()
    labels[0, 2:4] = -100
    objective = ExpectedLoss(beta=beta, prior=prior)
    loss, metrics = objective(double_model, trace_of(double_model, ids), {"labels": labels})
    out = double_model(ids, keep_loops="all", use_cache=False)
    nll = torch.stack([-double_model.logits_at(out, t).log_softmax(-1)[:, :-1] for t in (1, 2, 3)], -1)
    keep = labels[:, 1:] != -100
    nll = nll.gather(2, labels[:, 1:].clamp(min=0)[..., None, None].expand(-1, -1, 1, 3)).squeeze(2)[keep]
    hazard = torch.sigmoid(out.gate_logits)[:, :-1][keep]
    p = torch.stack([hazard[:, 0], (1 - hazard[:, 0]) * hazard[:, 1], (1 - hazard[:, 0]) * (1 - hazard[:, 1])], -1)
    distance = (p * (p.log() - torch.tensor(log_prior, dtype=torch.float64))).sum(-1).mean()
    wanted = (p * nll).sum(-1).mean() + beta * distance
    torch.testing.assert_close(loss, wanted, atol=1e-9, rtol=0)
    for loop in range(3):
        assert metrics[f"exit_loop{loop + 1}"].item() == pytest.approx(p[:, loop].mean().item(), abs=1e-9)
    assert ("exit_prior_kl" in metrics) == isinstance(prior, GeometricPrior)
    if beta and "exit_prior_kl" in metrics:
        assert metrics["exit_prior_kl"].item() == pytest.approx(distance.item(), abs=1e-9)
    parameters = dict(double_model.named_parameters())
    for name, ours, theirs in zip(
        parameters,
        torch.autograd.grad(loss, parameters.values()),
        torch.autograd.grad(wanted, parameters.values()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-6, msg=name)


def test_exit_probabilities_at_the_prior_cost_nothing(double_model):
    """A gate of constant hazard p gives the geometric distribution, its last loop taking what is left."""
    double_model.model.exit_gate.weight.data.zero_()
    double_model.model.exit_gate.bias.data.fill_(math.log(0.3 / 0.7))
    ids = random_ids(1, 5)
    objective = ExpectedLoss(prior=GeometricPrior(p=0.3))
    _, metrics = objective(double_model, trace_of(double_model, ids), {"labels": ids})
    p = [0.3, 0.21, 0.49]
    wanted = sum(pt * math.log(pt / pi) for pt, pi in zip(p, GEOMETRIC, strict=True))
    assert metrics["exit_prior_kl"].item() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("label", ["paper", "lookahead"])
def test_stage_two_by_hand(double_model, label):
    ids = random_ids(2, 5)
    labels = ids.clone()
    labels[1, 1:3] = -100
    hazards, losses = pieces(double_model, ids, labels)
    wanted = 0.0
    for lam, ce in zip(hazards, losses, strict=True):
        for t in (2, 3):
            w = sigmoid(50 * (max(0.0, ce[t - 2] - ce[t - 1]) - 0.005))
            gate = lam[t - 1] if label == "paper" else lam[t - 2]
            wanted -= (w * math.log(1 - gate) + (1 - w) * math.log(gate)) / len(hazards) / 3
    objective = GateRegression(label=label)
    loss, _ = objective(double_model, trace_of(double_model, ids), {"labels": labels})
    assert abs(loss.item() - wanted) < 1e-9


@pytest.mark.parametrize("delta", [0.0, 0.4])
@pytest.mark.parametrize("floor", [1, 2])
def test_the_oracles_decider_by_hand(delta, floor):
    model, ids = tiny_model(loops=4).double(), random_ids(2, 5)
    labels = ids.clone()
    labels[1, 1:3] = -100
    hazards, losses = pieces(model, ids, labels)
    wanted, go_on, right = 0.0, [], []
    for lam, ce in zip(hazards, losses, strict=True):
        for t in (1, 2, 3):
            pays = t < floor or min(ce[t:]) < ce[t - 1] - delta
            wanted -= math.log(1 - lam[t - 1] if pays else lam[t - 1]) / len(hazards) / 3
            if t >= floor:
                go_on.append(pays)
                right.append(pays == (lam[t - 1] < 0.5))
    loss, metrics = OracleDecider(delta=delta, floor=floor)(model, trace_of(model, ids), {"labels": labels})
    assert abs(loss.item() - wanted) < 1e-9
    assert 0 < sum(go_on) < len(go_on)
    assert metrics["go_on_label"].item() == pytest.approx(sum(go_on) / len(go_on), abs=1e-9)
    assert metrics["decider_accuracy"].item() == pytest.approx(sum(right) / len(right), abs=1e-9)


def test_the_oracle_looks_past_a_loop_that_harms():
    losses = torch.tensor([[3.0, 1.0], [2.0, 2.0], [2.5, 2.0], [1.0, 2.0]])
    assert OracleDecider(floor=1).labels(losses).T.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert OracleDecider(floor=2).labels(losses).T.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert OracleDecider(floor=1, delta=1.0).labels(losses).T.tolist() == [[1, 0, 1], [0, 0, 0]]  # a gain of exactly 1


@pytest.mark.parametrize(
    ("prior", "shares"), [(UniformPrior(), [1 / 3, 1 / 3, 1 / 3]), (GeometricPrior(p=0.3), GEOMETRIC)]
)
def test_a_fixed_prior_by_hand(double_model, prior, shares):
    ids = random_ids(2, 5)
    labels = ids.clone()
    labels[1, 1:3] = -100
    _, losses = pieces(double_model, ids, labels)
    loss, metrics = FixedPrior(prior=prior)(double_model, trace_of(double_model, ids), {"labels": labels})
    means = [sum(ce[loop] for ce in losses) / len(losses) for loop in range(3)]
    assert abs(loss.item() - sum(pi * mean for pi, mean in zip(shares, means, strict=True))) < 1e-9
    assert [metrics[f"loss_loop{t}"].item() for t in (1, 2, 3)] == pytest.approx(means, abs=1e-9)


def test_the_last_loop_alone_is_the_models_own_loss(double_model):
    ids = random_ids(2, 7)
    labels = ids.clone()
    labels[1, 1:3] = -100
    trace = double_model.model(ids, use_cache=False)
    loss, _ = LastLoop()(double_model, trace, {"labels": labels})
    wanted = double_model(ids, labels=labels, use_cache=False).loss
    torch.testing.assert_close(loss, wanted, atol=1e-9, rtol=0)
    trained = [p for name, p in double_model.named_parameters() if name not in GATE]
    for ours, theirs in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(wanted, trained), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-6)


@every_objective
def test_gradients_reach_what_the_objective_trains_and_nothing_else(double_model, objective):
    ids = random_ids(2, 5)
    loss, _ = objective(double_model, trace_of(double_model, ids), {"labels": ids})
    loss.backward()
    touched = {name for name, parameter in double_model.named_parameters() if parameter.grad is not None}
    assert touched == {name for name, _ in double_model.named_parameters() if objective.trains(name)}
    everything = {name for name, _ in double_model.named_parameters()}
    gate_only, gate_free = objective in GATE_ONLY, objective in GATE_FREE
    assert touched == (GATE if gate_only else everything - GATE if gate_free else everything)


@every_objective
def test_exactly_the_needed_loops_are_enough(double_model, objective):
    ids = random_ids(2, 5)
    needed = objective.needs(3)
    assert needed == ({3} if isinstance(objective, LastLoop) else {1, 2, 3})
    trace = double_model.model(ids, keep_loops=sorted(needed), use_cache=False)
    loss, _ = objective(double_model, trace, {"labels": ids})
    wanted, _ = objective(double_model, trace_of(double_model, ids), {"labels": ids})
    assert loss == wanted
    for missing in needed:
        kept = sorted({1, 2, 3} - {missing})
        trace = double_model.model(ids, keep_loops=kept, use_cache=False)
        with pytest.raises(ValueError, match=r"the objective reads loops \[.*\], but the trace kept"):
            objective(double_model, trace, {"labels": ids})


@pytest.mark.parametrize("objective", GATE_FREE, ids=str)
def test_without_a_gate_the_loss_is_the_same(objective):
    model, ids = tiny_model().double(), random_ids(2, 5)
    gateless = tiny_model(exit_gate=False).double()
    gateless.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name not in GATE})
    objective.check_model(gateless.config)
    losses = [objective(each, trace_of(each, ids), {"labels": ids})[0].item() for each in (model, gateless)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("label", "silent"), [("paper", 0), ("lookahead", 2)])
def test_the_gate_that_a_label_leaves_out_gets_no_gradient(double_model, monkeypatch, label, silent):
    ids, seen = random_ids(1, 4), {}
    gate, trace = double_model.model.gate, trace_of(double_model, ids)
    loops = {id(trace.states[loop]): loop for loop in trace.states}

    def spy(state):
        for loop, kept in trace.states.items():
            if torch.equal(kept, state):
                seen[loop] = gate(state)
                return seen[loop]
        raise AssertionError("the gate read a state of no loop")

    monkeypatch.setattr(double_model.model, "gate", spy)
    GateRegression(label=label)(double_model, trace, {"labels": ids})[0].backward()
    assert sorted(seen) == [loop for loop in loops.values() if loop != silent + 1]


@every_objective
@pytest.mark.parametrize("labels", [torch.full((2, 5), -100), random_ids(2, 1)])
def test_without_targets_the_loss_is_zero(objective, labels):
    model = tiny_model()
    loss, metrics = objective(model, trace_of(model, random_ids(*labels.shape)), {"labels": labels})
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert all(value == 0 for value in metrics.values())


@every_objective
def test_micro_batches_with_the_step_count_sum_to_the_full_batch(double_model, objective):
    ids = random_ids(4, 21)
    labels = ids.clone()
    for row, targets in enumerate((3, 5, 9, 20)):
        labels[row, targets + 1 :] = -100
    whole, whole_metrics = objective(double_model, trace_of(double_model, ids), {"labels": labels})
    weights = torch.full((1, 21), 1 / (3 + 5 + 9 + 20), dtype=torch.float64)
    parts = [
        objective(double_model, trace_of(double_model, row), {"labels": label, "weights": weights})
        for row, label in zip(ids.split(1), labels.split(1), strict=True)
    ]
    summed = sum(loss for loss, _ in parts)
    torch.testing.assert_close(summed, whole, atol=1e-6, rtol=0)
    for name, value in whole_metrics.items():
        torch.testing.assert_close(sum(metrics[name] for _, metrics in parts), value, atol=1e-6, rtol=0, msg=name)
    trained = [p for name, p in double_model.named_parameters() if objective.trains(name)]
    for ours, theirs in zip(torch.autograd.grad(summed, trained), torch.autograd.grad(whole, trained), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("gate_bias", [-50.0, 50.0])
@every_objective
def test_saturated_gates_stay_finite(objective, gate_bias):
    model, ids = tiny_model(), random_ids(2, 6)
    model.model.exit_gate.bias.data.fill_(gate_bias)
    loss, metrics = objective(model, trace_of(model, ids), {"labels": ids})
    loss.backward()
    assert loss.isfinite()
    assert all(value.isfinite() for value in metrics.values())
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if objective.trains(name))


@every_objective
def test_each_objective_lowers_its_own_loss(objective):
    model, ids = tiny_model(initializer_range=0.05).train(), random_ids(4, 12)
    trained = [p for name, p in model.named_parameters() if objective.trains(name)]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(40):
        loss, _ = objective(model, trace_of(model, ids), {"labels": ids})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_an_unknown_label_is_refused():
    with pytest.raises(ValueError, match="label='future'"):
        GateRegression(label="future")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_objective
def test_objectives_work_under_autocast(objective, dtype):
    model, ids = tiny_model(initializer_range=0.05).to(dtype), random_ids(2, 6)
    exact, _ = objective(model, trace_of(model, ids), {"labels": ids})
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = objective(model, trace_of(model, ids), {"labels": ids})
    loss.backward()
    torch.testing.assert_close(loss, exact, atol=0.05, rtol=0.05)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("objective", [each for each in EVERY if each not in GATE_FREE], ids=str)
def test_a_model_without_a_gate_is_refused(objective):
    model, ids = tiny_model(exit_gate=False), random_ids(1, 4)
    with pytest.raises(ValueError, match="exit_gate=True"):
        objective(model, trace_of(model, ids), {"labels": ids})


def test_one_loop_has_no_gain():
    model, ids = tiny_model(), random_ids(1, 4)
    with pytest.raises(ValueError, match="loops of at least 2"):
        GateRegression()(model, model.model(ids, loops=1, keep_loops="all", use_cache=False), {"labels": ids})


def test_the_decider_needs_a_choice():
    OracleDecider(floor=2).check_loops(3)
    with pytest.raises(ValueError, match="floor=3 leaves no choice"):
        OracleDecider(floor=3)(tiny_model(), trace_of(tiny_model(), random_ids(1, 4)), {"labels": random_ids(1, 4)})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ExpectedLoss(beta=-0.1), "beta=-0.1 must not be negative"),
        (lambda: OracleDecider(floor=0), "floor=0 must be at least 1"),
        (lambda: OracleDecider(delta=-1.0), "delta=-1.0 must not be negative"),
    ],
)
def test_settings_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
