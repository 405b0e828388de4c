"""What each loop brings, on results and losses whose answer is known."""

import numpy as np
import pytest
from scipy import stats

from looplm.evals.loop_gains import closed_book_gap, gain_by_category, loss_decreases, saturations
from looplm.evals.results import Evaluation, Item, Score


def result(**tasks):
    """Marks of items by task and loops, with their means as scores."""
    items = {
        task: {
            f"loops={loops}": [Item(id=f"q{n}", metrics={"right": float(mark)}) for n, mark in enumerate(marks)]
            for loops, marks in depths.items()
        }
        for task, depths in tasks.items()
    }
    scores = [
        Score(task=task, depth=depth, metric="right", value=sum(i.metrics["right"] for i in told) / len(told),
              stderr=None, items=len(told))
        for task, depths in items.items()
        for depth, told in depths.items()
    ]  # fmt: skip
    return Evaluation(settings={}, scores=scores, items=items)


def test_saturation_is_the_first_depth_near_the_best():
    found = result(
        none={1: [1, 0, 0, 0], 4: [1, 1, 0, 0], 16: [1, 0, 1, 0]},
        many={1: [0, 0, 0, 0], 4: [1, 1, 1, 0], 16: [1, 1, 1, 1]},
    )
    none, many = saturations(found)
    assert (none.task, none.depth, none.value, none.best_depth) == ("none", "loops=4", 0.5, "loops=4")
    assert (many.depth, many.best) == ("loops=16", 1.0)
    assert [each.depth for each in saturations(found, share=0.75)] == ["loops=4", "loops=4"]
    with pytest.raises(ValueError, match="no score is 'acc', only right"):
        saturations(found, "acc")


def test_the_gap_between_open_and_closed_book():
    open_book = result(facts={1: [1, 0, 0, 0], 4: [1, 1, 1, 0]})
    closed_book = result(facts={1: [0, 0, 1, 0], 4: [0, 1, 0, 0]})
    gaps = closed_book_gap(open_book, closed_book)
    assert [(gap.depths[0], gap.difference) for gap in gaps] == [("loops=1", 0.0), ("loops=4", 0.5)]
    assert gaps[1].p_t == pytest.approx(stats.ttest_rel([1, 1, 1, 0], [0, 1, 0, 0]).pvalue)
    both = result(open={4: [1, 1]}, closed={4: [0, 1]})
    assert [gap.difference for gap in closed_book_gap(both, both, tasks=("open", "closed"))] == [0.5]
    with pytest.raises(ValueError, match="metric 'acc'"):
        closed_book_gap(open_book, closed_book, metric="acc")


LOGIC = {1: [1, 0, 0, 0, 1], 2: [1, 1, 0, 0, 1], 4: [1, 1, 1, 0, 1]}


def test_gains_of_categories_within_a_task():
    categories = {"q0": "logic", "q1": "logic", "q2": "logic", "q3": "facts", "q4": "facts"}
    logic, facts = gain_by_category(result(mmlu=LOGIC), categories=categories)
    assert (logic.category, logic.items, logic.depths) == ("logic", 3, ("loops=1", "loops=2", "loops=4"))
    assert logic.values == pytest.approx((1 / 3, 2 / 3, 1))
    assert logic.gains == pytest.approx((1 / 3, 1 / 3))
    assert logic.relative == pytest.approx(2.0)
    assert logic.whole.p == pytest.approx(stats.ttest_rel([1, 1, 1], [1, 0, 0]).pvalue)
    assert (facts.category, facts.relative, facts.whole.p) == ("facts", 0.0, 1.0)
    with pytest.raises(ValueError, match="item 'q4' has no category"):
        gain_by_category(result(mmlu=LOGIC), categories={f"q{n}": "logic" for n in range(4)})


def test_tasks_as_categories():
    found = result(facts={1: [1], 4: [1]}, nothing={1: [0, 0], 4: [0, 1]}, logic={1: [1, 0], 4: [1, 1]}, once={4: [1]})
    gains = gain_by_category(found)
    assert [(gain.category, gain.relative) for gain in gains] == [("logic", 1.0), ("facts", 0.0), ("nothing", None)]
    assert gains[1].whole is None
    assert [gain.category for gain in gain_by_category(found, task="logic")] == ["logic"]
    with pytest.raises(ValueError, match="no task 'physics', only facts, nothing, logic, once"):
        gain_by_category(found, task="physics")
    with pytest.raises(ValueError, match="of which task the items' categories are"):
        gain_by_category(found, categories={"q0": "logic"})
    with pytest.raises(ValueError, match="two depths at least"):
        gain_by_category(found, task="once")


def test_losses_that_fall_rise_and_stay():
    rng = np.random.default_rng(0)
    text = rng.normal(3, 1, size=400)
    steps = [text, text - 0.5 + rng.normal(0, 0.3, 400), text - 0.4 + rng.normal(0, 0.3, 400)]
    losses_NT = np.stack([*steps, steps[2] + rng.normal(0, 0.5, 400)], axis=1)
    found = loss_decreases(losses_NT)
    assert [(step.loop, step.verdict) for step in found] == [(2, "falls"), (3, "rises"), (4, "undecided")]
    falls = [stats.ttest_rel(losses_NT[:, t], losses_NT[:, t + 1], alternative="greater").pvalue for t in range(3)]
    assert [step.fall.p for step in found] == pytest.approx(falls, rel=1e-9)
    assert [step.fall.difference.value for step in found] == pytest.approx(
        losses_NT.mean(0)[:-1] - losses_NT.mean(0)[1:]
    )
    assert all(step.p_falls >= step.fall.p for step in found)
    assert found[0].p_falls == pytest.approx(3 * falls[0])  # the least of three


def test_holm_keeps_what_one_test_alone_would_claim():
    """Differences of mean 1 and one-sided p = 0.04 at each of nine loops are none of them significant together."""
    count = 50
    noise = np.tile([1.0, -1.0], count // 2)
    error = 1 / stats.t.ppf(0.96, count - 1)
    differences = 1 + noise * error * np.sqrt(count - 1)
    losses_NT = -differences[:, None] * np.arange(10)
    found = loss_decreases(losses_NT)
    assert [step.fall.p for step in found] == pytest.approx([0.04] * 9)
    assert {step.verdict for step in found} == {"undecided"}
    assert loss_decreases(losses_NT[:, :2])[0].verdict == "falls"


@pytest.mark.parametrize("losses", [[1.0, 2.0], [[1.0], [2.0]], [[1.0, 2.0]]])
def test_too_few_losses(losses):
    with pytest.raises(ValueError, match=r"two loops at least|2 items at least"):
        loss_decreases(losses)
