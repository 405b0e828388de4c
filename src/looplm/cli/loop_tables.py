"""Rows of the tables that `looplm eval loops` prints."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looplm.evals.loop_gains import CategoryGain
    from looplm.evals.loop_report import LoopReport, MetricReport
    from looplm.evals.statistics import Interval

Rows = list[Mapping[str, Any]]


def saturation_rows(found: "MetricReport") -> Rows:
    """A row for each task."""
    return [
        {"task": each.task, "depth": each.depth, "there": f"{each.value:.4f}", "best at": each.best_depth,
         "best": f"{each.best:.4f}"}
        for each in found.saturations
    ]  # fmt: skip


def gain_rows(found: "MetricReport") -> Rows:
    """A row for each task and depth but the first."""
    return [
        {"task": row.tasks[0], "from": row.depths[1], "to": row.depths[0], "items": row.items,
         "gain": f"{row.difference:+.4f}", "95 %": _ends(row.interval), "p": _p(row.p_t)}
        for row in found.gains
    ]  # fmt: skip


def category_rows(gains: "Sequence[CategoryGain]") -> Rows:
    """A row for each category: its values by depth, and the gain over all of them."""
    return [
        {
            "category": each.category, "items": each.items,
            **{depth: f"{value:.4f}" for depth, value in zip(each.depths, each.values, strict=True)},
            "relative": "–" if each.relative is None else f"{each.relative:+.0%}",
            "gain": f"{each.values[-1] - each.values[0]:+.4f}",
            "95 %": _ends(None if each.whole is None else each.whole.difference),
            "p": _p(None if each.whole is None else each.whole.p),
        }
        for each in gains
    ]  # fmt: skip


def loss_rows(found: "LoopReport") -> Rows:
    """A row for each task and depth but the first."""
    return [
        {"task": each.task, "to": each.depths[step.loop - 1], "fall in nats": f"{step.fall.difference.value:+.4f}",
         "95 %": _ends(step.fall.difference), "p falls": _p(step.p_falls), "p rises": _p(step.p_rises),
         "verdict": step.verdict}
        for each in found.losses
        for step in each.steps
    ]  # fmt: skip


def _ends(interval: "Interval | None") -> str:
    return "–" if interval is None else f"{interval.low:+.4f} … {interval.high:+.4f}"


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"
