"""Evaluation results: scores, the items behind them, and all that decided them, as one JSON file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a task at one depth.

    id: the same for every model (the task's own, or a hash of the question) · metrics: by name, 1.0 for right
    tokens: how many were generated, or scored where none was · loops: done on average by each.
    """

    id: str
    metrics: Mapping[str, float]
    tokens: int | None = None
    loops: float | None = None


@dataclass(frozen=True, kw_only=True)
class Score:
    """A task's metric at one depth ("loops=2", "exit q=0.5"), over so many items."""

    task: str
    depth: str
    metric: str
    value: float
    stderr: float | None
    items: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one command found, with nothing left out that decides it.

    settings: checkpoint with its hash, dtype, tokenizer, start token, template, shots, limits, seed, harness version
    items: by task, then by depth · costs: by depth, what a token costs (`looplm.evals.accounting`).
    """

    settings: Mapping[str, Any]
    scores: Sequence[Score]
    items: Mapping[str, Mapping[str, Sequence[Item]]] = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


_EVALUATION = TypeAdapter(Evaluation)


def write_evaluation(path: Path, found: Evaluation) -> None:
    """Put it in a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(asdict(found), indent=1) + "\n")
    partial.replace(path)


def read_evaluation(path: Path) -> Evaluation:
    """What `write_evaluation` wrote.

    Raises:
        ValueError: if the file is missing or holds something else.
    """
    try:
        return _EVALUATION.validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}; `looplm eval ... --out {path}` writes one") from error
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ValueError(f"{path} is not a result of `looplm eval` ({where}: {error.errors()[0]['msg']})") from error
