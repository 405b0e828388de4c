"""`looplm study NAME`: the papers' experiments, run, resumed and recorded."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from looplm.cli.errors import INTERRUPTED, one_line_errors

_ALL, _PIPELINE = "all", "ouro-tiny"


@one_line_errors
def study(
    name: Annotated[
        str, typer.Argument(help="A study, 'ouro-tiny' (Ouro's pipeline), or 'all'; without it, a list.")
    ] = "",
    scale: Annotated[Literal["paper", "cpu", "smoke"], typer.Option(help="How large.")] = "cpu",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell; grids take one.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the runs and results, one a study and scale.")] = Path(
        "runs/study"
    ),
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
    remeasure: Annotated[bool, typer.Option(help="Measure finished runs again, without training.")] = False,
) -> None:
    """Run a study, or resume it, and write its numbers, figures and page under OUT."""
    from looplm.studies.catalogue import STUDIES
    from looplm.studies.conduct import conduct

    console = Console()
    if not name:
        for known in STUDIES.values():
            console.print(f"{known.name}: {known.title}", highlight=False, soft_wrap=True)
        console.print(f"{_PIPELINE}: Ouro's whole pipeline in miniature, in seven stages", highlight=False)
        return
    if name not in (*STUDIES, _PIPELINE, _ALL):
        raise ValueError(f"no study '{name}'; choose one of {', '.join((*STUDIES, _PIPELINE, _ALL))}")
    for chosen in (*STUDIES, _PIPELINE) if name == _ALL else (name,):
        folder = out / chosen / scale
        if chosen == _PIPELINE:
            _pipeline(folder, scale, console)
            continue
        try:
            conduct(STUDIES[chosen], folder, scale, seeds, processes, remeasure, console)
        except KeyboardInterrupt:
            console.print(f"stopped in {chosen}; the same command resumes", highlight=False)
            raise typer.Exit(INTERRUPTED) from None


def _pipeline(folder: Path, scale: str, console: Console) -> None:
    from looplm.studies.ouro_tiny import run_ouro_tiny

    if scale == "paper":
        raise ValueError(
            "ouro-tiny is the pipeline in miniature; at the paper's scale run the recipes ouro_1a to ouro_sft"
        )
    if not run_ouro_tiny(folder, scale == "smoke", console):
        raise typer.Exit(INTERRUPTED)
