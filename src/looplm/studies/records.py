"""Recorded results: the numbers of a study with the command, date and machine that made them."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a result comes from."""

    command: str
    date: str
    commit: str
    machine: str
    torch: str


def origin(command: str) -> Origin:
    """The origin of a result that is made now by `command`."""
    return Origin(
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        commit=_commit(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, no GPU"
        if not torch.cuda.is_available()
        else torch.cuda.get_device_name(),
        torch=torch.__version__,
    )


def read_log(run: Path) -> list[dict[str, Any]]:
    """The records of a run's log, in order; a number that was not finite, null there, is NaN here."""
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{name: math.nan if value is None else value for name, value in record.items()} for record in records]


def write_result(folder: Path, name: str, made_by: Origin, values: Any) -> Path:
    """Write `values` with their origin to `folder/name.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"origin": asdict(made_by), **values}, indent=1) + "\n")
    return path


def mean_and_range(values: Sequence[float]) -> dict[str, float]:
    """The mean over seeds with the lowest and highest."""
    return {"mean": sum(values) / len(values), "low": min(values), "high": max(values)}


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
