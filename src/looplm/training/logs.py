"""A run's log: one JSON line a record, the same numbers in TensorBoard, and a progress bar."""

import json
import os
import shutil
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

_RECORDS, _BOARD = "log.jsonl", "tensorboard"


class Log(Protocol):
    """Where a run's numbers and alarms go."""

    def write(self, step: int, values: dict[str, float]) -> None:  # noqa: D102
        ...

    def alarm(self, step: int, name: str, message: str) -> None:  # noqa: D102
        ...

    def close(self) -> None:  # noqa: D102
        ...


class SilentLog:
    """The log of a process that does not lead."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Nothing: the leading process writes the same numbers."""

    def alarm(self, step: int, name: str, message: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class RunLog:
    """Appends to `log.jsonl` and `tensorboard/` under `folder`; records past `start` are those of a lost future."""

    def __init__(self, folder: Path, start: int, console: Console) -> None:
        self.console = console
        self.path = folder / _RECORDS
        self.printed: set[str] = set()
        _forget_after(self.path, start)
        self.writer = SummaryWriter(str(folder / _BOARD), purge_step=start + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record `values` after `step` steps."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def alarm(self, step: int, name: str, message: str) -> None:
        """Record an alarm, and print it once for each name."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "alarm": name, "message": message}) + "\n")
        self.writer.add_text(f"alarm/{name}", message, step)
        if name not in self.printed:
            self.printed.add(name)
            self.console.print(f"alarm at step {step}: {message}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Flush everything to disk."""
        self.writer.close()


class StepProgress:
    """A bar on a terminal, a line every tenth of the way elsewhere."""

    def __init__(self, title: str, steps: int, start: int, console: Console) -> None:
        self.title, self.steps, self.console = title, steps, console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
        self.task = self.bar.add_task(title, total=steps, completed=start, note="")

    def __enter__(self) -> "StepProgress":
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def advance(self, step: int, note: str) -> None:
        """`step` steps are done."""
        self.bar.update(self.task, completed=step, note=note)
        if not self.console.is_terminal and step % max(1, self.steps // 10) == 0:
            self.console.print(f"{self.title}: step {step}/{self.steps}  {note}", highlight=False)


def clear_log(folder: Path) -> None:
    """Remove what a `RunLog` wrote under `folder`."""
    (folder / _RECORDS).unlink(missing_ok=True)
    shutil.rmtree(folder / _BOARD, ignore_errors=True)


def _forget_after(path: Path, start: int) -> None:
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines() if _step(line) <= start]
    replacement = path.with_suffix(".new")
    replacement.write_text("".join(line + "\n" for line in kept))
    os.replace(replacement, path)


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut by a crash
