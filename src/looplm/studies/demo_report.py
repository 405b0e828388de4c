"""The demo's figures and its page."""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from looplm.analysis.plots import as_svg, exit_curves, lines_by_loop
from looplm.analysis.report import Report

if TYPE_CHECKING:
    from looplm.studies.demo import DemoResult


def write_report(result: "DemoResult", out: Path) -> Path:
    """Write the figures (SVG) and report.html under `out`; the page holds everything it shows."""
    figures = draw(result)
    for name, figure in figures.items():
        (out / f"{name}.svg").write_text(as_svg(figure))
    svgs = {name: as_svg(figure) for name, figure in figures.items()}
    page = Report("What a looped language model does with its loops")
    _introduce(page, result)
    page.figures(
        [
            (
                svgs["accuracy"],
                "Questions by hops, 3 and 4 held out of training: each hop needs more thought, and loops supply it.",
            ),
            (svgs["text_loss"], "Held-out text: the loss after each loop."),
            (svgs["exits"], "Leaving when the exit probability reaches q, against always running the same number."),
        ]
    )
    _tabulate(page, result)
    _sample(page, result)
    path = out / "report.html"
    path.write_text(page.html(), encoding="utf-8")
    return path


def draw(result: "DemoResult") -> dict[str, Figure]:
    """The demo's three figures, by name."""
    by_hops = {hops_label(hops): line for hops, line in result.accuracy_by_hops.items()}
    return {
        "accuracy": lines_by_loop(by_hops, result.trained_loops, "accuracy (%)", percent=True),
        "text_loss": lines_by_loop({"text": result.text_loss_by_loop}, result.trained_loops, "loss (nats per token)"),
        "exits": exit_curves(result.exit_curves, result.fixed_depth),
    }


def hops_label(hops: str) -> str:
    """'1 hop', '2 hops', …"""
    return f"{hops} hop" if hops == "1" else f"{hops} hops"


def _introduce(page: Report, result: "DemoResult") -> None:
    page.paragraph(
        f"This model has {result.parameters:,} parameters and one transformer layer, applied {result.trained_loops} "
        "times per token with the same weights. It learned running text and a task at once: follow a "
        "chain of relations from an entity (each relation is a fixed random permutation). Stage I trains the model "
        "and its exit gate under the expected loss over exits; Stage II trains the gate alone to predict whether "
        "another loop pays."
    )
    page.paragraph(
        "The questions of three and four hops that are measured here were left out of training. Loops beyond the "
        "dashed line were never trained. All loops run here and the exit rule picks a stored state."
    )


def _tabulate(page: Report, result: "DemoResult") -> None:
    loops = range(1, len(result.accuracy_by_loop) + 1)
    page.heading("By loops")
    rows = [["compose, all hops", *map("{:.1%}".format, result.accuracy_by_loop)]]
    rows += [[f"compose, {hops_label(h)}", *map("{:.1%}".format, line)] for h, line in result.accuracy_by_hops.items()]
    rows += [["text loss", *map("{:.3f}".format, result.text_loss_by_loop)]]
    page.table(["loops", *map(str, loops)], rows)
    page.heading("By exit threshold")
    picked = [0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0]
    rows = []
    for stage, curve in result.exit_curves.items():
        points = {point.q: point for point in curve}
        rows.append([f"{stage}: mean loops", *(f"{points[q].mean_loops:.2f}" for q in picked)])
        rows.append([f"{stage}: accuracy", *(f"{points[q].accuracy:.1%}" for q in picked)])
    page.table(["q", *map(str, picked)], rows)


def _sample(page: Report, result: "DemoResult") -> None:
    page.heading(f"Where each token left, at q = {result.sample_q}")
    page.paragraph("Grey is the prompt. Darker tokens were read after more loops.")
    page.depth_key(result.trained_loops)
    for sample in result.samples:
        page.depth_text(sample.prompt, sample.pieces)
