"""Study: uniform against geometric priors over exits, and what becomes of exits without the entropy term."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from looplm.analysis.plots import as_svg, lines_by_step
from looplm.studies.records import mean_and_range, origin, read_log, write_result
from looplm.studies.runner import run_all
from looplm.training import Recipe, load_recipe

# Ouro, arXiv 2510.25741, Appendix A: geometric priors from 0.1 to 0.9 against the uniform one; section 3.3: collapse.
VARIANTS: dict[str, dict[str, Any]] = {
    "uniform": {"beta": 0.1, "prior": {"kind": "uniform"}},
    "geometric 0.3": {"beta": 0.1, "prior": {"kind": "geometric", "p": 0.3}},
    "geometric 0.7": {"beta": 0.1, "prior": {"kind": "geometric", "p": 0.7}},
    "no entropy term": {"beta": 0.0, "prior": {"kind": "uniform"}},
}
SCALES: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "smoke": ("steps=20", "log_every=1", "evaluate_every=5", "data.rows=2", "data.length=32"),
}


@dataclass(frozen=True, kw_only=True)
class PriorOutcome:
    """One run: held-out loss by loop and the exits at the end, and how restless the late training was.

    `late_swing` is the standard deviation of the held-out loss of the last loop around its straight line over the last
    half of the run.
    """

    seed: int
    loss_by_loop: list[float]
    exit_by_loop: list[float]
    exit_entropy: float
    mean_exit_loop: float
    expected_loss: float
    late_swing: float


def run_exit_prior(out: Path, seeds: int, scale: str, processes: int, console: Console) -> dict[str, Any]:
    """Run (or resume) every variant at every seed under `out`; write exit_prior.json and its figures there."""
    recipes = {f"{name}, seed {seed}": _recipe(out, name, seed, scale) for name in VARIANTS for seed in range(seeds)}
    run_all(recipes, processes, console)
    outcomes = {
        name: [_outcome(Path(_recipe(out, name, seed, scale).out), seed) for seed in range(seeds)] for name in VARIANTS
    }
    values = {
        "scale": scale,
        "outcomes": {name: [asdict(outcome) for outcome in found] for name, found in outcomes.items()},
        "summary": {name: _summary(found) for name, found in outcomes.items()},
    }
    command = f"looplm study exit-prior --seeds {seeds} --scale {scale}"
    write_result(out, "exit_prior", origin(command), values)
    _draw(out, recipes)
    _show(values["summary"], console)
    return values


def _recipe(out: Path, name: str, seed: int, scale: str) -> Recipe:
    folder = out / name.replace(" ", "_") / f"seed{seed}"
    settings = {"kind": "expected_loss", **VARIANTS[name]}
    return load_recipe("exit_prior", SCALES[scale], {"out": str(folder), "seed": seed, "objective": settings})


def _outcome(run: Path, seed: int) -> PriorOutcome:
    records = read_log(run)
    steps = [record for record in records if "expected_loss" in record]
    held_out = [record for record in records if "text/loss_loop1" in record]
    tail = steps[-max(1, len(steps) // 10) :]
    loops = sum(name.startswith("exit_loop") for name in steps[-1])
    return PriorOutcome(
        seed=seed,
        loss_by_loop=[held_out[-1][f"text/loss_loop{loop}"] for loop in range(1, loops + 1)],
        exit_by_loop=[statistics.mean(r[f"exit_loop{loop}"] for r in tail) for loop in range(1, loops + 1)],
        exit_entropy=statistics.mean(record["exit_entropy"] for record in tail),
        mean_exit_loop=statistics.mean(record["mean_exit_loop"] for record in tail),
        expected_loss=statistics.mean(record["expected_loss"] for record in tail),
        late_swing=_swing([record[f"text/loss_loop{loops}"] for record in held_out[len(held_out) // 2 :]]),
    )


def _swing(values: Sequence[float]) -> float:
    if len(values) < 3:
        return 0.0
    line = statistics.linear_regression(range(len(values)), values)
    return statistics.pstdev(value - line.slope * index for index, value in enumerate(values))


def _summary(outcomes: Sequence[PriorOutcome]) -> dict[str, Any]:
    columns = {
        f"loss at loop {i + 1}": [o.loss_by_loop[i] for o in outcomes] for i in range(len(outcomes[0].loss_by_loop))
    }
    columns["mean exit loop"] = [outcome.mean_exit_loop for outcome in outcomes]
    columns["exit entropy"] = [outcome.exit_entropy for outcome in outcomes]
    columns["expected loss (training)"] = [outcome.expected_loss for outcome in outcomes]
    columns["late swing"] = [outcome.late_swing for outcome in outcomes]
    return {name: mean_and_range(values) for name, values in columns.items()}


def _draw(out: Path, recipes: Mapping[str, Recipe]) -> None:
    logs = {name: read_log(Path(recipe.out)) for name, recipe in recipes.items() if name.endswith("seed 0")}
    for key, label in (("mean_exit_loop", "mean exit loop"), ("expected_loss", "expected loss (training)")):
        lines = {
            name.removesuffix(", seed 0"): [(record["step"], record[key]) for record in log if key in record]
            for name, log in logs.items()
        }
        (out / f"exit_prior_{key}.svg").write_text(as_svg(lines_by_step(lines, label)))


def _show(summary: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    table = Table(title="mean over seeds [lowest to highest]", title_justify="left")
    table.add_column("")
    for name in summary:
        table.add_column(name, justify="right")
    for row in next(iter(summary.values())):
        cells = [summary[name][row] for name in summary]
        table.add_row(row, *(f"{c['mean']:.3f} [{c['low']:.3f} to {c['high']:.3f}]" for c in cells))
    console.print(table)
