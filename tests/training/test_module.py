"""A step's gradient is the same however its rows are cut, under every objective; depths and metrics by row."""

import pytest
import torch

from looplm.training import load_recipe
from looplm.training.depth import FixedDepth, UniformDepth
from looplm.training.distribution import World
from looplm.training.loader import StepLoader
from looplm.training.loop import accumulate
from looplm.training.mixture import Mixture
from looplm.training.module import MetricSums, depth_groups
from looplm.training.opening import open_run
from looplm.training.run import _session

RECIPE = """
out: unset
model: {{hidden_size: 16, intermediate_size: 24, num_attention_heads: 2, prelude_layers: 1, core_layers: 1,
         injection: add, state_init: normal, rope_theta: 10000.0, initializer_range: 0.3}}
vocab_size: 320
data:
  length: 24
  rows: 5
  sources:
    text: {{kind: text, path: {text}, share: 2, held_out_rows: 2}}
    compose: {{kind: task, share: 1, held_out_questions: 8, task: {{kind: compose, entities: 4, relations: 2}}}}
objective: {{kind: last_loop}}
loops: 3
steps: 2
precision: float64
"""
OBJECTIVES = {
    "stage one": "{kind: expected_loss, beta: 0.05}",
    "geometric": "{kind: expected_loss, beta: 0.1, prior: {kind: geometric, p: 0.3}}",
    "fixed prior": "{kind: fixed_prior, prior: {kind: poisson_log_normal, mean: 2.0}}",
    "last loop": "{kind: last_loop}",
    "stage two": "{kind: gate_regression, label: lookahead}",
    "decider": "{kind: oracle_decider, floor: 2}",
}
FORMS = {
    "finite difference": "{kind: finite_difference, every: 2}",
    "jvp": "{kind: jacobian_vector, every: 2}",
    "vjp": "{kind: vector_jacobian, every: 2}",
    "secant": "{kind: secant_ratio, target: 0.1}",
    "adjacent": "{kind: adjacent_l2}",
}


@pytest.fixture
def gradient(tmp_path):
    text, file = tmp_path / "text.txt", tmp_path / "recipe.yaml"
    text.write_text("A loop thinks again before it answers. " * 60)
    file.write_text(RECIPE.format(text=text))

    def build(*overrides):
        recipe = load_recipe(file, overrides)
        opened = open_run(recipe, None)
        data = Mixture(recipe.data, opened.tokenizer, recipe.seed)
        session = _session(recipe, opened, data, 2, World())
        batch = next(iter(StepLoader(data, {}, 0, 2, micro_rows=recipe.micro_rows)))
        loss, metrics = accumulate(session, batch, 1)
        grads = {n: p.grad.clone() for n, p in opened.model.named_parameters() if p.requires_grad}
        return loss, metrics.means(lambda tensor: tensor), grads

    return build


def assert_same(one, other):
    torch.testing.assert_close(one[0], other[0], atol=1e-10, rtol=1e-10)
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert other[1][name] == pytest.approx(value, rel=1e-10, abs=1e-10), name
    for name, grad in one[2].items():
        torch.testing.assert_close(other[2][name], grad, atol=1e-10, rtol=1e-10, msg=name)
    assert any(grad.abs().max() > 1e-4 for grad in one[2].values())


