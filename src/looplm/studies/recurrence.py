"""Study: Huginn's recurrent depth: loops against one application, its two bad runs, and where the loop goes."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from matplotlib.figure import Figure
from torch import Tensor

from looplm.analysis.plots import curves, heat_map, histogram, paths
from looplm.analysis.trajectories import KINDS
from looplm.studies.answers import answered_at
from looplm.studies.loop_dynamics import Look, dynamics
from looplm.studies.study import Job, Outcome, Points, Results, Scale, Study, Verdict, above
from looplm.studies.trained import Run, Stage, Trained
from looplm.training.data_recipe import TaskSource
from looplm.training.evaluate import held_out_losses, losses_by_loop
from looplm.training.mixture import Mixture

LOOPED, FIXED = "looped", "core applied once"
COLLAPSE, IGNORED = "bad run 1: pre-norm, adds", "bad run 2: pre-norm, adapter"
_ONCE = ("loops=1", "depth=null")
_GOES_ON = "nonfinite.patience=2000"  # a bad run is looked at to its end, however many of its steps are not finite
_BAD = {
    COLLAPSE: (
        "model.norm=plain", "model.norm_placement=pre", "model.injection=add", "model.embed_scale=1.0",
        "optimizer.lr=3.0e-2", _GOES_ON,
    ),
    IGNORED: ("model.norm_placement=pre", "optimizer.lr=3.0e-2", _GOES_ON),
}  # fmt: skip
_SMOKE = (
    "steps=6", "log_every=1", "evaluate_every=2", "data.rows=2", "data.length=64", "loops=2", "depth.mean=2",
    "data.sources.text.held_out_rows=4", "data.sources.compose.held_out_questions=8",
)  # fmt: skip
_PAPER = ("data.sources.web.held_out=data/web-held-out",)
_SMOKE_LOOK = Look(rows=2, tokens=16, starts=2, shown=8, prompts=2, completion=4, products=4)
_QUESTIONS, _TEST_SEED = 512, 2 * 10**9
_SAME = 1e-3  # losses this near to one another, relative to the first, are of loops ignored (the monitors' threshold)


@dataclass(frozen=True, kw_only=True)
class RecurrenceStudy(Study):
    """A Huginn-like model looped and applied once, and the two runs that went wrong."""

    name: ClassVar[str] = "recurrence"
    title: ClassVar[str] = "Recurrence against depth, and where the loop goes"
    claim: ClassVar[str] = (
        "with the same data and set-up, a core looped to random depths beats the core applied once, most of all where "
        "reasoning is asked for (Huginn, arXiv 2502.05171, Table 4 at 0.18T tokens: GSM8K flexible 10.24 % at 32 "
        "loops against 2.20 % fixed, ARC-E 53.62 against 46.42), though at one loop it is worse (34.01); of two bad "
        "runs, one lets all token states become one (correlation 1.0), the other ignores the state (equal perplexity "
        "at 1 and 32 loops; Figures 5 and 6); continuous chains of thought save 1 to 2 loops (Figure 10); states end "
        "in fixed points, orbits and sliders, whatever the start (Figures 11 and 12)."
    )
    setting: ClassVar[str] = (
        "1 + 1 + 1 layers of width 96, loops log-normal-Poisson around 8 with gradient through the last 4, 1,500 steps "
        "on Python's manual and 3-to-4-hop questions (`looplm.tasks.Compose`; held-out combinations asked); the bad "
        "runs' rate is 10 times the good one's, as in the paper, one seed each. Losses in nats a token of held-out "
        "text at the trained depth; exits at KL < 5e-4 of at most 32 loops; states followed for 64 loops."
    )
    chance: ClassVar[str] = "guessing an entity gets 1/12 = 0.083"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """The looped model and the one applied once at every seed, each bad run once."""
        if scale == "paper":
            stages = {
                LOOPED: ("huginn", _PAPER), FIXED: ("huginn", (*_PAPER, *_ONCE)),
                COLLAPSE: ("huginn_bad_collapse", _PAPER), IGNORED: ("huginn_bad_ignored", _PAPER),
            }  # fmt: skip
        else:
            small = _SMOKE if scale == "smoke" else ()
            changes = {LOOPED: (), FIXED: _ONCE, **_BAD}
            stages = {cell: ("recurrence", (*small, *change)) for cell, change in changes.items()}
        look = _SMOKE_LOOK if scale == "smoke" else Look()
        measures = {LOOPED: partial(measure_looped, look=look)}
        return {
            cell: [
                Trained(
                    stages=(Stage(recipe=recipe, overrides=overrides),), measure=measures.get(cell, measure), seed=seed
                )
                for seed in range(1 if cell in _BAD else seeds)
            ]
            for cell, (recipe, overrides) in stages.items()
        }

    def columns(self, results: Results) -> list[str]:
        """What every cell has; the loop's dynamics are in the figures and verdicts."""
        names = ("text loss", "text loss, 1 loop", "accuracy", "token correlation", "loops' gain")
        return [name for name in names if name in results[LOOPED][0].values]

    def verdicts(self, results: Results) -> list[Verdict]:
        """Table 4's directions, the two bad runs' signs, and what the loop does."""
        found = [above(results, "text loss", FIXED, LOOPED, "looped has a lower text loss than the core applied once",
                       "nats")]  # fmt: skip
        if "accuracy" in results[LOOPED][0].values:
            claim = "looped answers more held-out multi-hop questions than the core applied once"
            found.append(above(results, "accuracy", LOOPED, FIXED, claim, "accuracy"))
        claim = "at one loop the looped model is worse than the one trained at one"
        found.append(above(results, "text loss, 1 loop", LOOPED, FIXED, claim, "nats"))
        return [*found, *_bad_runs(results), *_loop_verdicts(results)]

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Loss by loops, the bad runs over training, exits, and the states' ways."""
        good = results[LOOPED][0]
        both = {cell: results[cell] for cell in (LOOPED, FIXED)}
        beside = {cell: results[cell] for cell in (LOOPED, COLLAPSE, IGNORED)}
        found = {
            "loops": (
                curves(_series(both, "text loss"), "loops used", "held-out text loss", log_x=True),
                "Loss by the loops used at test time; the looped model was trained around 8.",
            ),
            "training": (
                curves(_series(beside, "training loss"), "training step", "training loss"),
                "Training loss of the good run and the two bad ones (Huginn's Figure 5).",
            ),
            "correlation": (
                curves(_series(beside, "token correlation"), "training step", "token correlation"),
                "Mean cosine of two tokens' states after the last loop; 1 is collapse (Huginn's Figure 5).",
            ),
            "exits": (
                histogram(
                    {name: [outcome.series[f"exits, {name}"] for outcome in results[LOOPED]]
                     for name in ("plain", "continuous")}, "loops until KL < 5e-4", "share of tokens",
                ),
                "Loops of each generated token until its prediction settles, from a random state or (continuous) from "
                "the state the token before it left with; dashed lines are means (Huginn's Figure 10).",
            ),
            "starts": (
                curves({LOOPED: [outcome.series["spread of starts"] for outcome in results[LOOPED]]}, "loops",
                       "spread of 5 starts", log_y=True),
                "Distance between trajectories from different random starts, relative to the states' size.",
            ),
            "convergence": (
                heat_map(_heat(good), _visible(good.facts["shown tokens"]), "loop", "distance to the last state"),
                "How far each token's state is from where it ends, relative to its size (Huginn's Figure 11).",
            ),
            "paths": (
                paths(_paths(good)),
                "The first token of each kind in the plane of its own states (Huginn's Figure 12).",
            ),
        }  # fmt: skip
        return found | {
            f"loss_{name}": (
                curves(_over_training(results[cell]), "training step", "held-out text loss"),
                f"Held-out loss at several loops over training, {cell} (Huginn's Figures 6 and 8).",
            )
            for name, cell in (("good", LOOPED), ("ignored", IGNORED), ("collapse", COLLAPSE))
        }


