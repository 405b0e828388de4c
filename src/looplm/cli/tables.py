"""What verbs that print tables share."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_rows(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with a column for every key of the first row."""
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    console.print(table)


def print_measured(
    as_json: bool, problem: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *,
    further: Mapping[str, Any] | None = None, tables: Sequence[Sequence[Mapping[str, Any]]] = (),
    after: Sequence[str] = (), how: str = "",
) -> None:  # fmt: skip
    """Measurements of a problem: JSON of `problem`, `rows` and what is `further`, or tables to read.

    The tables show the rows themselves where none are given, numbers to three digits; `how` is said of the problem's
    sizes above them, `after` below.
    """
    if as_json:
        typer.echo(json.dumps({"problem": problem, "rows": rows, **(further or {})}))
        return
    console = Console()
    sizes = [f"{name}={value}" for name, value in problem.items()]
    console.print(", ".join([*sizes, how] if how else sizes), highlight=False, soft_wrap=True)
    for table in tables or [rows]:
        print_rows(console, [{name: _short(value) for name, value in row.items()} for row in table])
    for line in after:
        console.print(line, highlight=False, soft_wrap=True)


def _short(value: object) -> object:
    return f"{value:.3g}" if isinstance(value, float) else value
