"""Recorded results: the numbers of a study with where they come from, and a run's log."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from looplm.analysis.origin import Origin


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
