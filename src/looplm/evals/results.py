"""Evaluation results: scores, the items behind them, and all that decided them, as one JSON file."""

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

NATS = "nats"  # the metric that is minus the log-likelihood of what should be said: less is better


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a task at one depth.

    id: the same for every model (the task's own, or a hash of the question) · metrics: by name, 1.0 for right
    tokens: how many were generated, or scored where none was · loops: done on average by each
    cut: whether the beginning of what was asked was left out, since it is longer than the model may read.
    """

    id: str
    metrics: Mapping[str, float]
    tokens: int | None = None
    loops: float | None = None
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What requests took: tokens made or scored, their mean loops (None of no token), and `cut` as of `Item`."""

    tokens: int
    loops: float | None
    cut: bool

    @classmethod
    def of(cls, parts: Sequence["Effort"]) -> "Effort":
        """That of all of them together."""
        tokens = sum(part.tokens for part in parts)
        loops = sum(part.tokens * (part.loops or 0.0) for part in parts) / tokens if tokens else None
        return cls(tokens=tokens, loops=loops, cut=any(part.cut for part in parts))


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
_GROUPS = TypeAdapter(dict[str, list[str]])


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
        found = _EVALUATION.validate_json(path.read_bytes())
        _GROUPS.validate_python(found.settings.get("groups", {}))
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}; `looplm eval ... --out {path}` writes one") from error
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ValueError(f"{path} is not a result of `looplm eval` ({where}: {error.errors()[0]['msg']})") from error
    return found


def averages(task: str, depth: str, items: Sequence[Item], metrics: Iterable[str]) -> list[Score]:
    """The mean of each metric over the items that have it, with its standard error s / √n; none where no item has."""
    scores = []
    for metric in metrics:
        values = [item.metrics[metric] for item in items if metric in item.metrics]
        if values:
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            mean = statistics.fmean(values)
            scores.append(Score(task=task, depth=depth, metric=metric, value=mean, stderr=error, items=len(values)))
    return scores


def digest(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hashed_ids(texts: Iterable[str]) -> list[str]:
    """A name for each text that does not depend on which others are there, but for repetitions."""
    seen: Counter[str] = Counter()
    names = []
    for text in texts:
        name = digest(text)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def with_groups(found: Evaluation) -> Evaluation:
    """`found` with the items of every group of tasks ("mmlu") under its name, as those of one task more."""
    groups = {
        name: {
            depth: [
                replace(item, id=f"{member} {item.id}")
                for member in members
                for item in found.items[member].get(depth, ())
            ]
            for depth in found.items[members[0]]
        }
        for name, members in found.settings.get("groups", {}).items()
        if all(member in found.items for member in members)
    }
    return replace(found, items={**found.items, **groups})


def cuts(found: Evaluation) -> dict[str, int]:
    """How many questions of each task lost their beginning, of the tasks where any did."""
    counts = {
        task: max((sum(item.cut for item in items) for items in depths.values()), default=0)
        for task, depths in found.items.items()
    }
    return {task: count for task, count in counts.items() if count}


def table(found: Evaluation) -> list[dict[str, str]]:
    """A row for each task and metric, a column for each depth; then what a token costs at each.

    Left out are the tasks of a group that has a row of its own, unless they were asked for by name, and what holds for
    one seed alone.
    """
    inside = {member for members in found.settings.get("groups", {}).values() for member in members}
    inside -= set(found.settings.get("asked", ()))
    shown = [score for score in found.scores if score.task not in inside and "/seed=" not in score.metric]
    depths = list(dict.fromkeys(score.depth for score in shown))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for score in shown:
        error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
        rows.setdefault((score.task, score.metric), {})[score.depth] = f"{score.value:.4f}{error}"
    for depth, costs in found.costs.items():
        for name, value in costs.items():
            rows.setdefault(("", name), {})[depth] = f"{value:.4g}"
    return [
        {"task": task, "metric": metric} | {depth: row.get(depth, "") for depth in depths}
        for (task, metric), row in rows.items()
    ]
