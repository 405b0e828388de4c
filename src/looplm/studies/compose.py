"""Study: permutation hops: more hops by more loops, held-out combinations, and loops beyond what helps."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from matplotlib.figure import Figure

from looplm.analysis.plots import curves
from looplm.models import LoopLMForCausalLM, load
from looplm.studies.answers import answered_at
from looplm.studies.study import Job, Outcome, Points, Results, Scale, Study, Verdict, above, within
from looplm.studies.trained import Run, Stage, Trained
from looplm.tasks import Compose
from looplm.training.data_recipe import TaskSource
from looplm.training.opening import latest_checkpoint

RANDOM, ROTARY, FIXED = "random loops", "random loops, rotary", "fixed loops"
SHALLOW, DEEP = "1 loop", "1 loop, 4x layers"
_OVERRIDES: dict[str, tuple[str, ...]] = {
    RANDOM: (),
    ROTARY: ("model.rope=split_half", "model.rope_theta=10000.0"),
    FIXED: ("depth=null",),
    SHALLOW: ("depth=null", "loops=1"),
    DEEP: ("depth=null", "loops=1"),
}
_SOURCE = "data.sources.compose"
_SMOKE = ("steps=2", "data.rows=2", "log_every=1", f"{_SOURCE}.held_out_questions=4")
_LAST_STAGE = ("steps=2000", "schedule.decay=0.3")
_QUESTIONS, _TEST_SEED = 512, 2 * 10**9  # of each hop count; seeds past those of training and its held-out rows
_LOOPS = (*range(1, 13), 16, 24, 32, 48, 64)
_NEAR = 0.05  # below the peak
_DRAWN = 8  # lines that a figure can hold


@dataclass(frozen=True, kw_only=True)
class ComposeStudy(Study):
    """Loops drawn at random against fixed ones, and against none at equal parameters and at equal FLOPs."""

    name: ClassVar[str] = "compose"
    title: ClassVar[str] = "Permutation hops: depth by loops"
    claim: ClassVar[str] = (
        "a looped model answers held-out combinations of known facts, and more hops than it was trained on when given "
        "more loops; far more loops than needed are over-thinking and cost accuracy (Loop, Think & Generalize, arXiv "
        "2604.07822; 200 entities, 10 relations, 4 looped layers of width 768, loops ~ Poisson(4) in [2, 8])."
    )
    setting: ClassVar[str] = (
        "20 entities, 4 permutations, one layer of width 96 looped (random: Poisson(4) in [2, 8]; fixed: 4), no "
        "positions as in the paper, or rotary ones; the loss on the answer at the last loop. The curriculum is three "
        "stages of fixed length, hops up to 3, 4 and 5, where the paper waits for 95 %. `held out`: combinations of 3 "
        "to 5 hops that were never trained, `seen`: trained ones, both at 4 loops (1 where nothing loops); `beyond`: "
        "6 hops, more than were trained; `kept to`: the most loops, of up to 64, up to which 5 hops stay within 5 "
        "points of their best."
    )
    chance: ClassVar[str] = "guessing gets 1/20 = 0.05"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """Every kind of model, each through the whole curriculum."""
        return {
            cell: [Trained(stages=_stages(scale, cell, overrides), measure=measure, seed=seed) for seed in range(seeds)]
            for cell, overrides in _OVERRIDES.items()
        }

    def verdicts(self, results: Results) -> list[Verdict]:
        """Loops by hops, hops beyond training, too many loops, and loops against none."""
        beyond = "beyond, twice the loops"
        return [
            _more_hops_more_loops(results),
            *(
                within(results, cell, beyond, "beyond", f"{cell}: 6 hops at 8 loops above 6 hops at 4", "accuracy")
                for cell in (RANDOM, ROTARY)
            ),
            within(
                results, RANDOM, "held out", "held out, 16x the loops", "16 times the loops cost accuracy", "accuracy"
            ),
            above(results, "held out", RANDOM, SHALLOW, "held out: loops above none at equal parameters", "accuracy"),
            above(results, "held out", RANDOM, DEEP, "held out: loops above none at equal FLOPs", "accuracy"),
            above(results, beyond, RANDOM, FIXED, "more hops than trained: random loops above fixed ones", "accuracy"),
        ]

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Accuracy by loops for each number of hops, of every model that loops."""
        return {
            name: (
                curves(dict(list(_by_hops(results[cell]).items())[:_DRAWN]), "loops used", "accuracy", log_x=True),
                f"Accuracy by loops for each number of hops, trained with {cell}; combinations of 3 hops and more are "
                "held out, 6 hops and more were never trained; bands from the lowest to the highest seed.",
            )
            for name, cell in (("random", RANDOM), ("rotary", ROTARY), ("fixed", FIXED))
        }


