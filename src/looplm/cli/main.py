"""`looplm <verb>`: each verb parses its arguments, calls one function and prints."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from looplm.cli.errors import one_line_errors

app = typer.Typer(
    help="Looped language models: train, run and study them.", no_args_is_help=True, pretty_exceptions_enable=False,
    add_completion=False,
)  # fmt: skip
bench = typer.Typer(help="Measure, side by side in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
INTERRUPTED = 130
USAGE_ERROR = typer.BadParameter.__mro__[1]  # click's own, which typer exports under this name alone


@app.command()
@one_line_errors
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run and its report.")] = Path("runs/demo"),
    text: Annotated[str | None, typer.Option(help="Text file or folder to learn instead of Python's manual.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Stage I recipe overrides, a.b=value.")] = None,
) -> None:
    """Train a small looped model in minutes and write a report on what its loops do."""
    from looplm.studies.demo import run_demo

    if not run_demo(out, text, tuple(overrides or ())):
        raise typer.Exit(INTERRUPTED)


@app.command()
@one_line_errors
def train(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a built-in recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, a.b=value.")] = None,
) -> None:
    """Train by a recipe; an interrupted run resumes bit for bit under the same command."""
    from looplm.training import load_recipe
    from looplm.training import train as run

    done = run(load_recipe(recipe, overrides or []), title=recipe)
    typer.echo(f"checkpoint: {done.checkpoint}")
    if not done.finished:
        typer.echo(f"stopped at step {done.step} of {done.steps}; the same command resumes", err=True)
        raise typer.Exit(INTERRUPTED)


@app.command()
@one_line_errors
def generate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, a run folder or a hub id.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    loops: Annotated[int | None, typer.Option(help="Loops per token; the model's own by default.")] = None,
    exit_threshold: Annotated[
        float | None,
        typer.Option("--exit", min=0.0, max=1.0, help="Read each token at the first loop whose exit CDF reaches this."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to make at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt."""
    from looplm.cli.generation import continue_prompt

    made = continue_prompt(checkpoint, prompt, loops, exit_threshold, max_tokens, temperature, seed)
    if as_json:
        typer.echo(json.dumps(asdict(made)))
        return
    typer.echo(prompt + made.text)
    if made.loops_per_token is not None:
        mean = sum(made.loops_per_token) / len(made.loops_per_token)
        typer.echo(f"[{len(made.loops_per_token)} tokens, {mean:.2f} mean loops]", err=True)


@app.command()
@one_line_errors
def info(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, a run folder, a hub id or a preset's name.")],
    loops: Annotated[str, typer.Option(help="Loop counts to account for.")] = "1,2,4,8",
    as_json: AsJson = False,
) -> None:
    """A model's shape, and what a token costs by loops."""
    from looplm.cli.info import describe

    found = describe(checkpoint, loops)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    console.print(f"{checkpoint}: {found['parameters']:,} parameters ({found['layout']} layout)", highlight=False)
    console.print(", ".join(f"{key}={value}" for key, value in found["config"].items()), highlight=False)
    _print_rows(console, found["cost"])


@app.command()
@one_line_errors
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, a run folder or a hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    layout: Annotated[Literal["looplm", "ouro", "huginn_raven"], typer.Option(help="Whose layout to write.")] = "ouro",
) -> None:
    """Write a checkpoint in another layout, tensors unchanged."""
    from looplm.cli.export import export_checkpoint

    typer.echo(f"wrote {export_checkpoint(checkpoint, out, layout)}")


@bench.command("head-loss")
@one_line_errors
def bench_head_loss(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens N.")] = 1024,
    width: Annotated[int, typer.Option(min=1, help="Width D.")] = 512,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary V.")] = 49152,
    loops: Annotated[int, typer.Option(min=1, help="Loops T.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; the median counts.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Stage I's head loss: chunked against holding T full logit tensors."""
    from looplm.studies.bench_head_loss import bench_head_loss as measure

    rows = [asdict(row) for row in measure(tokens, width, vocab, loops, repeats)]
    ours, plain = rows
    ratio = {"time": ours["seconds"] / plain["seconds"], "memory": ours["peak_bytes"] / plain["peak_bytes"]}
    if as_json:
        problem = {"tokens": tokens, "width": width, "vocab": vocab, "loops": loops}
        typer.echo(json.dumps({"problem": problem, "rows": rows, "ratio": ratio}))
        return
    console = Console()
    console.print(
        f"N = {tokens}, D = {width}, V = {vocab}, T = {loops}, float32, forward and backward", highlight=False
    )
    _print_rows(console, [row | {"seconds": f"{row['seconds']:.3f}"} for row in rows])
    console.print(f"chunked / plain: {ratio['time']:.2f} x time, {ratio['memory']:.2f} x memory", highlight=False)


def _print_rows(console: Console, rows: list[dict]) -> None:
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    """The `looplm` command."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        code = app(standalone_mode=False)
    except USAGE_ERROR as error:  # ty: ignore[invalid-exception-caught]
        message = " ".join(error.format_message().split())
        if message:  # empty where the help itself was shown
            typer.echo(f"looplm: {message} (see --help)", err=True)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    sys.exit(code)
