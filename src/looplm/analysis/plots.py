"""Plots of depth, drawn to be read on a phone: one message a figure, large type, colour-blind-safe colours."""

from collections.abc import Mapping, Sequence
from io import StringIO

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from looplm.analysis.exit_curve import DepthPoint

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_SIZE = (5.0, 3.6)
_WIDE = (6.6, 3.6)


def lines_by_loop(
    lines: Mapping[str, Sequence[float]], trained_loops: int, ylabel: str, percent: bool = False
) -> Figure:
    """One line a name over loops 1, 2, …; the dashed line marks the trained depth."""
    figure, axes = _figure("loops", ylabel)
    for colour, (name, values) in zip(COLOURS, lines.items(), strict=False):
        heights = [100 * value for value in values] if percent else values
        axes.plot(range(1, len(values) + 1), heights, "o-", color=colour, label=name)
    axes.axvline(trained_loops, color="0.5", linestyle="--", linewidth=1)
    axes.annotate(
        "trained depth", (trained_loops, 0.02), (4, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", color="0.35", fontsize=9,
    )  # fmt: skip
    if percent:
        axes.set_ylim(-3, 103)
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=9)
    return figure


def lines_by_step(lines: Mapping[str, Sequence[tuple[int, float]]], ylabel: str) -> Figure:
    """One line a name over training steps."""
    figure, axes = _figure("training step", ylabel)
    for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
        axes.plot([step for step, _ in points], [value for _, value in points], color=colour, label=name, linewidth=1.2)
    axes.legend(frameon=False, fontsize=9)
    return figure


def exit_curves(curves: Mapping[str, Sequence[DepthPoint]], fixed: Sequence[DepthPoint]) -> Figure:
    """Accuracy against mean loops: a line for each gate, squares joined by a dotted line for the fixed depths."""
    figure, axes = _figure("mean loops per answer", "accuracy (%)")
    axes.plot(
        [p.mean_loops for p in fixed], [100 * p.accuracy for p in fixed], "s:", color="0.35", label="fixed depth",
        markersize=7, zorder=3,
    )  # fmt: skip
    widths = (5, 1.5, 1.5)  # the first lies wide under the others, so that equal curves both show
    for colour, width, (name, points) in zip(COLOURS, widths, curves.items(), strict=False):
        ordered = sorted(points, key=lambda point: (point.mean_loops, point.accuracy))
        depths, heights = [p.mean_loops for p in ordered], [100 * p.accuracy for p in ordered]
        alpha = 0.45 if width > 2 else 1.0
        axes.plot(depths, heights, ".-", color=colour, label=name, linewidth=width, alpha=alpha, markersize=4 + width)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def loss_against_loops(curves: Mapping[str, Sequence[Mapping[str, float]]], fixed: Sequence[float]) -> Figure:
    """Loss against mean loops: a line for each gate's thresholds, squares joined by a dotted line for fixed depths."""
    figure, axes = _figure("mean loops per token", "held-out loss")
    axes.plot(range(1, len(fixed) + 1), fixed, "s:", color="0.35", label="fixed depth", markersize=7, zorder=3)
    for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
        ordered = sorted(points, key=lambda point: point["mean_loops"])
        axes.plot([p["mean_loops"] for p in ordered], [p["loss"] for p in ordered], ".-", color=colour, label=name)
    axes.legend(frameon=False, fontsize=9)
    return figure


def against_speed(
    lines: Mapping[str, Sequence[tuple[float, float]]], fixed: Sequence[tuple[float, float]], ylabel: str,
    xlabel: str = "tokens per second",
) -> Figure:  # fmt: skip
    """`ylabel` against tokens a second: a line for each policy's thresholds, squares with their loops for fixed depths.

    The legend stands beside the axes, since lines may run anywhere; past the colours, lines are dashed.
    """
    figure, axes = _figure(xlabel, ylabel)
    figure.set_size_inches(*_WIDE)
    axes.plot(*zip(*fixed, strict=True), "s:", color="0.35", label="fixed depth", markersize=8, zorder=3)
    for loops, point in enumerate(fixed, start=1):
        axes.annotate(str(loops), point, color="white", fontsize=7, ha="center", va="center", zorder=4)
    for number, (name, points) in enumerate(lines.items()):
        style = "o-" if number < len(COLOURS) else "^--"
        axes.plot(*zip(*points, strict=True), style, color=COLOURS[number % len(COLOURS)], label=name, markersize=4)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside right upper")
    return figure


def curves(
    lines: Mapping[str, Sequence[Sequence[tuple[float, float]]]], xlabel: str, ylabel: str, log_x: bool = False,
    log_y: bool = False, marks: Sequence[float] = (),
) -> Figure:  # fmt: skip
    """One line a name: the mean over its seeds' points (x, y), all at the same x, in a band from lowest to highest.

    The legend stands beside the axes where there are more than two lines; past the colours they are dashed. A dotted
    line stands at each of the `marks` on the x axis.
    """
    figure, axes = _figure(xlabel, ylabel)
    for mark in marks:
        axes.axvline(mark, color="0.5", linestyle=":", linewidth=1)
    faint = min(0.18, 0.4 / max(len(lines), 1))  # bands of many lines lie over one another
    for number, (name, seeds) in enumerate(lines.items()):
        xs = [x for x, _ in seeds[0]]
        columns = _columns(seeds)
        colour, style = COLOURS[number % len(COLOURS)], "o-" if number < len(COLOURS) else "^--"
        axes.plot(xs, [sum(ys) / len(ys) for ys in columns], style, color=colour, label=name, markersize=3.5)
        axes.fill_between(xs, [min(ys) for ys in columns], [max(ys) for ys in columns], color=colour, alpha=faint, lw=0)
    places = sorted({x for seeds in lines.values() for x, _ in seeds[0]})
    if all(place == int(place) for place in places):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log_x:
        axes.set_xscale("log")
        if len(places) <= 10:
            axes.set_xticks(places, [f"{place:g}" for place in places])
            axes.minorticks_off()
    if log_y:
        axes.set_yscale("log")
    if len(lines) > 2:
        figure.set_size_inches(*_WIDE)
        figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside right upper")
    elif len(lines) > 1:
        axes.legend(frameon=False, fontsize=9)
    return figure


