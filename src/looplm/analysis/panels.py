"""Figures of several panels side by side: curves by group, and paths in a plane."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplm.analysis.plots import COLOURS

_HEIGHT, _WIDTH, _ACROSS = 2.9, 3.1, 3
Seeds = Sequence[Sequence[tuple[float, float]]]


def panels(groups: Mapping[str, Mapping[str, Seeds]], xlabel: str, ylabel: str, marked: float | None = None) -> Figure:
    """A panel a group, in two columns: a line a name over log x, in a band over its seeds; a dashed line at `marked`.

    Lines lie on one another where the names do not matter, so each is drawn narrower than the one before.
    """
    figure, all_axes = _grid(len(groups), across=2, shared=True)
    for axes, (title, lines) in zip(all_axes, groups.items(), strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log")
        for number, (name, seeds) in enumerate(lines.items()):
            xs = [x for x, _ in seeds[0]]
            columns = list(zip(*([y for _, y in points] for points in seeds), strict=True))
            means, width = [sum(ys) / len(ys) for ys in columns], 1.2 + 1.6 * (len(lines) - 1 - number)
            axes.plot(xs, means, color=COLOURS[number], label=name, linewidth=width)
            axes.fill_between(xs, [min(y) for y in columns], [max(y) for y in columns], color=COLOURS[number],
                              alpha=0.18, lw=0)  # fmt: skip
        if marked is not None:
            axes.axvline(marked, color="0.5", linestyle="--", linewidth=1)
    figure.supxlabel(xlabel, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    figure.legend(*all_axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside upper center",
                  ncols=len(next(iter(groups.values()))))  # fmt: skip
    return figure


def paths(points: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """A panel a name: where a state goes in a plane, coloured by loop from first (dark) to last (bright)."""
    figure, all_axes = _grid(len(points), across=_ACROSS)
    for axes, (title, path) in zip(all_axes, points.items(), strict=True):
        xs, ys = zip(*path, strict=True)
        axes.set_title(title, fontsize=10)
        axes.plot(xs, ys, color="0.75", linewidth=0.8, zorder=1)
        axes.scatter(xs, ys, c=range(1, len(path) + 1), cmap="viridis", s=14, zorder=2)
        axes.plot(xs[-1], ys[-1], "x", color=COLOURS[1], markersize=8, zorder=3)
        axes.tick_params(labelsize=8)
    return figure


def _grid(count: int, across: int, shared: bool = False) -> tuple[Figure, list[Axes]]:
    across = min(across, count)
    down = -(-count // across)
    figure = Figure(figsize=(across * _WIDTH, down * _HEIGHT), layout="constrained")
    axes = figure.subplots(down, across, sharex=shared, sharey=shared, squeeze=False).flatten().tolist()
    for unused in axes[count:]:
        unused.set_visible(False)
    for used in axes[:count]:
        used.grid(color="0.9")
        used.spines[["top", "right"]].set_visible(False)
    return figure, axes[:count]
