"""`looplm eval`: tasks at several depths of a model, and what to do with results."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from looplm.cli import eval_options as options
from looplm.cli.errors import one_line_errors
from looplm.cli.eval_answers import code, reason
from looplm.cli.eval_judged import faithful, mt_bench, safety
from looplm.cli.progress import progress
from looplm.cli.tables import AsJson, print_rows

if TYPE_CHECKING:
    from looplm.evals.loop_report import LoopReport

Tasks = Annotated[str, typer.Option(help="Names joined by commas; `looplm eval tasks` lists them.")]
Shots = Annotated[int | None, typer.Option(min=0, help="Few-shot examples, instead of the task's own count.")]
Result = Annotated[Path, typer.Argument(help="A result file, written by --out.", show_default=False)]


class _RunByDefault(TyperGroup):
    """What is no subcommand is a model to evaluate."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # ty: ignore[incompatible-method-override]
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


evaluation = typer.Typer(
    cls=_RunByDefault, no_args_is_help=True, subcommand_metavar="MODEL --tasks ... | COMMAND ...",
    help="Evaluate a model at every depth.\n\n"
    "`looplm eval MODEL --tasks arc_easy,gsm8k_cot --loops 1,2,4 --exit q=0.5` scores lm-eval's tasks, at all depths "
    "from one forward where the metric allows; `looplm eval run --help` has its options. "
    "The other evaluations are the commands below.\n\n"
    "Each prints a table, and writes with --out FILE a result that `compare` and `loops` read.",
)  # fmt: skip


@evaluation.command("run")
@one_line_errors
def run(
    model: options.Model, tasks: Tasks, loops: options.Loops = None, exits: options.Exits = None,
    kv: options.Kv = "full", limit: options.Limit = None, shots: Shots = None,
    chat: Annotated[bool, typer.Option(help="Ask through the tokenizer's chat template.")] = False,
    multiturn: Annotated[bool, typer.Option(help="With --chat: examples as earlier turns.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: a system turn.")] = None,
    batch_size: options.BatchSize = 8,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens at most; the model's own.")] = None,
    data: options.Data = None, against: options.Against = None, dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of few-shot examples and sampling.")] = 1234,
    cache: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of answers, kept by model and settings.")
    ] = None,
    out: options.Out = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Score lm-eval's tasks at fixed loops and under exit rules; what `looplm eval MODEL` does."""
    from looplm.evals.harness import Protocol
    from looplm.evals.run import TaskSettings, run_evaluation

    chosen = options.model_settings(model, loops, exits, kv, dtype, device, against)
    protocol = Protocol(limit=limit, chat=chat, multiturn=multiturn, system=system, seed=seed)
    asked = TaskSettings(
        tasks=options.names(tasks), shots=shots, data=data, batch_size=batch_size, max_length=max_length, cache=cache,
        protocol=protocol,
    )  # fmt: skip
    with progress() as advance:
        found = run_evaluation(chosen, asked, advance)
    options.finish(found, out, as_json)


@evaluation.command("tasks")
@one_line_errors
def tasks(data: options.Data = None, as_json: AsJson = False) -> None:
    """List every benchmark: what is here of it, or how to get it."""
    from looplm.evals.survey import survey

    with progress():
        found = survey(data)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found]))
        return
    rows = [
        {
            "benchmark": each.name, "verb": each.verb, "items": each.here.items, "split": each.here.split,
            "from": each.here.origin, "examples from": each.here.examples or "–", "licence": each.here.licence,
        }
        for each in found if each.here is not None
    ]  # fmt: skip
    options.show("Here:", rows)
    notes = [f"{each.name}: {each.here.notes}" for each in found if each.here is not None and each.here.notes]
    missing = [f"{each.name} ({each.verb}): {each.missing}" for each in found if each.here is None]
    for title, lines in (("Unlike the hub's data:", notes), ("Not here:", missing)):
        if lines:
            typer.echo("\n".join([title, *(f"  {line}" for line in lines)]))


