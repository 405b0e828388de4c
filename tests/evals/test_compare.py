"""Two results compared: pairs by id, tests as scipy has them, and nothing that differs left unsaid."""

import pytest
from scipy import stats

from looplm.evals.compare import compare, comparison_table, differing_settings, unmatched
from looplm.evals.results import Evaluation, Item, Score, read_evaluation, write_evaluation

A_RIGHT = {"p": 1, "q": 1, "r": 1, "s": 0, "t": 1, "only-a": 0}
B_RIGHT = {"t": 1, "s": 1, "r": 0, "q": 0, "p": 0, "x": 1, "y": 1}


def items(right, **more):
    return [Item(id=id, metrics={"right": float(mark), **more}) for id, mark in right.items()]


def result(right, depth="loops=2", task="sums", **settings):
    return Evaluation(settings=settings, scores=[], items={task: {depth: items(right)}})


def test_items_are_paired_by_id():
    (row,) = compare(result(A_RIGHT), result(B_RIGHT))
    assert (row.tasks, row.depths, row.metric) == (("sums", "sums"), ("loops=2", "loops=2"), "right")
    assert (row.items, row.only_a, row.only_b) == (5, 1, 2)
    assert (row.a, row.b, row.difference) == (0.8, 0.4, pytest.approx(0.4))
    theirs = stats.ttest_rel([1, 1, 1, 0, 1], [0, 0, 0, 1, 1])
    assert row.p_t == pytest.approx(theirs.pvalue)
    assert [row.interval.low, row.interval.high] == pytest.approx(list(theirs.confidence_interval()))
    assert (row.mcnemar.only_a, row.mcnemar.only_b) == (3, 1)
    assert row.mcnemar.exact == pytest.approx(stats.binomtest(1, 4).pvalue)


def test_every_shared_task_depth_and_metric_is_a_row():
    a = Evaluation(
        settings={}, scores=[],
        items={
            "one": {"loops=1": items({"p": 1, "q": 0}, nll=1.5), "loops=2": items({"p": 1, "q": 1})},
            "two": {"loops=2": items({"u": 1})}, "lost": {"loops=2": items({"u": 1})},
        },
    )  # fmt: skip
    b = Evaluation(
        settings={}, scores=[Score(task="text", depth="loops=2", metric="bits", value=1.0, stderr=None, items=9)],
        items={
            "two": {"loops=2": items({"u": 0}), "loops=9": items({"u": 0})},
            "one": {"loops=2": items({"q": 1, "p": 0}, f1=0.5), "loops=1": items({"p": 1, "q": 0}, nll=1.0)},
        },
    )  # fmt: skip
    rows = compare(a, b)
    assert [(row.tasks[0], row.depths[0], row.metric) for row in rows] == [
        ("one", "loops=1", "right"), ("one", "loops=1", "nll"), ("one", "loops=2", "right"),
        ("two", "loops=2", "right"),
    ]  # fmt: skip
    nll, single = rows[1], rows[3]
    assert (nll.difference, nll.mcnemar) == (0.5, None)  # no marks of 0 and 1
    assert (single.items, single.interval, single.p_t) == (1, None, None)
    assert single.mcnemar.exact == 1.0
    assert unmatched(a, b) == [
        "only A has lost", "only B has two at loops=9", "only B has f1 of one at loops=2",
        "B has scores of text, but no items to pair",
    ]  # fmt: skip


def test_one_depth_or_task_against_another():
    a, b = result(A_RIGHT, "loops=2"), result(B_RIGHT, "exit q=0.5")
    with pytest.raises(ValueError, match=r"A has sums at loops=2; B has sums at exit q=0\.5; name a task or depth"):
        compare(a, b)
    (row,) = compare(a, b, depths=("loops=2", "exit q=0.5"))
    assert (row.depths, row.items) == (("loops=2", "exit q=0.5"), 5)
    both = Evaluation(settings={}, scores=[], items={"open": a.items["sums"], "closed": result(B_RIGHT).items["sums"]})
    (row,) = compare(both, both, tasks=("open", "closed"))
    assert (row.tasks, row.difference) == (("open", "closed"), pytest.approx(0.4))
    with pytest.raises(ValueError, match="B has no task 'shut', only open, closed"):
        compare(both, both, tasks=("open", "shut"))
    with pytest.raises(ValueError, match="A has no depth 'loops=7', only loops=2"):
        compare(both, both, tasks=("open", "closed"), depths=("loops=7", "loops=2"))


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match="sums at loops=2: A and B have no item in common"):
        compare(result({"p": 1}), result({"q": 1}))
    twice = Evaluation(settings={}, scores=[], items={"sums": {"loops=2": items({"p": 1}) + items({"p": 0})}})
    with pytest.raises(ValueError, match="A, sums at loops=2: 2 items have only 1 ids"):
        compare(twice, result({"p": 1}))
    with pytest.raises(ValueError, match="A has no items"):
        compare(Evaluation(settings={}, scores=[]), result({"p": 1}))


def test_settings_that_differ_are_named_and_a_file_says_the_same_as_what_was_written(tmp_path):
    a = result(A_RIGHT, limit=512, shots=(0, 5), sampling={"temperature": 0.0, "stop": []}, seed=0)
    b = result(B_RIGHT, limit=3072, shots=(0, 5), sampling={"temperature": 0.2, "stop": []}, hash="f|3")
    write_evaluation(tmp_path / "b.json", b)
    for other in (b, read_evaluation(tmp_path / "b.json")):
        assert differing_settings(a, other) == {
            "limit": (512, 3072), "sampling.temperature": (0.0, 0.2), "seed": (0, "not given"),
            "hash": ("not given", "f|3"),
        }  # fmt: skip
        assert compare(a, other) == compare(a, b)
    assert differing_settings(a, a) == {}


def test_the_table_says_it_all():
    a, b = result(A_RIGHT, limit=512, note="x" * 200), result(B_RIGHT, limit=3072, note="a\nb|c")
    text = comparison_table(a, b, compare(a, b))
    header, row, *_ = text.splitlines()
    assert header.split() == ["task", "depth", "metric", "items", "only", "A", "only", "B", "A", "B", "A", "−", "B",
                              "95", "%", "p", "(t)", "p", "(McNemar)"]  # fmt: skip
    assert row.split()[:9] == ["sums", "loops=2", "right", "5", "1", "2", "0.8000", "0.4000", "+0.4000"]
    assert row.split()[-1] == "0.6250"
    assert "- limit: 512 | 3072" in text
    assert f"- note: {'x' * 59}… | a b|c" in text
    assert text.endswith("Not compared: none\n")


def test_markdown_rows_have_a_cell_for_every_column():
    a, b = (result(right, task="a|b") for right in (A_RIGHT, B_RIGHT))
    lines = comparison_table(a, b, compare(a, b), markdown=True).splitlines()
    assert [line.replace("\\|", "").count("|") for line in lines[:3]] == [13, 13, 13]
    assert lines[2].startswith("| a\\|b | loops=2 | right | 5 |")
