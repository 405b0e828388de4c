"""The policy gradient against numbers worked out by hand, and against autograd over whole distributions."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from tests.conftest import tiny_model

from looplm.models.exits import exit_log_pdf
from looplm.models.replay import replay
from looplm.objectives.loop_weights import (
    ExitWeights,
    LastLoopWeight,
    LearnedWeights,
    ProgressiveWeights,
    Trajectories,
    UniformWeights,
)
from looplm.objectives.policy_gradient import PolicyGradient


@dataclass
class Reading:
    """A "model" whose hidden states are its logits: the head is the identity."""

    vocab: int

    def __post_init__(self):
        self.lm_head = SimpleNamespace(weight=torch.eye(self.vocab, dtype=torch.float64))

    def hidden_at(self, trace, loop):
        return trace.states[loop]


@dataclass
class Seen:
    states: dict
    gate_logits: torch.Tensor | None = None
    more: dict = field(default_factory=dict)


def from_probabilities(p):
    """Logits [B, S, 2] under which token 1 has probability p [B, S]."""
    p = torch.tensor(p, dtype=torch.float64)
    return torch.stack([(1 - p).log(), p.log()], dim=-1).requires_grad_()


# Two sequences of three tokens (one of prompt, two of completion), two loops; every token is token 1. Position i says
# P(token i + 1 = 1); the last position predicts nothing.
FIRST = [[0.5, 0.25, 0.9], [0.5, 0.5, 0.9]]
SECOND = [[0.8, 0.5, 0.9], [0.4, 0.5, 0.9]]


def by_hand(**batch):
    trace = Seen(states={1: from_probabilities(FIRST), 2: from_probabilities(SECOND)})
    values = {
        "labels": torch.tensor([[-100, 1, 1], [-100, 1, 1]]),
        "weights": torch.full((2, 3), 0.25, dtype=torch.float64),
        "advantages": torch.tensor([[0, 1.0, 1.0], [0, -2.0, -2.0]], dtype=torch.float64),
        "exits": torch.full((2, 3), 2),
        "sampled": torch.tensor([[0, 0.8, 0.5], [0, 0.4, 0.5]], dtype=torch.float64).log(),
        **batch,
    }
    return trace, values


def means(found):
    """Every metric's mean over what it was read on, if anything."""
    return {name: (value / mass).item() for values, mass in found for name, value in values.items() if mass}


def test_the_value_by_hand():
    """On the sampling policy every ratio is 1: the loss is -mean A, whatever the loop weights."""
    trace, batch = by_hand()
    for rule in (LastLoopWeight(), UniformWeights(), ProgressiveWeights()):
        loss, _ = PolicyGradient(loop_weights=rule)(Reading(2), trace, batch)
        assert abs(loss.item() - -(1 + 1 - 2 - 2) / 4) < 1e-12


def test_the_gradient_by_hand():
    """d loss / d logit of token 1 at loop t is -w A alpha_t (1 - P_t), and that of token 0 the opposite."""
    trace, batch = by_hand()
    loss, _ = PolicyGradient(loop_weights=ProgressiveWeights())(Reading(2), trace, batch)
    loss.backward()
    advantages = [[1, 1], [-2, -2]]
    for loop, probabilities, alpha in ((1, FIRST, 1 / 3), (2, SECOND, 2 / 3)):
        grad = trace.states[loop].grad
        for row in range(2):
            for place in range(2):
                wanted = -0.25 * advantages[row][place] * alpha * (1 - probabilities[row][place])
                assert abs(grad[row, place, 1].item() - wanted) < 1e-10
                assert abs(grad[row, place, 0].item() + wanted) < 1e-10
        assert (grad[:, 2] == 0).all()


