"""`looplm <verb>`: each verb parses its arguments, calls one function and prints."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from looplm.cli.bench import bench
from looplm.cli.errors import INTERRUPTED, complain, one_line_errors
from looplm.cli.evaluation import evaluation
from looplm.cli.study import study
from looplm.cli.tables import AsJson, print_rows

if TYPE_CHECKING:
    from looplm.training import RunResult

app = typer.Typer(
    help="Looped language models: train, run and study them.", no_args_is_help=True, pretty_exceptions_enable=False,
    add_completion=False,
)  # fmt: skip
app.add_typer(bench, name="bench")
app.add_typer(evaluation, name="eval")
app.command()(study)

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

    _report(run(load_recipe(recipe, overrides or []), title=recipe))


@app.command()
@one_line_errors
def sft(
    model: Annotated[str, typer.Argument(help="A checkpoint, a run folder or a hub id.")],
    data: Annotated[str, typer.Argument(help="Conversations: .jsonl, .parquet, .arrow, a folder, or hub:owner/name.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, a.b=value.")] = None,
    recipe: Annotated[str, typer.Option(help="A YAML file, or the name of a built-in recipe.")] = "sft",
) -> None:
    """Fine-tune a model on conversations: the recipe `sft`, with model and data filled in."""
    from looplm.training import load_recipe
    from looplm.training import train as run

    paths = {"init_from": model, "data.sources.chat.path": data}
    _report(run(load_recipe(recipe, overrides or [], paths), title="sft"))


@app.command()
@one_line_errors
def rl(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a built-in recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, a.b=value.")] = None,
) -> None:
    """Reinforce by a recipe, crediting every loop; an interrupted run resumes under the same command."""
    from looplm.rl.recipe import load_rl_recipe
    from looplm.rl.run import reinforce

    _report(reinforce(load_rl_recipe(recipe, overrides or []), title=recipe))


@app.command()
@one_line_errors
def tokenize(
    text: Annotated[str, typer.Argument(help="Text: a file or folder of text, .jsonl, .parquet, .arrow, or hub:...")],
    tokenizer: Annotated[str, typer.Argument(help="A folder with tokenizer.json, or a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    field: Annotated[str, typer.Option(help="The field of a record that holds its text.")] = "text",
) -> None:
    """Write text as token shards, which training reads by memory map."""
    from looplm.cli.corpus import tokenize_corpus

    made = tokenize_corpus(text, tokenizer, out, field)
    typer.echo(f"wrote {made.num_tokens:,} tokens of {made.num_documents:,} documents to {out}")


@app.command()
@one_line_errors
def average(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Argument(help="The model folder to write.")],
    beta: Annotated[float, typer.Option(min=0.0, max=1.0, help="Decay from one checkpoint to the one before.")] = 0.9,
    last: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints to look at.")] = 75,
    dilation: Annotated[int, typer.Option(min=1, help="Take every so many of them.")] = 7,
) -> None:
    """Average a run's checkpoints into one model (Huginn's dilated average)."""
    from looplm.cli.corpus import average_run

    typer.echo(f"averaged {len(average_run(run, out, beta, last, dilation))} checkpoints into {out}")


def _report(done: "RunResult") -> None:
    leads = int(os.environ.get("RANK", "0")) == 0
    if leads:
        typer.echo(f"checkpoint: {done.checkpoint}")
    if not done.finished:
        if leads:
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
        typer.Option("--exit", min=0.0, max=1.0, help="Leave at the first loop whose exit CDF reaches this."),
    ] = None,
    calibrated: Annotated[bool, typer.Option(help="Leave by what `looplm calibrate` found.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to make at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(max=1.0, help="The nucleus to sample from.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be given again.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    kv: Annotated[str, typer.Option(help="How loops share keys and values: full, last, averaged, first.")] = "full",
    speculate: Annotated[bool, typer.Option(help="Start tokens early; the same text, faster.")] = False,
    int8: Annotated[bool, typer.Option(help="Round the blocks' weights to int8; less memory, not faster.")] = False,
    parallel: Annotated[bool, typer.Option(help="Refine drafts together; faster, lossy, and by how much.")] = False,
    inner_loops: Annotated[int | None, typer.Option(min=1, help="With --parallel: loops between readings; 4.")] = None,
    threshold: Annotated[float | None, typer.Option(help="With --parallel: a change that freezes; 0.03.")] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, each token at its own depth."""
    from looplm.cli import generation
    from looplm.engine import SamplingParams

    depth = generation.Depth(loops=loops, exit_threshold=exit_threshold, calibrated=calibrated)
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=tuple(stop or ()), seed=seed
    )
    if not parallel and (inner_loops is not None or threshold is not None):
        raise ValueError("--inner-loops and --threshold belong to --parallel; give that, too")
    if parallel:
        settings = generation.parallel_settings(inner_loops, threshold, depth, kv, speculate)
        if as_json:
            done = generation.continue_in_parallel(checkpoint, prompt, settings, sampling, int8)
            typer.echo(json.dumps(asdict(done)))
        else:
            generation.print_parallel(checkpoint, prompt, settings, sampling, int8)
    elif as_json:
        made = generation.continue_prompt(checkpoint, prompt, depth, sampling, kv, speculate, int8)
        typer.echo(json.dumps(asdict(made)))
    else:
        generation.print_stream(checkpoint, prompt, depth, sampling, kv, speculate, int8)


@app.command()
@one_line_errors
def calibrate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint or a run folder.")],
    text: Annotated[str | None, typer.Argument(help="Text to measure on; Python's own manual by default.")] = None,
    policy: Annotated[
        str, typer.Option(help="Whose threshold: exit_cdf, state_converged, logits_kl, ...")
    ] = "exit_cdf",
    mean_loops: Annotated[float | None, typer.Option(help="The mean loops of a token to aim at.")] = None,
    loss: Annotated[float | None, typer.Option(help="Or the loss in nats a token not to exceed.")] = None,
    min_loops: Annotated[int | None, typer.Option(min=1, help="No token leaves before.")] = None,
    max_loops: Annotated[int | None, typer.Option(min=1, help="The last loop; the model's by default.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to look at.")] = 8192,
    as_json: AsJson = False,
) -> None:
    """Find the exit threshold that gives a mean depth or a loss, and keep it with the model."""
    from looplm.cli.calibration import calibrate_checkpoint

    found, path = calibrate_checkpoint(checkpoint, text, policy, mean_loops, loss, min_loops, max_loops, tokens)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    console = Console()
    rows = [{"loops": loop, "loss": f"{value:.4f}"} for loop, value in enumerate(found.loss_by_loop, start=1)]
    print_rows(console, [*rows, {"loops": f"{found.mean_loops:.2f} on average", "loss": f"{found.loss:.4f}"}])
    console.print(f"{found.policy()} on {found.tokens} tokens; kept in {path}", highlight=False)


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
    print_rows(console, found["cost"])


@app.command()
@one_line_errors
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, a run folder or a hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    layout: Annotated[
        Literal["looplm", "ouro", "huginn_raven", "llama"], typer.Option(help="Whose layout to write.")
    ] = "ouro",
) -> None:
    """Write a checkpoint in another layout, tensors unchanged."""
    from looplm.cli.export import export_checkpoint

    typer.echo(f"wrote {export_checkpoint(checkpoint, out, layout)}")


def main() -> None:
    """The `looplm` command."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        code = app(standalone_mode=False)
    except USAGE_ERROR as error:  # ty: ignore[invalid-exception-caught]
        message = " ".join(error.format_message().split())
        if message:  # empty where the help itself was shown
            complain(f"{message} (see --help)")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    sys.exit(code)