def measure(run: Run) -> Outcome:
    """Accuracy by hops and loops; of a model that does not loop, at its one."""
    source = run.recipe.data.sources["compose"]
    assert isinstance(source, TaskSource)
    assert isinstance(source.task, Compose)
    task, count = source.task, min(_QUESTIONS, 4 * source.held_out_questions)
    loops = run.model.config.loops
    asked = _LOOPS if loops > 1 else (1,)
    every = max(1, task.max_hops // 4)
    found = {
        hops: _ask(run, run.model, replace(task, split="train" if hops < 3 else "test"), hops, asked, count)
        for hops in range(every, 2 * task.max_hops + 1, every)
    }
    longer = [hops for hops in found if 3 <= hops <= task.max_hops]
    seen = [_ask(run, run.model, task, hops, (loops,), count) for hops in longer]
    values = {
        "held out": statistics.mean(_at(found[hops], loops) for hops in longer),
        "seen": statistics.mean(_at(points, loops) for points in seen),
        "beyond": _at(found[task.max_hops + every], loops),
    }
    if loops > 1:
        values |= {
            "beyond, twice the loops": _at(found[task.max_hops + every], 2 * loops),
            "held out, 16x the loops": statistics.mean(_at(found[hops], 16 * loops) for hops in longer),
            "kept to": kept_to(found[longer[-1]]),
        }
    return Outcome(
        values=values,
        series={f"{hops} hops": points for hops, points in found.items()}
        | {"curriculum": _curriculum(run, task, count)},
    )


def kept_to(points: Points) -> float:
    """The most loops, past the peak of points (loops, accuracy), before accuracy first falls 5 points below it."""
    peak = max(points, key=lambda point: point[1])
    after = itertools.takewhile(lambda point: point[1] >= peak[1] - _NEAR, (p for p in points if p[0] >= peak[0]))
    return max(loops for loops, _ in after)


def fewest_loops(points: Points) -> float:
    """The fewest loops at which half of the questions are answered; infinite where there are none."""
    return next((loops for loops, accuracy in points if accuracy >= 0.5), math.inf)


def _ask(
    run: Run, model: LoopLMForCausalLM, task: Compose, hops: int, loops: Sequence[int], count: int
) -> Points:  # fmt: skip
    """Accuracy after each of `loops` on questions of the task's split."""
    examples = [task.example(seed, hops) for seed in range(_TEST_SEED, _TEST_SEED + count)]
    right = answered_at(model, run.tokenizer, examples, loops).double().mean(0).tolist()
    return [(float(loop), value) for loop, value in zip(loops, right, strict=True)]


def _at(points: Points, loops: int) -> float:
    return dict(points)[float(loops)]


def _curriculum(run: Run, task: Compose, count: int) -> Points:
    """The newest hop count of every stage, and how well it was learnt when the stage ended."""
    loops = (run.model.config.loops,)
    first = task.max_hops - len(run.stages) + 1
    return [
        (float(hops), _ask(run, load(latest_checkpoint(path)).eval(), task, hops, loops, count)[0][1])
        for hops, path in enumerate(run.stages, start=first)
    ]


def _stages(scale: Scale, cell: str, overrides: tuple[str, ...]) -> tuple[Stage, ...]:
    """Every stage adds a hop; the paper's rate falls by a tenth each, to a fifth of where it began."""
    recipe, layers, most = ("compose_paper", 4, 20) if scale == "paper" else ("compose", 1, 5)
    shape = f"model.core_layers={layers * (4 if cell == DEEP else 1)}"
    stages = []
    for hops in range(3, most + 1):
        own = [shape, f"{_SOURCE}.task.max_hops={hops}"]
        if scale == "paper":
            own.append(f"optimizer.lr={max(2e-5, 1e-4 * 0.9 ** (hops - 3)):.3g}")
        elif hops == most:
            own += _LAST_STAGE
        stages.append(Stage(recipe=recipe, overrides=(*overrides, *own, *(_SMOKE if scale == "smoke" else ()))))
    return tuple(stages)


def _by_hops(found: Sequence[Outcome]) -> dict[str, list[Points]]:
    names = [name for name in found[0].series if name.endswith("hops")]
    return {name: [list(outcome.series[name]) for outcome in found] for name in names}


def _more_hops_more_loops(results: Results) -> Verdict:
    """Under random loops, in every seed no hop count is reached with fewer loops than a lower one, the last later."""
    needed = [[fewest_loops(points[0]) for points in _by_hops([outcome]).values()] for outcome in results[RANDOM]]
    reached = [[loops for loops in row if loops < math.inf] for row in needed]
    rises = all(len(row) > 1 and row == sorted(row) and row[-1] > row[0] for row in reached)
    slopes = [(row[-1] - row[0]) / max(1, len(row) - 1) for row in reached if row]
    return Verdict(
        claim="more hops need more loops (to answer half of the questions)", holds=rises,
        effect=statistics.mean(slopes) if slopes else 0.0, unit="loops a hop", seeds=len(needed),
    )  # fmt: skip