def test_the_clip_and_the_reference_by_hand():
    """Sampled at 0.4, 0.5, 0.8, 0.5: ratios 2, 1, 0.5, 1. Clip 0.2 caps the first at 1.2; the third, of a bad token,
    stays at max(0.5, 0.8) x 2. k3 of a reference that says 0.4, 0.5, 0.4, 0.25."""
    trace, batch = by_hand(
        sampled=torch.tensor([[0, 0.4, 0.5], [0, 0.8, 0.5]], dtype=torch.float64).log(),
        reference=torch.tensor([[0, 0.4, 0.5], [0, 0.4, 0.25]], dtype=torch.float64).log(),
    )
    loss, metrics = PolicyGradient(loop_weights=LastLoopWeight(), kl=0.1)(Reading(2), trace, batch)
    k3 = sum(math.exp(d) - d - 1 for d in (math.log(0.4 / 0.8), 0, 0, math.log(0.25 / 0.5)))
    assert abs(loss.item() - 0.25 * (-(1.2 + 1 - 2 * 0.8 - 2 * 1) + 0.1 * k3)) < 1e-12
    assert abs(means(metrics)["clipped"] - 0.5) < 1e-12
    assert abs(means(metrics)["reference_kl"] - 0.25 * k3) < 1e-12
    loss.backward()
    grad = trace.states[2].grad[..., 1]
    pull = [0.1 * (1 - q / p) * (1 - p) for p, q in ((0.8, 0.4), (0.5, 0.5), (0.4, 0.4), (0.5, 0.25))]
    wanted = [0.25 * pull[0], 0.25 * (-0.5 + pull[1]), 0.25 * pull[2], 0.25 * (2 * 0.5 + pull[3])]
    for ours, theirs in zip((grad[0, 0], grad[0, 1], grad[1, 0], grad[1, 1]), wanted, strict=True):
        assert abs(ours.item() - theirs) < 1e-10


def test_no_bounds_do_not_clip():
    trace, batch = by_hand(sampled=torch.tensor([[0, 0.4, 0.5], [0, 0.8, 0.5]], dtype=torch.float64).log())
    loss, metrics = PolicyGradient(clip_low=None, clip_high=None, loop_weights=LastLoopWeight())(
        Reading(2), trace, batch
    )
    assert abs(loss.item() - -0.25 * (2 + 1 - 2 * 0.5 - 2)) < 1e-12
    assert means(metrics)["clipped"] == 0


