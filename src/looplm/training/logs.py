"""A run's log: one JSON line a record, the same numbers in TensorBoard, and a progress bar."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

_RECORDS, _BOARD = "log.jsonl", "tensorboard"
_OVER = "over"


class Log(Protocol):
    """Where a run's numbers and alarms go."""

    def write(self, step: int, values: dict[str, float]) -> None:  # noqa: D102
        ...

    def alarms(self, step: int, of: str, found: Mapping[str, str]) -> None:  # noqa: D102
        ...

    def close(self) -> None:  # noqa: D102
        ...


class SilentLog:
    """The log of a process that does not lead."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Nothing: the leading process writes the same numbers."""

    def alarms(self, step: int, of: str, found: Mapping[str, str]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class RunLog:
    """Appends to `log.jsonl` and `tensorboard/` under `folder`; records past `start` are those of a lost future."""

    def __init__(self, folder: Path, start: int, console: Console) -> None:
        self.console = console
        self.path = folder / _RECORDS
        self.printed: set[str] = set()
        self.active: dict[str, set[str]] = {}
        for record in forget_after(self.path, start):
            if "of" in record:
                active = self.active.setdefault(record["of"], set())
                (active.discard if record["message"] == _OVER else active.add)(record["alarm"])
        self.writer = SummaryWriter(str(folder / _BOARD), purge_step=start + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record `values` after `step` steps; JSON has no name for what is not finite, so that becomes null."""
        self._append(
            {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        )
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def alarms(self, step: int, of: str, found: Mapping[str, str]) -> None:
        """Record which alarms begin and which are over, given all that the numbers of `of` raise, by name.

        One that begins is printed, once for each name.
        """
        before, self.active[of] = self.active.get(of, set()), set(found)
        for name in sorted(before ^ set(found)):
            message = found.get(name, _OVER)
            self._append({"step": step, "alarm": name, "of": of, "message": message})
            self.writer.add_text(f"alarm/{name}", message, step)
            if name in found and name not in self.printed:
                self.printed.add(name)
                self.console.print(f"alarm at step {step}: {message}", highlight=False, soft_wrap=True)

    def _append(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

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


def forget_after(path: Path, start: int) -> list[dict[str, Any]]:
    """The records of steps up to `start`, which are all that the file of JSON lines keeps, if there is one."""
    if not path.exists():
        return []
    kept = [record for record in map(_read, path.read_text().splitlines()) if record.get("step", math.inf) <= start]
    replacement = path.with_suffix(".new")
    replacement.write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(replacement, path)
    return kept


def _read(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}  # a line cut by a crash
    return found if isinstance(found, dict) else {}
