"""Stage I and Stage II against float64 formulas written out here."""

import math

import pytest
import torch

from conftest import random_ids, tiny_model
from looplm.objectives import ExpectedLoss, GateRegression


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


def test_stage_one_gradients_equal_those_of_the_plain_formula(double_model):
    ids = random_ids(2, 6)
    labels = ids.clone()
    labels[0, 2:4] = -100
    loss, _ = ExpectedLoss(beta=0.05)(double_model, trace_of(double_model, ids), {"labels": labels})
    out = double_model(ids, keep_loops="all", use_cache=False)
    nll = torch.stack([-double_model.logits_at(out, t).log_softmax(-1)[:, :-1] for t in (1, 2, 3)], -1)
    keep = labels[:, 1:] != -100
    nll = nll.gather(2, labels[:, 1:].clamp(min=0)[..., None, None].expand(-1, -1, 1, 3)).squeeze(2)[keep]
    hazard = torch.sigmoid(out.gate_logits)[:, :-1][keep]
    p = torch.stack([hazard[:, 0], (1 - hazard[:, 0]) * hazard[:, 1], (1 - hazard[:, 0]) * (1 - hazard[:, 1])], -1)
    wanted = ((p * nll).sum(-1) + 0.05 * (p * p.log()).sum(-1)).mean()
    parameters = dict(double_model.named_parameters())
    for name, ours, theirs in zip(
        parameters,
        torch.autograd.grad(loss, parameters.values()),
        torch.autograd.grad(wanted, parameters.values()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-6, msg=name)


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


@pytest.mark.parametrize("label", ["paper", "lookahead"])
def test_stage_two_gradients_touch_only_the_gate(double_model, label):
    ids = random_ids(2, 5)
    loss, _ = GateRegression(label=label)(double_model, trace_of(double_model, ids), {"labels": ids})
    loss.backward()
    touched = {name for name, parameter in double_model.named_parameters() if parameter.grad is not None}
    assert touched == {"model.exit_gate.weight", "model.exit_gate.bias"}
    assert all(GateRegression().trains(name) == (name in touched) for name, _ in double_model.named_parameters())


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


@pytest.mark.parametrize("objective", [ExpectedLoss(), GateRegression(), GateRegression(label="lookahead")])
@pytest.mark.parametrize("labels", [torch.full((2, 5), -100), random_ids(2, 1)])
def test_without_targets_the_loss_is_zero(objective, labels):
    model = tiny_model()
    loss, metrics = objective(model, trace_of(model, random_ids(*labels.shape)), {"labels": labels})
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("objective", [ExpectedLoss(), GateRegression()])
def test_micro_batches_with_the_step_count_sum_to_the_full_batch(double_model, objective):
    ids = random_ids(4, 21)
    labels = ids.clone()
    for row, targets in enumerate((3, 5, 9, 20)):
        labels[row, targets + 1 :] = -100
    whole = torch.autograd.grad(
        objective(double_model, trace_of(double_model, ids), {"labels": labels})[0],
        double_model.parameters(), allow_unused=True,
    )  # fmt: skip
    weights = torch.full((1, 21), 1 / (3 + 5 + 9 + 20), dtype=torch.float64)
    parts = sum(
        objective(double_model, trace_of(double_model, row), {"labels": label, "weights": weights})[0]
        for row, label in zip(ids.split(1), labels.split(1), strict=True)
    )
    split = torch.autograd.grad(parts, double_model.parameters(), allow_unused=True)
    for ours, theirs in zip(split, whole, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("gate_bias", [-50.0, 50.0])
def test_saturated_gates_stay_finite(gate_bias):
    model, ids = tiny_model(), random_ids(2, 6)
    model.model.exit_gate.bias.data.fill_(gate_bias)
    for objective in (ExpectedLoss(), GateRegression(), GateRegression(label="lookahead")):
        loss, _ = objective(model, trace_of(model, ids), {"labels": ids})
        loss.backward()
        assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("objective", [ExpectedLoss(), GateRegression(label="lookahead")])
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
@pytest.mark.parametrize("objective", [ExpectedLoss(), GateRegression()])
def test_objectives_work_under_autocast(objective, dtype):
    model, ids = tiny_model(initializer_range=0.05).to(dtype), random_ids(2, 6)
    exact, _ = objective(model, trace_of(model, ids), {"labels": ids})
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = objective(model, trace_of(model, ids), {"labels": ids})
    loss.backward()
    torch.testing.assert_close(loss, exact, atol=0.05, rtol=0.05)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("keep", [[1, 2], [2, 3], [1, 3], [3]])
@pytest.mark.parametrize("objective", [ExpectedLoss(), GateRegression()])
def test_a_trace_without_every_loop_is_refused(objective, keep):
    model, ids = tiny_model(), random_ids(1, 4)
    trace = model.model(ids, keep_loops=keep, use_cache=False)
    with pytest.raises(ValueError, match="reads every loop, but the trace kept"):
        objective(model, trace, {"labels": ids})


@pytest.mark.parametrize("objective", [ExpectedLoss(), GateRegression()])
def test_a_model_without_a_gate_is_refused(objective):
    model, ids = tiny_model(exit_gate=False), random_ids(1, 4)
    with pytest.raises(ValueError, match="exit_gate=True"):
        objective(model, trace_of(model, ids), {"labels": ids})


def test_one_loop_has_no_gain():
    model, ids = tiny_model(), random_ids(1, 4)
    with pytest.raises(ValueError, match="loops of at least 2"):
        GateRegression()(model, model.model(ids, loops=1, keep_loops="all", use_cache=False), {"labels": ids})