def test_weights_of_every_rule_by_hand():
    gate = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64).expand(3, 3)
    p = exit_log_pdf(gate)[0].exp().tolist()
    exits = torch.tensor([1, 2, 3])
    seen = Trajectories(
        loop=torch.arange(1.0, 4.0)[:, None], exits=exits, log_pdf=exit_log_pdf(gate).T,
        logits=torch.tensor([0.0, math.log(4.0), 0.0]),
    )  # fmt: skip
    wanted = {
        LastLoopWeight(): [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        UniformWeights(): [[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]],
        ProgressiveWeights(): [[1, 0, 0], [1 / 3, 2 / 3, 0], [1 / 6, 2 / 6, 3 / 6]],
        ProgressiveWeights(gamma=2): [[1, 0, 0], [1 / 5, 4 / 5, 0], [1 / 14, 4 / 14, 9 / 14]],
        ExitWeights(): [[1, 0, 0], [p[0] / (p[0] + p[1]), p[1] / (p[0] + p[1]), 0], p],
        LearnedWeights(temperature=2.0): [[1, 0, 0], [1 / 3, 2 / 3, 0], [1 / 4, 2 / 4, 1 / 4]],
    }
    for rule, rows in wanted.items():
        found = seen.weights(rule).double()
        torch.testing.assert_close(found.T, torch.tensor(rows, dtype=torch.float64), atol=1e-6, rtol=0)
    first = LearnedWeights(start="progressive").first_logits(3).softmax(0)
    torch.testing.assert_close(first, torch.tensor([1 / 6, 2 / 6, 3 / 6]))


def random_batch(loops=3, early=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(61, (3, 9), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    labels[1, 7:] = -100
    exits = torch.randint(1, loops + 1, ids.shape, generator=generator) if early else torch.full(ids.shape, loops)
    values = {name: torch.randn(ids.shape, generator=generator, dtype=torch.float64) for name in ("a", "b", "c")}
    return {
        "input_ids": ids, "labels": labels, "exits": exits, "advantages": values["a"],
        "weights": torch.rand(ids.shape, generator=generator, dtype=torch.float64) / 20,
        "sampled": -4 + 0.1 * values["b"], "reference": -4 + 0.1 * values["c"],
    }  # fmt: skip


def standing(model, batch):
    """The loops of a batch whose tokens stand still after their exits."""
    read = torch.roll(batch["exits"], -1, dims=1)
    return replay(model.model, batch["input_ids"], None, exits=read, read=read, loops=3)


def plain(objective, model, trace, batch, logits=None):
    """The objective token by token, on whole distributions."""
    total = 0.0
    for row, labels in enumerate(batch["labels"].tolist()):
        for place, label in enumerate(labels[1:], start=1):
            if label == -100:
                continue
            e = batch["exits"][row, place].item()
            log_p = [
                (model.logits_at(trace, t)[row, place - 1] / objective.temperature).log_softmax(-1)[label]
                for t in [*range(1, e), 3]
            ]
            pdf = exit_log_pdf(trace.gate_logits)[row, place - 1]
            rule = objective.loop_weights
            scores = {
                "last": lambda e=e: torch.tensor([-math.inf] * (e - 1) + [0.0]),
                "uniform": lambda e=e: torch.zeros(e),
                "progressive": lambda e=e: torch.tensor([math.log(t) for t in range(1, e + 1)]),
                "exit": lambda e=e, pdf=pdf: (
                    pdf[:e] if getattr(objective.loop_weights, "live", False) else pdf[:e].detach()
                ),
                "learned": lambda e=e: logits[:e],
            }[rule.kind]()
            mixed = (scores.double().softmax(0) * torch.stack(log_p)).sum()
            value = log_p[-1].detach() + mixed - mixed.detach()
            if objective.learn_exits:
                value = value + pdf[e - 1]
            ratio = (value - batch["sampled"][row, place]).exp()
            advantage = batch["advantages"][row, place]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            d = batch["reference"][row, place] - log_p[-1]
            total = total + batch["weights"][row, place] * (loss + objective.kl * (d.exp() - d - 1))
    return total


RULES = [LastLoopWeight(), UniformWeights(), ProgressiveWeights(), ExitWeights(), ExitWeights(live=True),
         LearnedWeights()]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind + ("-live" if getattr(rule, "live", False) else ""))
@pytest.mark.parametrize("learn_exits", [False, True])
@pytest.mark.parametrize("parts", [{}, {"coda_layers": 1}], ids=["plain", "coda"])
def test_value_and_gradients_equal_the_plain_objective(rule, learn_exits, parts):
    model = tiny_model(exit_gate=True, **parts).double()
    batch = random_batch()
    objective = PolicyGradient(loop_weights=rule, kl=0.2, temperature=0.6, learn_exits=learn_exits)
    logits = torch.tensor([0.1, -0.2, 0.4], dtype=torch.float64, requires_grad=True) if rule.kind == "learned" else None
    ours, _ = objective(model, standing(model, batch), batch, logits)
    theirs = plain(objective, model, standing(model, batch), batch, logits)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    leaves = [*model.parameters(), *([] if logits is None else [logits])]
    found, wanted = (torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in (ours, theirs))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


def test_the_gate_learns_only_where_asked():
    model = tiny_model(exit_gate=True)
    for rule, learn_exits, learns in (
        (ExitWeights(), False, False), (ExitWeights(live=True), False, True), (UniformWeights(), True, True),
    ):  # fmt: skip
        objective = PolicyGradient(loop_weights=rule, learn_exits=learn_exits)
        batch = random_batch()
        loss, _ = objective(model, model.model(batch["input_ids"], keep_loops="all"), batch)
        (grad,) = torch.autograd.grad(loss, [model.model.exit_gate.weight], materialize_grads=True)
        assert bool(grad.any()) is learns is objective.trains("model.exit_gate.weight")


def test_the_gate_that_sampled_decides_the_weights_and_not_todays():
    model = tiny_model(exit_gate=True)
    batch = random_batch()
    trace = model.model(batch["input_ids"], keep_loops="all")
    before = exit_log_pdf(torch.randn(3, 9, 3))
    shown = PolicyGradient()(model, trace, batch | {"exit_log_pdf": before})[1]
    weights = Trajectories(
        loop=torch.arange(1.0, 4.0)[:, None], exits=batch["exits"][:, 1:].flatten(),
        log_pdf=before[:, 1:].flatten(0, 1).T,
    ).weights(ExitWeights())  # fmt: skip
    mass = (batch["weights"] * (batch["labels"] != -100))[:, 1:].flatten()
    assert means(shown)["weight_loop1"] == pytest.approx(((weights[0] * mass).sum() / mass.sum()).item(), abs=1e-6)


def test_a_loop_is_as_sure_as_of_the_tokens_that_did_it():
    """Of four tokens the first left at loop 1: loop 2 is read on three. GRPO reads loop 1 where it emitted alone."""
    trace, batch = by_hand(exits=torch.tensor([[2, 1, 2], [2, 2, 2]]))
    standing = [[FIRST[0][0], *SECOND[0][1:]], SECOND[1]]
    trace.states[2] = from_probabilities(standing)
    first = [FIRST[0][0], FIRST[0][1], FIRST[1][0], FIRST[1][1]]
    second = [SECOND[0][1], SECOND[1][0], SECOND[1][1]]
    wanted = {
        UniformWeights(): (first, 1 / 2 * 3 / 4 + 1 / 4), LastLoopWeight(): (first[:1], 1 / 4),
    }  # fmt: skip
    for rule, (read, weight) in wanted.items():
        found = means(PolicyGradient(loop_weights=rule)(Reading(2), trace, batch)[1])
        assert found["nll_loop1"] == pytest.approx(-sum(map(math.log, read)) / len(read), abs=1e-12)
        assert found["nll_loop2"] == pytest.approx(-sum(map(math.log, second)) / 3, abs=1e-12)
        assert found["weight_loop1"] == pytest.approx(weight, abs=1e-12)
        assert found["weight_loop1"] + found["weight_loop2"] == pytest.approx(1, abs=1e-12)


def test_every_batch_names_the_same_metrics_whichever_loops_it_read():
    """Processes add them up name by name, and one may have no token that left early."""
    trace, batch = by_hand()
    both = PolicyGradient(loop_weights=LastLoopWeight())(Reading(2), trace, batch)[1]
    del trace.states[1]
    last = PolicyGradient(loop_weights=LastLoopWeight())(Reading(2), trace, batch)[1]
    assert [list(values) for values, _ in last] == [list(values) for values, _ in both]
    assert means(last) == means(both)
    assert "nll_loop1" not in means(last)


def test_tokens_that_all_do_as_many_loops_need_the_last_alone_for_grpo():
    assert PolicyGradient(loop_weights=LastLoopWeight()).needs(4, leaves_early=False) == {4}
    assert PolicyGradient(loop_weights=LastLoopWeight()).needs(4, leaves_early=True) == {1, 2, 3, 4}
    assert PolicyGradient().needs(4, leaves_early=False) == {1, 2, 3, 4}
    model = tiny_model(exit_gate=True)
    batch = random_batch(early=False)
    objective = PolicyGradient(loop_weights=LastLoopWeight(), kl=0.1)
    few, many = (objective(model, model.model(batch["input_ids"], keep_loops=k), batch)[0] for k in ("last", "all"))
    torch.testing.assert_close(few, many)


def test_nothing_to_learn_from_is_zero():
    model = tiny_model(exit_gate=True)
    batch = random_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss, _ = PolicyGradient(kl=0.1)(model, model.model(batch["input_ids"], keep_loops="all"), batch)
    loss.backward()
    assert loss == 0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        PolicyGradient(temperature=0)
    with pytest.raises(ValueError, match=r"clip_low=-0\.1 must not be negative"):
        PolicyGradient(clip_low=-0.1)
    with pytest.raises(ValueError, match="read an exit gate"):
        PolicyGradient().check_model(tiny_model(exit_gate=False).config)
    with pytest.raises(ValueError, match="learned loop weights need temperature above 0"):
        LearnedWeights(temperature=0)
