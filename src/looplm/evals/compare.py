"""Two results compared item by item: how far apart, whether by chance, and what else differs between them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looplm.evals.results import Evaluation, Item
from looplm.evals.statistics import Interval, McNemar, is_binary, mcnemar, paired_t

_WIDEST = 60  # characters of a setting that are shown
_ABSENT = "not given"
_HEADER = (
    "task", "depth", "metric", "items", "only A", "only B", "A", "B", "A − B", "95 %", "p (t)", "p (McNemar)",
)  # fmt: skip
_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One metric of two results over the items that both have.

    tasks, depths: of A and of B, most often the same · a, b: the means over the shared items, and their difference
    interval, p_t: of A - B by the paired t-test, None for a single item · mcnemar: where all marks are 0 or 1
    only_a, only_b: items that the other lacks, which count nowhere.
    """

    tasks: tuple[str, str]
    depths: tuple[str, str]
    metric: str
    items: int
    only_a: int
    only_b: int
    a: float
    b: float
    difference: float
    interval: Interval | None
    p_t: float | None
    mcnemar: McNemar | None


def compare(
    a: Evaluation, b: Evaluation, *, tasks: tuple[str, str] | None = None, depths: tuple[str, str] | None = None
) -> list[Comparison]:  # fmt: skip
    """Every metric of every task and depth that both have items of, paired by the items' ids.

    tasks, depths: one of A's against one of B's, instead of those of the same name (B may be A itself). What else
    differs is not in the rows; `differing_settings` and `unmatched` name it, and `comparison_table` prints it.

    Raises:
        ValueError: if nothing is in both, an id comes twice, or a task and depth share no item.
    """
    found = [
        row
        for names in _pairs(a.items, b.items, tasks, "task")
        for levels in _pairs(a.items[names[0]], b.items[names[1]], depths, "depth", optional=tasks is None)
        for row in _rows(names, levels, a.items[names[0]][levels[0]], b.items[names[1]][levels[1]])
    ]
    if not found:
        raise ValueError(
            f"the results have no task and depth with items in common: A has {_listing(a)}; B has {_listing(b)}; "
            "name a task or depth of each"
        )
    return found


def differing_settings(a: Evaluation, b: Evaluation) -> dict[str, tuple[Any, Any]]:
    """What decided A and B where they are not alike, by name; "not given" where one does not say."""
    first, second = _flat(a.settings), _flat(b.settings)
    pairs = {name: (first.get(name, _ABSENT), second.get(name, _ABSENT)) for name in first | second}
    return {name: pair for name, pair in pairs.items() if _canonical(pair[0]) != _canonical(pair[1])}


def unmatched(a: Evaluation, b: Evaluation) -> list[str]:
    """What only A or only B has (a task, a depth of a task, a metric of both), and tasks with scores but no items."""
    lines = []
    for name, one, other in (("A", a, b), ("B", b, a)):
        for task, depths in one.items.items():
            there = other.items.get(task, {})
            lines += [f"only {name} has {task}"] if not there else []
            lines += [f"only {name} has {task} at {depth}" for depth in depths if there and depth not in there]
            lines += [
                f"only {name} has {metric} of {task} at {depth}"
                for depth, items in depths.items() if depth in there
                for metric in _metrics(items) if metric not in _metrics(there[depth])
            ]  # fmt: skip
        bare = dict.fromkeys(score.task for score in one.scores if score.task not in one.items)
        lines += [f"{name} has scores of {task}, but no items to pair" for task in bare]
    return lines


def comparison_table(a: Evaluation, b: Evaluation, rows: Sequence[Comparison], markdown: bool = False) -> str:
    """The rows as a table, below it the settings that differ and what only one has; aligned text, or markdown."""
    cells = [_cells(row) for row in rows]
    differing = differing_settings(a, b).items()
    blocks = [
        _markdown(cells) if markdown else _aligned(cells),
        "Each p is of its row alone: where nothing truly differs, one row in 20 has p < 0.05.",
        _list("Settings that differ (A | B)", [f"{name}: {_short(x)} | {_short(y)}" for name, (x, y) in differing]),
        _list("Not compared", unmatched(a, b)),
    ]
    return "\n\n".join(blocks) + "\n"


