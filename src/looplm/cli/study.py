"""`looplm study NAME`: the papers' experiments in small, run, resumed and recorded."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from looplm.cli.errors import INTERRUPTED, one_line_errors

study = typer.Typer(help="Run a study, or resume it, and write its results.", no_args_is_help=True)


@study.command("exit-prior")
@one_line_errors
def exit_prior(
    out: Annotated[Path, typer.Option(help="Folder of the runs and results.")] = Path("runs/study/exit_prior"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 3,
    scale: Annotated[Literal["cpu", "smoke"], typer.Option(help="How large.")] = "cpu",
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
) -> None:
    """Uniform against geometric priors over exits, and exits without the entropy term."""
    from looplm.studies.exit_prior import run_exit_prior

    run_exit_prior(out, seeds, scale, processes, Console())
    typer.echo(f"results: {out / 'exit_prior.json'}")


@study.command("ouro-tiny")
@one_line_errors
def ouro_tiny(
    out: Annotated[Path, typer.Option(help="Folder of the stages and the report.")] = Path("runs/ouro_tiny"),
    scale: Annotated[Literal["cpu", "smoke"], typer.Option(help="How large.")] = "cpu",
) -> None:
    """Ouro's whole pipeline in miniature on real text: seven stages in under half an hour of CPU time."""
    from looplm.studies.ouro_tiny import run_ouro_tiny

    if not run_ouro_tiny(out, scale == "smoke", Console()):
        raise typer.Exit(INTERRUPTED)
