"""The bar of an evaluation: what it says on a terminal and elsewhere, and that others' bars are quiet meanwhile."""

import io

import pytest
from rich.console import Console
from tqdm import tqdm

from looplm.cli import progress as bars
from looplm.evals.progress import each_of


def consoled(monkeypatch, terminal):
    """What is written on stderr, which is a terminal or not."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120)
    monkeypatch.setattr(bars, "Console", lambda stderr: console)
    return file


def test_elsewhere_there_is_a_line_every_tenth(monkeypatch):
    file = consoled(monkeypatch, terminal=False)
    with bars.progress() as advance:
        told = each_of(40, "rows", advance)
        for _ in range(40):
            told(None)
        advance("others", 3, 3)
        each_of(1, "others", advance)(None)  # begins anew
    assert file.getvalue().splitlines() == [
        *(f"rows: {done}/40" for done in range(4, 41, 4)),
        "others: 3/3",
        "others: 1/1",
    ]


def test_on_a_terminal_there_is_a_bar_for_what_is_under_way(monkeypatch):
    file = consoled(monkeypatch, terminal=True)
    with bars.progress() as advance:
        advance("rows scored", 3, 8)
        advance("answers", 1, 2)
    assert "answers" in file.getvalue()
    assert "1/2" in file.getvalue()


def test_tqdm_is_quiet_meanwhile_and_back_after_an_error(monkeypatch):
    consoled(monkeypatch, terminal=False)
    shown = io.StringIO()

    def failing():
        with bars.progress():
            assert list(tqdm(range(3), file=shown, disable=False)) == [0, 1, 2]
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert shown.getvalue() == ""
    list(tqdm(range(3), file=shown))
    assert "3/3" in shown.getvalue()