def _rows(
    tasks: tuple[str, str], depths: tuple[str, str], items_a: Sequence[Item], items_b: Sequence[Item]
) -> Iterator[Comparison]:  # fmt: skip
    where = f"{_joined(tasks)} at {_joined(depths)}"
    first, second = _by_id(items_a, f"A, {where}"), _by_id(items_b, f"B, {where}")
    if not first.keys() & second.keys():
        raise ValueError(f"{where}: A and B have no item in common, so they asked different questions")
    for metric in _metrics(items_a):
        one, other = _marks(first, metric), _marks(second, metric)
        shared = [id for id in one if id in other]
        if shared:
            yield _comparison(tasks, depths, metric, one, other, shared)


def _comparison(
    tasks: tuple[str, str], depths: tuple[str, str], metric: str, one: Mapping[str, float],
    other: Mapping[str, float], shared: Sequence[str],
) -> Comparison:  # fmt: skip
    a, b = [one[id] for id in shared], [other[id] for id in shared]
    test = paired_t(a, b, _CONFIDENCE) if len(shared) > 1 else None
    means = sum(a) / len(a), sum(b) / len(b)
    return Comparison(
        tasks=tasks, depths=depths, metric=metric, items=len(shared), only_a=len(one) - len(shared),
        only_b=len(other) - len(shared), a=means[0], b=means[1], difference=means[0] - means[1],
        interval=test.difference if test else None, p_t=test.p if test else None,
        mcnemar=mcnemar(a, b) if is_binary(a) and is_binary(b) else None,
    )  # fmt: skip


def _pairs(
    a: Mapping[str, Any], b: Mapping[str, Any], named: tuple[str, str] | None, what: str, optional: bool = False
) -> list[tuple[str, str]]:  # fmt: skip
    """The names to compare: those in both, or the two given, which must exist unless `optional`."""
    if named is None:
        return [(name, name) for name in a if name in b]
    for side, name, there in (("A", named[0], a), ("B", named[1], b)):
        if name not in there and not optional:
            raise ValueError(f"{side} has no {what} '{name}', only {', '.join(there) or 'none'}")
    return [named] if named[0] in a and named[1] in b else []


def _by_id(items: Sequence[Item], where: str) -> dict[str, Item]:
    found = {item.id: item for item in items}
    if len(found) < len(items):
        raise ValueError(f"{where}: {len(items)} items have only {len(found)} ids, so they cannot be paired")
    return found


def _marks(items: Mapping[str, Item], metric: str) -> dict[str, float]:
    return {id: item.metrics[metric] for id, item in items.items() if metric in item.metrics}


def _metrics(items: Sequence[Item]) -> list[str]:
    return list(dict.fromkeys(metric for item in items for metric in item.metrics))


def _listing(found: Evaluation) -> str:
    pairs = [f"{task} at {depth}" for task, depths in found.items.items() for depth in depths]
    return ", ".join(pairs) or "no items"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _canonical(value: Any) -> str:
    """As a file keeps it, so that a tuple equals the list that it is read back as."""
    return json.dumps(value, sort_keys=True, default=str)


# Rendering ----------------------------------------------------------------------------------------------------


def _cells(row: Comparison) -> list[str]:
    interval = "–" if row.interval is None else f"{row.interval.low:+.4f} … {row.interval.high:+.4f}"
    return [
        _joined(row.tasks), _joined(row.depths), row.metric, str(row.items), str(row.only_a), str(row.only_b),
        f"{row.a:.4f}", f"{row.b:.4f}", f"{row.difference:+.4f}", interval, _p(row.p_t),
        _p(None if row.mcnemar is None else row.mcnemar.exact),
    ]  # fmt: skip


def _joined(names: tuple[str, str]) -> str:
    return names[0] if names[0] == names[1] else f"{names[0]} against {names[1]}"


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _aligned(cells: Sequence[Sequence[str]]) -> str:
    lines = [_HEADER, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 3 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _markdown(cells: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * 3 + ["---:"] * (len(_HEADER) - 3)
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in [_HEADER, rule, *escaped])


def _list(title: str, lines: Sequence[str]) -> str:
    return f"{title}: none" if not lines else "\n".join([f"{title}:", "", *(f"- {_plain(line)}" for line in lines)])


def _short(value: Any) -> str:
    text = _plain(value if isinstance(value, str) else _canonical(value))
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _plain(text: str) -> str:
    return " ".join(text.split())
