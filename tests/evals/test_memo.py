"""Answers that are kept: under their settings alone, through crashes, and by several processes at once."""

import threading

import pytest

from looplm.evals.memo import Memo


def answer(some, keep):
    for place, one in enumerate(some):
        keep(place, [one.upper(), len(one)])


def unasked(some, keep):
    raise AssertionError(some)


def test_what_was_asked_is_not_asked_again(tmp_path):
    wanted = [["A", 1], ["BB", 2], ["A", 1]]
    assert Memo({"model": "a"}, tmp_path / "m").answers(["1", "2"], ["a", "bb", "a"], answer) == wanted
    assert Memo({"model": "a"}, tmp_path / "m").answers(["1", "2"], ["a", "bb", "a"], unasked) == wanted
    assert Memo({"model": "a"}, tmp_path / "m").answers(["2"], ["bb"], unasked) == [[2]]
    with pytest.raises(ValueError, match="holds answers under other settings"):
        Memo({"model": "b"}, tmp_path / "m")


def test_an_interrupt_loses_what_was_not_kept_alone(tmp_path):
    def interrupted(some, keep):
        answer(some[:2], keep)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Memo({}, tmp_path / "m").answers(["1", "2"], list("abc"), interrupted)
    asked = []

    def rest(some, keep):
        asked.extend(some)
        answer(some, keep)

    assert Memo({}, tmp_path / "m").answers(["1", "2"], list("abca"), rest) == [[one, 1] for one in "ABCA"]
    assert asked == ["c"]


@pytest.mark.parametrize("left", ["", "{}", '{}\n["half a key', "{}\nnothing\n\n"])
def test_what_a_crash_left_does_no_harm_to_what_follows(tmp_path, left):
    file = tmp_path / "m"
    file.write_text(left)
    Memo({}, file).answers(["1", "2"], ["a"], answer)
    assert Memo({}, file).answers(["1", "2"], ["a"], unasked) == [["A", 1]]


def test_several_may_write_one_file(tmp_path):
    memos = [Memo({}, tmp_path / "m") for _ in range(4)]
    long = [[f"{number}-{place}" * 900 for place in range(20)] for number in range(4)]
    threads = [
        threading.Thread(target=memo.answers, args=(["1", "2"], asked, answer))
        for memo, asked in zip(memos, long, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = [one for asked in long for one in asked]
    assert Memo({}, tmp_path / "m").answers(["1", "2"], together, unasked) == [[one, len(one)] for one in together]