@pytest.mark.parametrize("mean", ["tokens", "sources"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_micro_batches_make_one_batch_under_every_objective(gradient, objective, mean):
    common = (f"objective={objective}", f"data.mean={mean}")
    whole = gradient(*common)
    for micro_rows in (1, 2):
        assert_same(whole, gradient(*common, f"micro_rows={micro_rows}"))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_micro_batches_make_one_batch_with_the_stability_term(gradient, form):
    common = (f"objective={OBJECTIVES['stage one']}", f"stability={{form: {form}, weight: 0.1}}")
    whole = gradient(*common)
    assert whole[1]["stability"] > 0
    assert_same(whole, gradient(*common, "micro_rows=1"))


@pytest.mark.parametrize("unit", ["block", "loop"])
def test_checkpointing_changes_nothing(gradient, unit):
    assert_same(gradient(), gradient(f"checkpointing={unit}"))


@pytest.mark.parametrize("objective", ["stage one", "last loop"])
def test_rows_at_their_own_depths_are_as_if_each_ran_alone(gradient, objective):
    common = (f"objective={OBJECTIVES[objective]}", "depth={kind: uniform, low: 1, high: 3, per: sequence}")
    assert_same(gradient(*common), gradient(*common, "micro_rows=1"))


def batch_of(rows):
    return {"rows": torch.tensor(rows), "labels": torch.ones(len(rows), 3), "weights": torch.ones(len(rows), 3)}


def test_depth_groups_are_alike_on_every_process():
    schedule = UniformDepth(low=1, high=4, per="sequence")
    drawn = {row: schedule.draw(0, 5, row) for row in range(6)}
    mine, theirs = (depth_groups(schedule, 0, 5, 0, range(6), batch_of(rows)) for rows in ([0, 1, 2], [3, 4, 5]))
    assert [depth for depth, _ in mine] == [depth for depth, _ in theirs]
    assert {depth for depth, _ in mine} == set(drawn.values())
    for groups, own in ((mine, [0, 1, 2]), (theirs, [3, 4, 5])):
        seen = [(row, depth) for depth, batch in groups for row in batch["rows"].tolist() if row >= 0]
        assert sorted(row for row, _ in seen) == own
        assert all(drawn[row] == depth for row, depth in seen)
        for _, batch in groups:
            if batch["rows"].tolist() == [-1]:
                assert (batch["labels"] == -100).all()
                assert (batch["weights"] == 0).all()


def test_depth_is_drawn_for_what_the_schedule_says():
    step, micro = UniformDepth(low=1, high=90), UniformDepth(low=1, high=90, per="micro_batch")
    ((first, _),), ((second, _),) = (depth_groups(step, 0, 5, m, range(2), batch_of([0, 1])) for m in (0, 1))
    assert first == second
    ((first, _),), ((second, _),) = (depth_groups(micro, 0, 5, m, range(2), batch_of([0, 1])) for m in (0, 1))
    assert first != second
    assert depth_groups(FixedDepth(loops=3), 0, 0, 0, range(1), batch_of([0]))[0][0].loops == 3


def test_metrics_of_few_rows_are_means_over_those_rows():
    sums = MetricSums()
    sums.add({"loss_loop1": torch.tensor(0.25 * 4.0)}, torch.tensor(0.25))  # mean 4 over a quarter of the step
    sums.add({"loss_loop1": torch.tensor(0.75 * 2.0), "loss_loop2": torch.tensor(0.75 * 8.0)}, torch.tensor(0.75))
    found = sums.means(lambda tensor: tensor)
    assert found == pytest.approx({"loss_loop1": 2.5, "loss_loop2": 8.0})


@pytest.mark.parametrize("mean", ["tokens", "sources"])
def test_metrics_are_means_whatever_the_weights_add_up_to(gradient, mean):
    """Two sources of weight 1 and 3 add up to 4; exit probabilities still add up to 1, and the term is not rescaled."""
    weight = ("data.sources.compose.weight=3",) if mean == "sources" else ()
    common = (f"objective={OBJECTIVES['stage one']}", f"stability={{form: {FORMS['jvp']}, weight: 0.1}}")
    _, metrics, _ = gradient(*common, f"data.mean={mean}", *weight, "micro_rows=2")
    assert sum(metrics[f"exit_loop{loop}"] for loop in (1, 2, 3)) == pytest.approx(1)
    assert 1 <= metrics["mean_exit_loop"] <= 3
    assert min(metrics["loss_loop1"], metrics["loss_loop3"]) < metrics["expected_loss"] + 1
    _, alone, _ = gradient(*common, "data.mean=tokens")
    assert metrics["stability"] == pytest.approx(alone["stability"], rel=1e-6)
