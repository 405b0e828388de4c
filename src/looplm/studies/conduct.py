"""Run a study and record it: the numbers as JSON, figures, and a section of a results page."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from looplm.analysis.origin import Origin, origin
from looplm.analysis.plots import as_svg
from looplm.studies.records import mean_and_range, write_result
from looplm.studies.runner import run_jobs
from looplm.studies.study import Outcome, Results, Scale, Study, Verdict

_FACTS = {"parameters": "{:,}", "loops": "{:.3g}", "gflops_per_step": "{:.3g}", "steps": "{:,}", "minutes": "{:.0f}"}


def conduct(
    study: Study, out: Path, scale: Scale = "cpu", seeds: int = 3, processes: int = 2, remeasure: bool = False,
    console: Console | None = None,
) -> list[Verdict]:  # fmt: skip
    """Run (or resume) every cell under `out`, and write NAME.json, NAME.md and the figures there.

    remeasure: measure finished runs again, which are not trained again.
    """
    console = console or Console()
    cells = study.jobs(scale, seeds)
    jobs = {out / slug(cell) / f"seed{seed}": job for cell, runs in cells.items() for seed, job in enumerate(runs)}
    assert len(jobs) == sum(map(len, cells.values())), "two cells share a folder"
    found = run_jobs(jobs, processes, console, remeasure)
    results = {
        cell: [found[out / slug(cell) / f"seed{seed}"] for seed in range(len(runs))] for cell, runs in cells.items()
    }
    verdicts = study.verdicts(results)
    made_by = origin(f"looplm study {study.name} --scale {scale} --seeds {seeds}")
    write_result(out, study.name, made_by, _record(study, scale, results, verdicts))
    captions = {}
    for name, (figure, caption) in study.figures(results).items():
        (out / f"{study.name}_{name}.svg").write_text(as_svg(figure))
        captions[f"{study.name}_{name}.svg"] = caption
    (out / f"{study.name}.md").write_text(section(study, results, verdicts, captions, made_by))
    _show(study, results, verdicts, console)
    console.print(f"results: {out / study.name}.json, .md", highlight=False, soft_wrap=True)
    return verdicts


def slug(name: str) -> str:
    """A cell's name as a folder's."""
    return re.sub(r"[^a-z0-9.]+", "_", name.lower()).strip("_")


def section(
    study: Study, results: Results, verdicts: Sequence[Verdict], captions: dict[str, str], made_by: Origin
) -> str:  # fmt: skip
    """The study as a section of a results page, in Markdown."""
    header, rows = _table(study, results)
    lines = [
        f"## {study.title}: `{made_by.command}`", "",
        f"**The paper's claim**: {study.claim}", "",
        f"**Here**: {study.setting}", "",
        " | ".join(["|", *header, "|"]).replace("| |", "|"),
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows), "",
        f"{_shared(study.rows(results))}Means over seeds with the lowest and highest; "
        f"{study.chance + '; ' if study.chance else ''}float32 on "
        f"{made_by.machine}; {made_by.date}, commit {made_by.commit}.", "",
        *(f"![{caption}](results/{name})\n\n*{caption}*\n" for name, caption in captions.items()),
        *(f"- {_said(verdict)}" for verdict in verdicts), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _said(verdict: Verdict) -> str:
    holds = "Holds" if verdict.holds else "Does not hold"
    seeds = "1 seed" if verdict.seeds == 1 else f"{verdict.seeds} seeds"
    return f"**{holds}** ({verdict.effect:+.3g} {verdict.unit}, {seeds}): {verdict.claim}"


def _record(study: Study, scale: Scale, results: Results, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "study": study.name,
        "scale": scale,
        "claim": study.claim,
        "chance": study.chance,
        "cells": {
            cell: {
                "facts": {**found[0].facts, "seeds": list(range(len(found)))},
                "summary": _summary(found),
                "outcomes": [{"values": outcome.values, "series": outcome.series} for outcome in found],
            }
            for cell, found in results.items()
        },
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def _summary(found: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    return {name: mean_and_range([outcome.values[name] for outcome in found]) for name in found[0].values}


def _table(study: Study, results: Results) -> tuple[list[str], list[list[str]]]:
    """Header and rows: each cell with what it is and what it gave."""
    results = study.rows(results)
    facts = [name for name in _FACTS if len(_said_of(name, results)) > 1]
    columns = study.columns(results)
    rows = []
    for cell, found in results.items():
        held = [_said_of(name, {cell: found}).pop() for name in facts]
        summary = _summary(found)
        rows.append([cell, *held, *(_cell(summary[name], len(found)) if name in summary else "" for name in columns)])
    return ["", *(name.replace("_", " ") for name in facts), *columns], rows


def _shared(rows: Results) -> str:
    """The facts in which all rows agree, as a sentence."""
    alike = {name: _said_of(name, rows) for name in _FACTS}
    told = [
        f"{name.replace('_', ' ')} {found.pop()}"
        for name, found in alike.items()
        if len(found) == 1 and "" not in found
    ]
    return f"Every run: {', '.join(told)}. " if told else ""


def _said_of(fact: str, rows: Results) -> set[str]:
    """The different ways in which rows say a fact, \"\" where they do not."""
    return {_FACTS[fact].format(found[0].facts[fact]) if fact in found[0].facts else "" for found in rows.values()}


def _cell(summary: dict[str, float], seeds: int) -> str:
    mean, low, high = (f"{summary[name]:.3g}" for name in ("mean", "low", "high"))
    return mean if seeds == 1 else f"{mean} [{low}, {high}]"


def _show(study: Study, results: Results, verdicts: Sequence[Verdict], console: Console) -> None:
    header, rows = _table(study, results)
    table = Table(title=study.title, title_justify="left")
    for name in header:
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for verdict in verdicts:
        console.print(_said(verdict).replace("**", ""), highlight=False, soft_wrap=True)
