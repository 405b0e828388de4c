"""A bar on stderr that says how far an evaluation is; on no terminal, a line every tenth of the way."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tqdm import tqdm

from looplm.evals.progress import Advance


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console, self._what, self._tenths = console, "", 0

    def __call__(self, what: str, done: int, total: int) -> None:
        tenths = 10 * done // max(total, 1)
        if what != self._what or tenths < self._tenths:
            self._what, self._tenths = what, 0
        if tenths > self._tenths:
            self._tenths = tenths
            self._console.print(f"{what}: {done}/{total}", highlight=False, markup=False, soft_wrap=True)


class _Bar:
    def __init__(self, bar: Progress) -> None:
        self._bar, self._what = bar, ""
        self._task = bar.add_task("", visible=False)

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self._what = what
            self._bar.reset(self._task, total=total, description=what, visible=True)
        self._bar.update(self._task, completed=done, total=total)


@contextmanager
def progress() -> Generator[Advance]:
    """What evaluations tell their progress to; meanwhile nothing of tqdm's, which lm-eval draws for every task."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with _no_tqdm():
        if not console.is_terminal:
            yield _Lines(console)
            return
        with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as bar:
            yield _Bar(bar)


@contextmanager
def _no_tqdm() -> Generator[None]:
    """By its constructor: TQDM_DISABLE is read when tqdm is imported, and gives way to what callers ask."""
    shown = tqdm.__init__

    def hidden(self: tqdm, *args: Any, **options: Any) -> None:
        shown(self, *args, **{**options, "disable": True})

    tqdm.__init__ = hidden
    try:
        yield
    finally:
        tqdm.__init__ = shown