def measure(run: Run) -> Outcome:
    """Held-out loss and accuracy by loops, and what the log tells of the way there."""
    trained, loops = run.model.config.loops, _loops(run.model.config.loops)
    texts = _texts(run)
    read = partial(losses_by_loop, run.model)
    found = held_out_losses(read, texts, loops[-1], run.model.device)
    losses = {loop: statistics.mean(found[f"{name}/loss_loop{loop}"] for name in texts) for loop in loops}
    steps = [record for record in run.log if "token_correlation" in record]
    tail = steps[-max(1, len(steps) // 10) :]
    answers, by_loop = _answers(run, loops)
    return Outcome(
        values={
            "text loss": losses[trained], "text loss, 1 loop": losses[1], **answers,
            "token correlation": statistics.mean(record["token_correlation"] for record in tail),
            "loops' gain": (losses[1] - losses[trained]) / losses[1],
        },
        series={
            "text loss": [(float(loop), loss) for loop, loss in losses.items()],
            **by_loop,
            "training loss": [(float(record["step"]), record["last_loop_loss"]) for record in steps],
            "token correlation": [(float(record["step"]), record["token_correlation"]) for record in steps],
            **_logged(run, next(iter(texts)), [loop for loop in loops if loop <= 2 * trained]),
        },
    )  # fmt: skip


def measure_looped(run: Run, look: Look) -> Outcome:
    """`measure`, and the dynamics of the loop on held-out text."""
    plain = measure(run)
    text = next(iter(_texts(run).values()))["input_ids"]
    seen = dynamics(run.model, run.tokenizer, text, look)
    return replace(
        plain,
        values={**plain.values, **seen.values},
        series={**plain.series, **seen.series},
        facts={**plain.facts, **seen.facts},
    )


def _texts(run: Run) -> dict[str, dict[str, Tensor]]:
    """The held-out batches of all sources but tasks."""
    sources = run.recipe.data.sources
    held_out = Mixture(run.recipe.data, run.tokenizer, run.recipe.seed).held_out()
    return {name: batch for name, batch in held_out.items() if not isinstance(sources[name], TaskSource)}


def _loops(trained: int) -> list[int]:
    """Powers of two up to four times the trained count."""
    return [2**power for power in range((4 * trained).bit_length())]


def _answers(run: Run, loops: list[int]) -> tuple[dict[str, float], dict[str, Points]]:
    """Accuracy on the task's held-out questions at the trained depth and by loops; nothing without a task."""
    source = next((source for source in run.recipe.data.sources.values() if isinstance(source, TaskSource)), None)
    if source is None:
        return {}, {}
    count = min(_QUESTIONS, 2 * source.held_out_questions)
    test = replace(source.task, split="test")
    examples = [test.example(seed) for seed in range(_TEST_SEED, _TEST_SEED + count)]
    right = answered_at(run.model, run.tokenizer, examples, loops).double().mean(0).tolist()
    points = [(float(loop), value) for loop, value in zip(loops, right, strict=True)]
    return {"accuracy": right[loops.index(run.model.config.loops)]}, {"accuracy": points}


def _logged(run: Run, text: str, loops: list[int]) -> dict[str, Points]:
    """The text's loss at some loops over training."""
    records = [record for record in run.log if f"{text}/loss_loop1" in record]
    return {
        f"loss at loop {loop}": [(float(record["step"]), record[f"{text}/loss_loop{loop}"]) for record in records]
        for loop in loops
    }


def _bad_runs(results: Results) -> list[Verdict]:
    correlations = {cell: [outcome.values["token correlation"] for outcome in results[cell]] for cell in results}
    gains = [abs(outcome.values["loops' gain"]) for outcome in results[IGNORED]]
    return [
        Verdict(
            claim="in bad run 1 all token states become one (correlation above 0.99), in the good one not",
            holds=min(correlations[COLLAPSE]) > 0.99 > max(correlations[LOOPED]),
            effect=statistics.mean(correlations[COLLAPSE]), unit="correlation", seeds=len(correlations[COLLAPSE]),
        ),
        Verdict(
            claim=f"in bad run 2 the loss is the same at one loop and at the trained depth (within {_SAME:.1%})",
            holds=max(gains) < _SAME, effect=statistics.mean(gains), unit="of the loss", seeds=len(gains),
        ),
    ]  # fmt: skip


def _loop_verdicts(results: Results) -> list[Verdict]:
    values = [outcome.values for outcome in results[LOOPED]]
    saved = [value["KL exit, plain"] - value["KL exit, continuous"] for value in values]
    spread = [value["spread of starts"] for value in values]
    kinds = [sum(value[f"{kind} share"] > 0 for kind in KINDS[:3]) for value in values]
    return [
        Verdict(
            claim="a warm start saves loops until KL < 5e-4", holds=min(saved) > 0, effect=statistics.mean(saved),
            unit="loops a token", seeds=len(saved),
        ),
        Verdict(
            claim="trajectories from different starts meet (spread below 0.01 of the states' size)",
            holds=max(spread) < 0.01, effect=statistics.mean(spread), unit="spread left", seeds=len(spread),
        ),
        Verdict(
            claim="fixed points, orbits and sliders all occur", holds=min(kinds) == 3, effect=statistics.mean(kinds),
            unit="kinds of three", seeds=len(kinds),
        ),
    ]  # fmt: skip


def _series(results: Results, name: str) -> dict[str, list[Points]]:
    return {cell: [list(outcome.series[name]) for outcome in found] for cell, found in results.items()}


def _over_training(found: Sequence[Outcome]) -> dict[str, list[Points]]:
    names = [name for name in found[0].series if name.startswith("loss at loop ")]
    return {name.removeprefix("loss at "): [list(outcome.series[name]) for outcome in found] for name in names}


def _heat(outcome: Outcome) -> list[list[float]]:
    return [[y for _, y in points] for name, points in outcome.series.items() if name.startswith("distance, token ")]


def _visible(tokens: Sequence[str]) -> list[str]:
    marks = str.maketrans({" ": "\N{MIDDLE DOT}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"})
    return [token.translate(marks) for token in tokens]


def _paths(outcome: Outcome) -> dict[str, Points]:
    """Each kind with its share, and its path through its plane."""
    axes = {kind: [outcome.series.get(f"path, {kind}, axis {axis}", []) for axis in (1, 2)] for kind in KINDS}
    return {
        f"{kind} ({outcome.values[f'{kind} share']:.1%})": [(x, y) for (_, x), (_, y) in zip(*points, strict=True)]
        for kind, points in axes.items()
        if points[0]
    }
