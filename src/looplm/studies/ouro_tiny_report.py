"""The page of the miniature pipeline: loss by loop through the stages, the upcycling, the gate before and after."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplm.analysis.plots import as_svg, lines_by_loop, loss_against_loops
from looplm.analysis.report import Report


def write_ouro_tiny_report(values: Mapping[str, Any], out: Path) -> Path:
    """Write report.html and its figures to `out`."""
    stages = [stage for stage in values["stages"] if stage["stage"] != "gate"]
    lines = {f"stage {stage['stage']}": stage["manual_loss_by_loop"] for stage in stages}
    curves = {f"gate {name} Stage II": points for name, points in values["gates"].items()}
    figures = {
        "ouro_tiny_loss.svg": lines_by_loop(lines, 4, "held-out loss on the manual"),
        "ouro_tiny_gate.svg": loss_against_loops(curves, values["fixed_depth"]),
    }
    drawn = {name: as_svg(figure) for name, figure in figures.items()}
    for name, svg in drawn.items():
        (out / name).write_text(svg)
    path = out / "report.html"
    path.write_text(_page(values, drawn).html())
    return path


def _page(values: Mapping[str, Any], drawn: Mapping[str, str]) -> Report:
    report = Report("Ouro in miniature: seven stages on real text")
    first, last = values["stages"][0], values["stages"][-1]
    report.paragraph(
        f"{first['parameters']:,} parameters at first, {last['parameters']:,} after the upcycling. Text: Python's "
        "reference manual and library source; conversations: questions answered by docstrings. Losses are in "
        "nats a token, on a part of the manual that training never sees."
    )
    report.heading("Loss by loop through the stages")
    caption = "Held-out loss at the end of each stage; 1a trains at 8 loops, the others at 4."
    report.figures([(drawn["ouro_tiny_loss.svg"], caption)])
    report.table(
        ["stage", "layers", "loops", "tokens", "CPU s", *(f"loop {loop}" for loop in range(1, 9))],
        [
            [s["stage"], str(s["layers"]), str(s["loops"]), f"{s['tokens']:,}", f"{s['cpu_seconds']:.0f}",
             *(f"{loss:.3f}" for loss in s["manual_loss_by_loop"])]
            for s in values["stages"]
        ],
    )  # fmt: skip
    report.heading("The loss jump at the upcycling")
    report.table(["model", "held-out loss"], [[name, f"{loss:.3f}"] for name, loss in values["upcycling"].items()])
    report.heading("The gate before and after Stage II")
    caption = "Held-out loss, each token read at its exit; squares are fixed depths."
    report.figures([(drawn["ouro_tiny_gate.svg"], caption)])
    report.table(
        ["stage", *(f"exit at loop {loop}" for loop in range(1, 5))],
        [
            [s["stage"], *(f"{share:.1%}" for share in s["exit_by_loop"])]
            for s in values["stages"] if len(s["exit_by_loop"]) == 4
        ],
    )  # fmt: skip
    return report
