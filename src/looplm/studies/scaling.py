"""Study: loss against parameters, tokens and loops, and the recurrence-equivalence exponent."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure

from looplm.analysis.plots import curves
from looplm.analysis.scaling_laws import ISO_DEPTH, PER_LOOP, Fit, Measured, effective_parameters, fit_law
from looplm.studies.study import Job, Outcome, Points, Results, Scale, Study, Verdict
from looplm.studies.trained import Run, Stage, Trained

SHAPES = {"4x1": (4, 1), "2x2": (2, 2), "1x4": (1, 4), "1x1": (1, 1)}
ISO = ("4x1", "2x2", "1x4")  # of one depth, and nearly one cost
_INNER = {16: 48, 48: 128, 64: 168, 96: 256, 128: 344}
_GRID: dict[Scale, tuple[tuple[int, ...], tuple[int, ...]]] = {  # widths, steps
    "paper": ((512, 768, 1024, 1280), (2500, 5000, 10000)),
    "cpu": ((48, 64, 96, 128), (400, 800, 1600)),
    "smoke": ((16,), (2, 4)),
}
_PAPER = (
    "data.length=2048", "data.rows=256", "vocab_size=32768", "data.sources.text.path=hub:HuggingFaceFW/fineweb-edu",
    "model.num_attention_heads=8", "micro_rows=4", "precision=bfloat16", "checkpointing=loop", "optimizer.lr=1.0e-3",
    "schedule.warmup_steps=500",
)  # fmt: skip
_OVERRIDES: dict[Scale, tuple[str, ...]] = {
    "paper": _PAPER,
    "cpu": (),
    "smoke": ("data.rows=2", "data.length=32", "data.sources.text.held_out_rows=8", "log_every=1"),
}
_fitted = cache(fit_law)  # verdicts and figures ask for the same
_PAPER_DEPTH = 5  # times the shapes' layers: 20x1, 10x2, 5x4


@dataclass(frozen=True, kw_only=True)
class ScalingStudy(Study):
    """Shapes by widths by tokens, one seed each; laws are fitted to all of them together."""

    name: ClassVar[str] = "scaling"
    title: ClassVar[str] = "Scaling with parameters, tokens and loops"
    claim: ClassVar[str] = (
        "L = E + A (N_once + r^phi N_rec)^-alpha + B D^-beta at one depth has phi = 0.46: a loop is worth something, "
        "but less than as many layers of their own (Iso-depth scaling, arXiv 2604.21106; 116 runs); the loss read at "
        "every loop follows a power law too (Ouro, arXiv 2510.25741)."
    )
    setting: ClassVar[str] = (
        "k layers looped r times (kxr) at depth 4, and 1x1, at widths 48 to 128 on about 1, 2 and 4 epochs of Python's "
        "manual; Stage I (every loop answers), one learning rate, one seed. Losses are in nats a token on held-out "
        "text; the total loss is that of the last loop. N_rec are the core's parameters, N_once those of the head; "
        "the embedding, which computes nothing, is left out. Coefficients count parameters and tokens in hundred "
        "thousands; intervals hold 95 % of 200 bootstraps over runs. Repeated epochs count as tokens."
    )

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """The grid, of one seed."""
        widths, steps = _GRID[scale]
        return {
            f"{shape}, width {width}, {count} steps": [_job(scale, sizes, width, count)]
            for shape, sizes in SHAPES.items()
            for width in widths
            for count in steps
        }

    def rows(self, results: Results) -> Results:
        """A row for every shape and width, with the loss after each number of tokens."""
        rows: dict[str, list[Outcome]] = {}
        for cell, (outcome,) in results.items():
            rows.setdefault(cell.rpartition(", ")[0], []).append(outcome)
        return {
            row: [
                Outcome(
                    values={f"loss at {_millions(o)}": o.values["loss"] for o in found},
                    facts={name: found[0].facts[name] for name in ("parameters", "loops")},
                )
            ]
            for row, found in rows.items()
        }

    def verdicts(self, results: Results) -> list[Verdict]:
        """The exponent, the loops at equal parameters, and the law per loop."""
        phi, any_depth, per_loop = self._fits(results)
        low, high = phi.interval("phi")
        words, value = f"phi = {_said(phi, 'phi')}", phi.values["phi"]
        gains = _gains(results, "1x1", "1x4")
        falls = [outcome.values["loss at loop 1"] - outcome.values["loss"] for outcome in _of(results, "1x4")]
        gamma = per_loop.interval("gamma")
        return [
            Verdict(claim=f"a loop is worth parameters: {words} lies above 0", holds=low > 0, effect=value,
                    unit="phi", seeds=1),
            Verdict(claim=f"but fewer than layers of their own: {words} lies below 1", holds=high < 1, effect=value - 1,
                    unit="phi above 1", seeds=1),
            Verdict(claim=f"the interval {words} holds the paper's 0.46", holds=low <= 0.46 <= high,
                    effect=value - 0.46, unit="phi above the paper's", seeds=1),
            Verdict(claim=f"with 1x1 among the runs phi = {_said(any_depth, 'phi')} lies above 0, too",
                    holds=any_depth.interval("phi")[0] > 0, effect=any_depth.values["phi"], unit="phi", seeds=1),
            Verdict(claim="1x4 reaches a lower loss than 1x1 of equal parameters at every width and budget",
                    holds=min(gains) > 0, effect=-float(np.mean(gains)), unit="nats", seeds=1),
            Verdict(claim=f"the last loop of 1x4 reads better than its first at every width and budget; gamma = "
                          f"{_said(per_loop, 'gamma')}", holds=min(falls) > 0 and gamma[0] > 0,
                    effect=-float(np.mean(falls)), unit="nats", seeds=1),
        ]  # fmt: skip

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Loss by parameters, by what loops make of them, by tokens, and by loop."""
        phi, _, per_loop = self._fits(results)
        longest = max(outcome.facts["tokens"] for (outcome,) in results.values())
        last = {cell: found for cell, found in results.items() if found[0].facts["tokens"] == longest}
        return {
            "parameters": (
                curves(
                    {shape: [_line(last, shape, 0.0)] for shape in SHAPES}, "thousand parameters of head and core",
                    "held-out loss",
                ),
                "Held-out loss after the most tokens by parameters, one line a shape.",
            ),
            "effective": (
                curves(
                    {shape: [_line(last, shape, phi.values["phi"])] for shape in SHAPES},
                    "thousand effective parameters", "held-out loss",
                ),
                "The same by N_once + r^phi N_rec, fitted to the runs of depth 4: "
                f"{_equation(phi)}, phi = {_said(phi, 'phi')}.",
            ),
            "loops": (
                curves(
                    {cell.split(", ")[1]: [found[0].series["loops"]] for cell, found in last.items() if "1x4" in cell},
                    "loop read", "held-out loss",
                ),
                "Held-out loss of 1x4 after the most tokens by the loop read. The law per loop, "
                f"E + A N^-alpha + B D^-beta + C t^-gamma: {_equation(per_loop)}.",
            ),
        }  # fmt: skip

    def _fits(self, results: Results) -> tuple[Fit, Fit, Fit]:
        """The law of total loss on runs of one depth and on all, and the law per loop on looped runs."""
        totals = [_measured(outcome, run) for run, (outcome,) in enumerate(results.values())]
        one_depth = [point for point, cell in zip(totals, results, strict=True) if cell.split(",")[0] in ISO]
        by_loop = [
            _measured(outcome, run, loop)
            for run, (outcome,) in enumerate(results.values())
            for loop in range(1, 1 + len(outcome.series["loops"]))
            if len(outcome.series["loops"]) > 1
        ]
        return (
            _fitted(ISO_DEPTH, tuple(one_depth)),
            _fitted(ISO_DEPTH, tuple(totals)),
            _fitted(PER_LOOP, tuple(by_loop)),
        )


