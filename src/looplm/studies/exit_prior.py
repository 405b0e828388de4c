"""Study: uniform against geometric priors over exits, and what becomes of exits without the entropy term."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from matplotlib.figure import Figure

from looplm.analysis.plots import curves
from looplm.studies.study import Job, Outcome, Results, Scale, Study, Verdict
from looplm.studies.trained import Run, Stage, Trained

VARIANTS = {
    "uniform": {"kind": "expected_loss", "beta": 0.1, "prior": {"kind": "uniform"}},
    "geometric 0.3": {"kind": "expected_loss", "beta": 0.1, "prior": {"kind": "geometric", "p": 0.3}},
    "geometric 0.7": {"kind": "expected_loss", "beta": 0.1, "prior": {"kind": "geometric", "p": 0.7}},
    "no entropy term": {"kind": "expected_loss", "beta": 0.0, "prior": {"kind": "uniform"}},
}
_PAPER = (
    "steps=5000", "loops=4", "data.length=4096", "data.rows=1024", "vocab_size=49152",
    "data.sources.text.path=hub:HuggingFaceFW/fineweb-edu", "model.hidden_size=2048", "model.intermediate_size=5632",
    "model.num_attention_heads=16", "model.core_layers=11", "micro_rows=4", "precision=bfloat16",
    "checkpointing=loop", "optimizer.lr=3.0e-4",
)  # fmt: skip
_OVERRIDES: dict[Scale, tuple[str, ...]] = {
    "paper": _PAPER,
    "cpu": (),
    "smoke": ("steps=6", "log_every=1", "evaluate_every=2", "data.rows=2", "data.length=32"),
}


@dataclass(frozen=True, kw_only=True)
class ExitPriorStudy(Study):
    """The demo's model on text alone under four objectives."""

    name: ClassVar[str] = "exit-prior"
    title: ClassVar[str] = "Priors over exits"
    claim: ClassVar[str] = (
        "a uniform prior reaches a lower loss than geometric ones, whose late loss oscillates; without the entropy "
        "term exits collapse onto the last loop (Ouro, arXiv 2510.25741, Appendix A and section 3.3; 776M "
        "parameters, 20B tokens)."
    )
    setting: ClassVar[str] = (
        "one core layer of width 96 looped 4 times, 1,000 steps of 2,048 tokens of Python's manual, beta 0.1. Held-out "
        "losses in nats a token; 'late swing' is the standard deviation of the last loop's held-out loss around its "
        "trend over the second half of the run."
    )

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """Every objective."""
        stages = {
            name: Stage(recipe="exit_prior", overrides=(*_OVERRIDES[scale], f"objective={json.dumps(objective)}"))
            for name, objective in VARIANTS.items()
        }
        return {
            name: [Trained(stages=(stage,), measure=measure, seed=seed) for seed in range(seeds)]
            for name, stage in stages.items()
        }

    def verdicts(self, results: Results) -> list[Verdict]:
        """Collapse without entropy, and the best loop's loss under the two kinds of prior."""
        entropies = [outcome.values["exit entropy"] for outcome in results["no entropy term"]]
        uniform, geometric = ([o.values["best loss"] for o in results[name]] for name in ("uniform", "geometric 0.3"))
        last = [outcome.values["mean exit loop"] for outcome in results["no entropy term"]]
        return [
            Verdict(
                claim="without the entropy term exits collapse onto one loop", holds=max(entropies) < 0.1,
                effect=statistics.mean(entropies), unit="nats of exit entropy left", seeds=len(entropies),
            ),
            Verdict(
                claim="that loop is the last", holds=min(last) > 3.5, effect=statistics.mean(last),
                unit="mean exit loop of 4", seeds=len(last),
            ),
            Verdict(
                claim="a uniform prior reaches a lower loss than a geometric one", holds=max(uniform) < min(geometric),
                effect=statistics.mean(uniform) - statistics.mean(geometric), unit="nats at the best loop",
                seeds=len(uniform),
            ),
        ]  # fmt: skip

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Exits and loss over training."""
        found = {}
        for name, label in (("mean_exit_loop", "mean exit loop"), ("expected_loss", "expected loss (training)")):
            lines = {cell: [list(outcome.series[name]) for outcome in runs] for cell, runs in results.items()}
            found[name] = curves(lines, "training step", label), f"{label.capitalize()} over training."
        return found


def measure(run: Run) -> Outcome:
    """Held-out loss by loop and the exits at the end, and how restless the late training was."""
    steps = [record for record in run.log if "expected_loss" in record]
    held_out = [record for record in run.log if "text/loss_loop1" in record]
    tail = steps[-max(1, len(steps) // 10) :]
    loops = run.model.config.loops
    losses = [held_out[-1][f"text/loss_loop{loop}"] for loop in range(1, loops + 1)]
    return Outcome(
        values={
            **{f"loss at loop {loop}": loss for loop, loss in enumerate(losses, start=1)},
            "best loss": min(losses),
            "mean exit loop": statistics.mean(record["mean_exit_loop"] for record in tail),
            "exit entropy": statistics.mean(record["exit_entropy"] for record in tail),
            "late swing": _swing([record[f"text/loss_loop{loops}"] for record in held_out[len(held_out) // 2 :]]),
        },
        series={
            name: [(float(record["step"]), record[name]) for record in steps]
            for name in ("mean_exit_loop", "expected_loss")
        },
    )


def _swing(values: Sequence[float]) -> float:
    if len(values) < 3:
        return 0.0
    line = statistics.linear_regression(range(len(values)), values)
    return statistics.pstdev(value - line.slope * index for index, value in enumerate(values))
