"""What each loop brings, read of results at several depths: saturation, categories, open books, falling losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from looplm.evals.compare import Comparison, compare
from looplm.evals.reasoning import RIGHT
from looplm.evals.results import Evaluation, Item
from looplm.evals.statistics import PairedT, holm, paired_t


@dataclass(frozen=True, kw_only=True)
class Saturation:
    """Where more depth stops to help: the first depth, of those in the result, that reaches a share of the best."""

    task: str
    depth: str
    value: float
    best_depth: str
    best: float


@dataclass(frozen=True, kw_only=True)
class CategoryGain:
    """A category's metric at each depth, what each depth adds to the one before, and the whole way in its own terms.

    relative: last / first - 1, None where the first is 0 · whole: last minus first, tested item by item; None for a
    single item.
    """

    category: str
    items: int
    depths: tuple[str, ...]
    values: tuple[float, ...]
    gains: tuple[float, ...]
    relative: float | None
    whole: PairedT | None


@dataclass(frozen=True, kw_only=True)
class LossStep:
    """Loop `loop` against the one before: loss before - loss after, and what its sign is.

    p_falls, p_rises: one-sided, by Holm for all loops together · verdict: "rises" contradicts the claim, "falls"
    supports it, and "undecided" is neither.
    """

    loop: int
    fall: PairedT
    p_falls: float
    p_rises: float
    verdict: Literal["falls", "rises", "undecided"]


def saturations(found: Evaluation, metric: str = RIGHT, share: float = 0.98) -> list[Saturation]:
    """For every task, how much depth its best score needs (Huginn, Figure 9: more, the more examples are given).

    Depths are taken in the result's order, which is that of growing loops.

    Raises:
        ValueError: if no score has the metric.
    """
    tasks: dict[str, dict[str, float]] = {}
    for score in found.scores:
        if score.metric == metric:
            tasks.setdefault(score.task, {})[score.depth] = score.value
    if not tasks:
        known = ", ".join(dict.fromkeys(score.metric for score in found.scores))
        raise ValueError(f"no score is '{metric}', only {known or 'none'}")
    return [_saturation(task, values, share) for task, values in tasks.items()]


def closed_book_gap(
    open_book: Evaluation, closed_book: Evaluation, *, tasks: tuple[str, str] | None = None, metric: str = RIGHT
) -> list[Comparison]:  # fmt: skip
    """Open minus closed book at each depth, over the same questions: what a model reads against what it knows.

    `tasks` names the open and the closed one where their names differ; both may be of one result.

    Raises:
        ValueError: if nothing with this metric is in both.
    """
    rows = [row for row in compare(open_book, closed_book, tasks=tasks) if row.metric == metric]
    if not rows:
        raise ValueError(f"no item of both has the metric '{metric}'")
    return rows


def gain_by_category(
    found: Evaluation, metric: str = RIGHT, *, task: str | None = None, categories: Mapping[str, str] | None = None
) -> list[CategoryGain]:  # fmt: skip
    """What each depth adds in every category (Ouro, arXiv 2510.25741, Appendix B.4), the largest relative gain first.

    categories: of items by id, of which `task` must be the one meant if there are several; without them every task is a
    category of its own, as lm-eval has MMLU's subjects. Counted are items that have the metric at every depth.

    Raises:
        ValueError: for an unknown task, an item without a category, or nothing to compare.
    """
    parts: dict[str, dict[str, list[Item]]] = {}
    for name in _tasks(found, task, alone=categories is not None):
        for depth, items in found.items[name].items():
            for item in items:
                if metric in item.metrics:
                    category = name if categories is None else _category(categories, item)
                    parts.setdefault(category, {}).setdefault(depth, []).append(item)
    gains = [_gain(category, metric, depths) for category, depths in parts.items() if len(depths) > 1]
    if not gains:
        raise ValueError(f"gains by loop need items with '{metric}' at two depths at least")
    return sorted(gains, key=lambda gain: (gain.relative is None, -(gain.relative or 0.0)))


def loss_decreases(losses_NT: Sequence[Sequence[float]] | np.ndarray, level: float = 0.05) -> list[LossStep]:
    """Whether E[L(t+1)] <= E[L(t)] at every loop: a one-sided paired test for each t, Holm-corrected over them.

    losses_NT: of N independent texts after each of T loops; tokens of one text are not independent, so average them.

    Raises:
        ValueError: for less than two texts or loops, or what is no number.
    """
    losses_NT = np.asarray(losses_NT, dtype=np.float64)
    if losses_NT.ndim != 2 or losses_NT.shape[1] < 2:
        raise ValueError(f"losses must be [texts, loops] with two loops at least, got shape {list(losses_NT.shape)}")
    pairs = [(losses_NT[:, t], losses_NT[:, t + 1]) for t in range(losses_NT.shape[1] - 1)]
    falls = [paired_t(*pair, side="greater") for pair in pairs]
    p_falls = holm([fall.p for fall in falls])
    p_rises = holm([paired_t(*pair, side="less").p for pair in pairs])
    return [
        LossStep(
            loop=place + 2, fall=falls[place], p_falls=p_falls[place], p_rises=p_rises[place],
            verdict="falls" if p_falls[place] < level else "rises" if p_rises[place] < level else "undecided",
        )
        for place in range(len(falls))
    ]  # fmt: skip


def _saturation(task: str, values: Mapping[str, float], share: float) -> Saturation:
    best = max(values, key=lambda depth: values[depth])
    depth = next(depth for depth, value in values.items() if value >= share * values[best])
    return Saturation(task=task, depth=depth, value=values[depth], best_depth=best, best=values[best])


def _tasks(found: Evaluation, task: str | None, alone: bool) -> list[str]:
    if task is not None and task not in found.items:
        raise ValueError(f"the result has no task '{task}', only {', '.join(found.items) or 'none'}")
    if task is None and alone and len(found.items) > 1:
        raise ValueError(f"say of which task the items' categories are: {', '.join(found.items)}")
    return list(found.items) if task is None else [task]


def _category(categories: Mapping[str, str], item: Item) -> str:
    if item.id not in categories:
        raise ValueError(f"item '{item.id}' has no category; give one for every item")
    return categories[item.id]


def _gain(category: str, metric: str, depths: Mapping[str, Sequence[Item]]) -> CategoryGain:
    marks = {depth: {item.id: item.metrics[metric] for item in items} for depth, items in depths.items()}
    first, *rest = marks.values()
    shared = [id for id in first if all(id in other for other in rest)]
    if not shared:
        raise ValueError(f"no item of {category} is at every depth")
    rows = [[each[id] for id in shared] for each in marks.values()]
    values = [sum(row) / len(shared) for row in rows]
    return CategoryGain(
        category=category, items=len(shared), depths=tuple(marks), values=tuple(values),
        gains=tuple(after - before for before, after in pairwise(values)),
        relative=values[-1] / values[0] - 1 if values[0] else None,
        whole=paired_t(rows[-1], rows[0]) if len(shared) > 1 else None,
    )  # fmt: skip