def measure(run: Run) -> Outcome:
    """Held-out loss at every trained loop, and what the laws are fitted against."""
    held_out = [record for record in run.log if "text/loss_loop1" in record][-1]
    config = run.model.config
    losses = [held_out[f"text/loss_loop{loop}"] for loop in range(1, config.loops + 1)]
    data, steps = run.recipe.data, run.recipe.steps
    assert steps is not None
    return Outcome(
        values={"loss": losses[-1], **{f"loss at loop {loop}": loss for loop, loss in enumerate(losses, start=1)}},
        series={"loops": [(float(loop), loss) for loop, loss in enumerate(losses, start=1)]},
        facts={
            "once": sum(parameter.numel() for parameter in run.model.lm_head.parameters()),
            "recurrent": sum(parameter.numel() for parameter in run.model.model.core.parameters()),
            "tokens": steps * data.rows * data.length,
        },
    )


def _job(scale: Scale, sizes: tuple[int, int], width: int, steps: int) -> Job:
    layers, loops = sizes
    inner = _INNER.get(width, 128 * round(width / 48))  # about 8/3 of the width
    overrides = (
        *_OVERRIDES[scale], f"model.hidden_size={width}", f"model.intermediate_size={inner}",
        f"model.core_layers={layers * (_PAPER_DEPTH if scale == 'paper' else 1)}", f"loops={loops}", f"steps={steps}",
    )  # fmt: skip
    return Trained(stages=(Stage(recipe="scaling", overrides=overrides),), measure=measure)


def _measured(outcome: Outcome, run: int, loop: int | None = None) -> Measured:
    """The loss of a run at its last loop, or read at `loop`."""
    facts = outcome.facts
    loss = outcome.values["loss" if loop is None else f"loss at loop {loop}"]
    loops = float(round(facts["loops"])) if loop is None else float(loop)
    return Measured(
        loss=loss, once=facts["once"], recurrent=facts["recurrent"], loops=loops, tokens=facts["tokens"], run=run
    )


def _of(results: Results, shape: str) -> list[Outcome]:
    return [found[0] for cell, found in results.items() if cell.split(",")[0] == shape]


def _gains(results: Results, shape: str, other: str) -> list[float]:
    """By how much `other` lies below `shape`, at every width and budget."""
    pairs = zip(_of(results, shape), _of(results, other), strict=True)
    return [theirs.values["loss"] - ours.values["loss"] for theirs, ours in pairs]


def _line(results: Results, shape: str, phi: float) -> Points:
    """Loss by effective parameters in thousands."""
    points = [_measured(outcome, 0) for outcome in _of(results, shape)]
    columns = (np.array([getattr(point, name) for point in points]) for name in ("once", "recurrent", "loops"))
    return list(
        zip((effective_parameters(*columns, phi) / 1e3).tolist(), (point.loss for point in points), strict=True)
    )


def _said(fit: Fit, name: str) -> str:
    low, high = fit.interval(name)
    return f"{fit.values[name]:.2f} [{low:.2f}, {high:.2f}]"


def _equation(fit: Fit) -> str:
    named: Sequence[str] = [f"{name} {value:.3g}" for name, value in fit.values.items() if name != "phi"]
    return f"{', '.join(named)}; error {100 * fit.error:.1f} %"


def _millions(outcome: Outcome) -> str:
    return f"{outcome.facts['tokens'] / 1e6:.2g}M tokens"
