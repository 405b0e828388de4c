"""A result is read back as it was written, and what is no result is refused by name."""

import pytest

from looplm.evals.results import Evaluation, Item, Score, cuts, read_evaluation, table, write_evaluation


def test_a_result_is_read_back_as_it_was(tmp_path):
    items = {"sums": {"loops=2": [Item(id="a", metrics={"acc": 1.0}), Item(id="b", metrics={"acc": 0.0}, tokens=3)]}}
    score = Score(task="sums", depth="loops=2", metric="acc", value=0.5, stderr=0.5, items=2)
    found = Evaluation(settings={"model": "x", "seed": 0}, scores=[score], items=items, costs={"loops=2": {"loops": 2}})
    write_evaluation(tmp_path / "deep" / "r.json", found)
    assert read_evaluation(tmp_path / "deep" / "r.json") == found
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_what_is_no_result_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*none.json"):
        read_evaluation(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"scores": []}')
    with pytest.raises(ValueError, match=r"is not a result of `looplm eval` \(settings: "):
        read_evaluation(tmp_path / "other.json")
    (tmp_path / "other.json").write_text('{"settings": {"groups": {"mmlu": 5}}, "scores": []}')
    with pytest.raises(ValueError, match=r"is not a result of `looplm eval` \(mmlu: "):
        read_evaluation(tmp_path / "other.json")


def test_a_table_hides_the_tasks_of_a_group_that_nobody_asked_for():
    scores = [
        Score(task=task, depth="loops=2", metric="acc", value=0.5, stderr=None, items=2)
        for task in ("all", "sums", "words")
    ]
    settings = {"groups": {"all": ["sums", "words"]}, "asked": ["all", "words"]}
    assert [row["task"] for row in table(Evaluation(settings=settings, scores=scores))] == ["all", "words"]


def test_cut_questions_are_counted_once_however_many_depths_read_them():
    one, other = (Item(id="a", metrics={}, cut=cut) for cut in (True, False))
    depths = {"loops=1": [one, one, other], "loops=2": [one, one, other]}
    assert cuts(Evaluation(settings={}, scores=[], items={"long": depths, "short": {"loops=1": [other]}})) == {
        "long": 2
    }
