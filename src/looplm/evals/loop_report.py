"""All that a result file says of its loops, at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from looplm.evals.compare import Comparison, compare
from looplm.evals.depths import is_fixed
from looplm.evals.loop_gains import CategoryGain, LossStep, Saturation, gain_by_category, loss_decreases, saturations
from looplm.evals.results import NATS, Evaluation, Item, with_groups

_RISING = ("right", "acc", "exact_match", "math_verify", "pass@", "rating", "roc_auc")  # more is better

ByDepth = Mapping[str, Sequence[Item]]
Groups = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class MetricReport:
    """Of one metric: how much depth each task needs, what each depth adds to the one before, and groups by task.

    Of a metric of which more is not known to be better, no saturation.
    """

    metric: str
    saturations: tuple[Saturation, ...]
    gains: tuple[Comparison, ...]
    categories: Mapping[str, Sequence[CategoryGain]]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The test of E[L(t+1)] <= E[L(t)] on the nats of a task; `depths` are the result's, in their order."""

    task: str
    depths: tuple[str, ...]
    steps: tuple[LossStep, ...]


@dataclass(frozen=True, kw_only=True)
class LoopReport:
    """What a result says of its fixed depths."""

    metrics: tuple[MetricReport, ...]
    losses: tuple[Losses, ...]


def loop_report(found: Evaluation, metric: str | None = None) -> LoopReport:
    """Saturation, gains with intervals, groups of tasks (MMLU's subjects) by member, and whether losses fall.

    Of `metric`, or of all that are shares of right answers or ratings. Of a group, items of all members are pooled.

    Raises:
        ValueError: if fewer than two fixed depths have items, or no score has the metric.
    """
    fixed = _fixed(found)
    if all(len(depths) < 2 for depths in fixed.items.values()):
        raise ValueError("gains by loop need a result with two depths at least, such as --loops 1,2,4")
    groups = _groups(fixed)
    outer = _outer(fixed, groups)
    named = dict.fromkeys(score.metric for score in outer.scores)
    known = [name for name in named if name.startswith(_RISING) and "/" not in name]
    if metric is not None and metric not in named:
        raise ValueError(f"no score is '{metric}', only {', '.join(named) or 'none'}")
    wanted = [metric] if metric is not None else known
    metrics = [
        MetricReport(
            metric=name, saturations=tuple(saturations(outer, name)) if name in known else (),
            gains=tuple(_gains(outer, name)), categories=_by_member(fixed, groups, name),
        )
        for name in wanted
    ]  # fmt: skip
    return LoopReport(metrics=tuple(metrics), losses=tuple(_losses(fixed)))


def _by_member(found: Evaluation, groups: Groups, metric: str) -> dict[str, list[CategoryGain]]:
    return {
        name: gain_by_category(replace(found, items={member: found.items[member] for member in members}), metric)
        for name, members in groups.items()
        if all(_has(found.items[member], metric) for member in members)
    }


def _gains(found: Evaluation, metric: str) -> list[Comparison]:
    """Every depth against the one before it, item by item."""
    return [
        row
        for task, depths in found.items.items()
        if _has(depths, metric)
        for before, after in pairwise(depths)
        for row in compare(found, found, tasks=(task, task), depths=(after, before))
        if row.metric == metric
    ]


def _losses(found: Evaluation) -> list[Losses]:
    told = []
    for task, depths in found.items.items():
        marks = [{item.id: item.metrics[NATS] for item in items if NATS in item.metrics} for items in depths.values()]
        shared = [id for id in marks[0] if all(id in each for each in marks)]
        if len(marks) > 1 and len(shared) > 1:
            losses = [[each[id] for each in marks] for id in shared]
            told.append(Losses(task=task, depths=tuple(depths), steps=tuple(loss_decreases(losses))))
    return told


def _fixed(found: Evaluation) -> Evaluation:
    items = {
        task: {depth: told for depth, told in depths.items() if is_fixed(depth)} for task, depths in found.items.items()
    }
    return replace(
        found, items={task: depths for task, depths in items.items() if depths},
        scores=[score for score in found.scores if is_fixed(score.depth)],
    )  # fmt: skip


def _groups(found: Evaluation) -> Groups:
    groups = found.settings.get("groups", {})
    return {name: members for name, members in groups.items() if all(member in found.items for member in members)}


def _outer(found: Evaluation, groups: Groups) -> Evaluation:
    """Each group as one task."""
    inside = {member for members in groups.values() for member in members}
    whole = {task: depths for task, depths in with_groups(found).items.items() if task not in inside}
    return replace(found, scores=[score for score in found.scores if score.task not in inside], items=whole)


def _has(depths: ByDepth, metric: str) -> bool:
    return any(metric in item.metrics for items in depths.values() for item in items)
