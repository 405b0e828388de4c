"""A result is read back as it was written, and what is no result is refused by name."""

import pytest

from looplm.evals.results import Evaluation, Item, Score, read_evaluation, write_evaluation


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