@evaluation.command("compare")
@one_line_errors
def compare(
    a: Annotated[Path, typer.Argument(help="A result file.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another, or the same for two tasks or depths.", show_default=False)],
    tasks: Annotated[str | None, typer.Option(help="A's and B's task, joined by a comma; all of one name.")] = None,
    depths: Annotated[str | None, typer.Option(help="A's and B's depth, such as loops=4,loops=2.")] = None,
    markdown: Annotated[bool, typer.Option(help="A table for documents.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two results item by item: differences, intervals, p, and what else differs between them."""
    from looplm.evals.compare import compare as paired
    from looplm.evals.compare import comparison_table
    from looplm.evals.results import read_evaluation, with_groups

    first, second = with_groups(read_evaluation(a)), with_groups(read_evaluation(b))
    rows = paired(first, second, tasks=options.pair("--tasks", tasks), depths=options.pair("--depths", depths))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
    else:
        typer.echo(comparison_table(first, second, rows, markdown), nl=False)


@evaluation.command("parity")
@one_line_errors
def parity(
    model: options.Model, tasks: Tasks, limit: options.Limit = None, shots: Shots = None, data: options.Data = None,
    chat: Annotated[bool, typer.Option(help="Ask through the tokenizer's chat template.")] = False,
    batch_size: options.BatchSize = 8, out: options.Out = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Compare every score with lm-eval's own `hf` model, on a checkpoint that both can load."""
    from looplm.evals.harness import Protocol
    from looplm.evals.results import write_evaluation
    from looplm.evals.run import TaskSettings, run_parity
    from looplm.evals.subject import ModelSettings

    protocol = Protocol(limit=limit, chat=chat, multiturn=chat)
    asked = TaskSettings(
        tasks=options.names(tasks), shots=shots, data=data, batch_size=batch_size, protocol=protocol
    )  # fmt: skip
    with progress() as advance:
        rows, found = run_parity(ModelSettings(model=model), asked, advance)
    if out is not None:
        write_evaluation(out, found)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    shown = [
        asdict(row) | {name: f"{getattr(row, name):.6g}" for name in ("looplm", "hf", "difference", "furthest")}
        for row in rows
    ]
    print_rows(options.console(), shown)
    typer.echo("furthest: nats between two likelihoods at most; of generated texts, the share that differ")


@evaluation.command("loops")
@one_line_errors
def loops(
    result: Result,
    metric: Annotated[str | None, typer.Option(help="Of the scores; all shares of right answers by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what each loop brings: saturation, gains with intervals, groups by category, falling losses."""
    from looplm.evals.loop_report import loop_report
    from looplm.evals.results import read_evaluation

    found = loop_report(read_evaluation(result), metric)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        _print_loops(found)


@evaluation.command("smollm2")
@one_line_errors
def smollm2(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="The folder to write.", show_default=False)],
) -> None:
    """Write SmolLM2-135M-Instruct from its packages, a model worth evaluating, as a checkpoint."""
    from looplm.evals.smollm2 import smollm2 as write

    typer.echo(f"wrote {write(folder)}")


def _print_loops(found: "LoopReport") -> None:
    from looplm.cli.loop_tables import category_rows, gain_rows, loss_rows, saturation_rows

    for each in found.metrics:
        options.show(f"{each.metric}: the first depth within 2 % of the best", saturation_rows(each))
        options.show(f"{each.metric}: what each depth adds to the one before", gain_rows(each))
        for group, gains in each.categories.items():
            options.show(f"{each.metric}: {group} by category, the largest relative gain first", category_rows(gains))
    options.show("Does the loss fall with each depth? (p by Holm over all depths of a task)", loss_rows(found))


for _name, _verb in (
    ("code", code), ("reason", reason), ("safety", safety), ("mt-bench", mt_bench), ("faithful", faithful),
):  # fmt: skip
    evaluation.command(_name)(_verb)
