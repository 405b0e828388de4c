"""What the verbs of `looplm eval` share: options, how they are read, and how results end."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from looplm.cli.tables import print_rows

if TYPE_CHECKING:
    from looplm.evals.results import Evaluation
    from looplm.evals.subject import ModelSettings

_WIDE = 1000  # columns where no terminal says how many it has


def _writable(path: Path | None) -> Path | None:
    """Found out before hours are spent, not after."""
    if path is not None:
        place = next(each for each in path.parents if each.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise typer.BadParameter(f"'{place}' is no folder that can be written to")
    return path


Model = Annotated[str, typer.Argument(help="A checkpoint, a run folder or a hub id.", show_default=False)]
Loops = Annotated[str | None, typer.Option(help="Loop counts joined by commas; the model's own by default.")]
Exits = Annotated[
    list[str] | None,
    typer.Option("--exit", help="An exit rule, q=0.5 or FAMILY=THRESHOLD; may be given again."),
]
Kv = Annotated[str, typer.Option(help="How loops share keys and values in generation.")]
Dtype = Annotated[str, typer.Option(help="Of the weights.")]
Device = Annotated[str, typer.Option(help="Where to compute.")]
Against = Annotated[
    str | None,
    typer.Option(help="Models to compare compute with: Qwen3-1.7B, Qwen3-4B or checkpoints, joined by commas."),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows at once; changes no score.")]
Limit = Annotated[int | None, typer.Option(min=1, help="How many to take, the first; all by default.")]
Data = Annotated[
    Path | None, typer.Option(help="Folder of benchmark files, before installed packages.", show_default=False)
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(max=1.0, help="The nucleus to sample from.")]
Out = Annotated[
    Path | None,
    typer.Option(dir_okay=False, callback=_writable, help="Result file to write, for `compare` and `loops`."),
]  # fmt: skip


def model_settings(
    model: str, loops: str | None, exits: Sequence[str] | None, kv: str, dtype: str, device: str, against: str | None
) -> "ModelSettings":  # fmt: skip
    """Which model, at which depths."""
    from looplm.evals.subject import ModelSettings

    return ModelSettings(
        model=model, loops=counts("--loops", loops), exits=tuple(exits or ()), kv=kv, dtype=dtype, device=device,
        against=names(against),
    )  # fmt: skip


def names(joined: str | None) -> tuple[str, ...]:
    """Names joined by commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in (joined or "").split(",") if name.strip()))


def counts(option: str, joined: str | None, least: int = 1) -> tuple[int, ...]:
    """Whole numbers joined by commas; none of None."""
    if joined is None:
        return ()
    parts = [part.strip() for part in joined.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ValueError(f"{option} '{joined}' must be whole numbers of at least {least}, joined by commas")
    return tuple(int(part) for part in parts)


def pair(option: str, joined: str | None) -> tuple[str, str] | None:
    """Two names joined by a comma, or one for both."""
    if joined is None:
        return None
    given = [name.strip() for name in joined.split(",")]
    if not all(given) or len(given) > 2:
        raise ValueError(f"{option} '{joined}' must be one name, or A's and B's joined by a comma")
    return given[0], given[-1]


def console() -> Console:
    """Where tables go; a file gets whole lines."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDE)


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table under its title, if it has rows."""
    if rows:
        typer.echo(title)
        print_rows(console(), rows)


def finish(found: "Evaluation", out: Path | None, as_json: bool) -> None:
    """Write the result where it is asked for, and print it."""
    from looplm.evals.results import cuts, table, write_evaluation

    if cut := cuts(found):
        tasks = f"{', '.join(list(cut)[:3])}{' and more' if len(cut) > 3 else ''}"
        typer.echo(
            f"looplm: {sum(cut.values())} questions ({tasks}) are longer than the model may read, so they lost their "
            "beginning; see --max-length",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        print_rows(console(), table(found))
    if out is not None:
        write_evaluation(out, found)
        typer.echo(f"wrote {out}", err=True)