def histogram(bars: Mapping[str, Sequence[Sequence[tuple[float, float]]]], xlabel: str, ylabel: str) -> Figure:
    """Bars side by side for each name: the means over its seeds' points (x, y), all at the same whole x.

    Empty x at the right end are left out; a line marks each mean x.
    """
    figure, axes = _figure(xlabel, ylabel)
    heights = {name: [sum(ys) / len(ys) for ys in _columns(seeds)] for name, seeds in bars.items()}
    xs = [x for x, _ in next(iter(bars.values()))[0]]
    last = max(x for ys in heights.values() for x, y in zip(xs, ys, strict=True) if y > 0)
    width = 0.9 / len(bars)
    for number, (colour, (name, ys)) in enumerate(zip(COLOURS, heights.items(), strict=False)):
        places = [x + (number - (len(bars) - 1) / 2) * width for x in xs]
        axes.bar(places, ys, width, color=colour, label=name)
        mean = sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(ys)
        axes.axvline(mean, color=colour, linestyle="--", linewidth=1)
    axes.set_axisbelow(True)
    axes.set_xlim(xs[0] - 1, last + 1)
    axes.legend(frameon=False, fontsize=9)
    return figure


def dots(points: Mapping[str, Mapping[str, Sequence[float]]], xlabel: str, ylabel: str) -> Figure:
    """One colour a name: a dot at the mean over seeds of every category, with a bar from lowest to highest.

    Names stand side by side in each category; all have the same categories, in one order.
    """
    figure, axes = _figure(xlabel, ylabel)
    categories = list(next(iter(points.values())))
    for number, (colour, (name, held)) in enumerate(zip(COLOURS, points.items(), strict=False)):
        places = [place + 0.18 * (number - (len(points) - 1) / 2) for place in range(len(categories))]
        seeds = [held[category] for category in categories]
        means = [sum(values) / len(values) for values in seeds]
        axes.vlines(places, [min(values) for values in seeds], [max(values) for values in seeds], color=colour)
        axes.plot(places, means, "o", color=colour, label=name)
    axes.set_xticks(range(len(categories)), categories)
    axes.legend(frameon=False, fontsize=9)
    return figure


def heat_map(
    rows: Sequence[Sequence[float]], names: Sequence[str], xlabel: str, label: str, first: int = 1
) -> Figure:  # fmt: skip
    """A row of colours a name, over columns `first`, `first` + 1, ...; colours by the logarithm, down to 1e-6."""
    figure, axes = _figure(xlabel, "")
    figure.set_size_inches(_WIDE[0], 1.2 + 0.19 * len(rows))
    floored = [[max(value, 1e-6) for value in row] for row in rows]
    edges = (first - 0.5, first + len(rows[0]) - 0.5, len(rows) - 0.5, -0.5)
    image = axes.imshow(floored, aspect="auto", cmap="viridis", norm=LogNorm(), extent=edges, interpolation="nearest")
    axes.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names], fontsize=7, family="monospace")
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label=label)
    return figure


def matrix(shares: Sequence[Sequence[float]], label: str, names: str) -> Figure:
    """A square of shares in [0, 1] as colours and per cent, rows and columns counted from 1 and called `names`."""
    figure, axes = _figure(names, names)
    size = len(shares)
    edges = (0.5, size + 0.5, size + 0.5, 0.5)
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, extent=edges, interpolation="nearest")
    for row, values in enumerate(shares, start=1):
        for column, value in enumerate(values, start=1):
            colour = "white" if value < 0.6 else "black"
            axes.text(column, row, f"{100 * value:.0f}", color=colour, ha="center", va="center", fontsize=9)
    axes.set_xticks(range(1, size + 1))
    axes.set_yticks(range(1, size + 1))
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label=label)
    return figure


def paths(lines: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Paths through a plane side by side, from light to dark; a ring at the start, a square at the end."""
    figure = Figure(figsize=(2.9 * len(lines), 3.1), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(lines), squeeze=False)[0], lines.items(), strict=True):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color="0.75", linewidth=0.8, zorder=1)
        axes.scatter(xs, ys, c=range(len(xs)), cmap="viridis_r", s=14, zorder=2)
        axes.plot(xs[0], ys[0], "o", color="none", markeredgecolor=COLOURS[1], markersize=10, zorder=3)
        axes.plot(xs[-1], ys[-1], "s", color="none", markeredgecolor=COLOURS[1], markersize=10, zorder=3)
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def as_svg(figure: Figure) -> str:
    """The figure as an SVG element that scales to its container."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def _columns(seeds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, ...]]:
    """For every x the y of all seeds."""
    return list(zip(*([y for _, y in points] for points in seeds), strict=True))


def _figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
