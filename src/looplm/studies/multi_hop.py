"""Study: three-hop questions: how many unique pairs a model must see, by its loops."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import ClassVar

from matplotlib.figure import Figure

from looplm.analysis.plots import curves
from looplm.models import LoopLMForCausalLM
from looplm.studies.answers import answered_at
from looplm.studies.study import Job, Outcome, Points, Results, Scale, Study, Verdict, above
from looplm.studies.trained import Run, Stage, Trained, checkpoints
from looplm.tasks import Example, MultiHop
from looplm.training.data_recipe import TaskSource

SHAPES = {"2x1": (2, 1), "2x2": (2, 2), "2x4": (2, 4), "8x1": (8, 1)}
FRACTIONS = (0.1, 0.25, 0.5)
_PAPER_SHAPES = {"6x1": (6, 1), "6x2": (6, 2), "6x4": (6, 4), "24x1": (24, 1)}
_PAPER_FRACTIONS = (0.0125, 0.05, 0.075, 0.0875, 0.1, 0.125)  # 20,000 to 200,000 of 1.6 million
_SEEDED = {"paper": 0.075, "cpu": 0.25, "smoke": 0.25}  # the fraction of all seeds; the others take one
_SMOKE = ("steps=4", "save_every=2", "log_every=2", "data.rows=2", "data.sources.multi_hop.held_out_questions=16")
_SOLVED = 0.99


@dataclass(frozen=True, kw_only=True)
class MultiHopStudy(Study):
    """k layers looped T times (kxT) at several shares of all pairs."""

    name: ClassVar[str] = "multihop"
    title: ClassVar[str] = "Three hops: unique pairs needed"
    claim: ClassVar[str] = (
        "with more loops fewer unique pairs are needed and fewer steps (Ouro, arXiv 2510.25741, Appendix B.3; 500 "
        "names, 20 relations, width 1024: 100 % at about 140,000 pairs for 6x4, 160,000 for 6x2, 86 % at 200,000 for "
        "6x1; 6x4 beats 24x1 at 120,000, 6x2 is below it at 100,000; mean of 4 seeds)."
    )
    setting: ClassVar[str] = (
        "50 entities in five layers of 10, 10 relations, 400 facts, 20,000 three-hop questions, of which 10, 25 or "
        "50 % are trained on together with all facts (a quarter of the documents) and 500 others tested; width 64, the "
        "loss on the answer at the last loop, equal steps."
    )
    chance: ClassVar[str] = "guessing within the right layer gets 0.1"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """Every shape at every fraction, one of these at all seeds."""
        shapes, fractions = (_PAPER_SHAPES, _PAPER_FRACTIONS) if scale == "paper" else (SHAPES, FRACTIONS)
        if scale == "smoke":
            shapes, fractions, seeds = {"2x1": (2, 1), "2x4": (2, 4)}, (0.25,), 1
        found: dict[str, list[Job]] = {}
        for fraction in fractions:
            own_seeds = seeds if fraction == _SEEDED[scale] else 1
            for shape in shapes:
                found[_cell(shape, fraction)] = [
                    _job(scale, shapes[shape], fraction, seed) for seed in range(own_seeds)
                ]
        return found

    def verdicts(self, results: Results) -> list[Verdict]:
        """More loops against fewer and against layers at the fraction of all seeds; then the pairs needed."""
        base, *looped, deep = _shapes(results) if len(_shapes(results)) > 2 else (*_shapes(results), "")
        seeded = max(_fractions(results), key=lambda fraction: len(results[_cell(base, fraction)]))
        pairs = [(more, less, "equal parameters") for less, more in zip((base, *looped), looped, strict=False)]
        if deep:
            pairs.append((looped[-1], deep, "equal FLOPs"))
        found = [
            above(
                results, "accuracy", _cell(high, seeded), _cell(low, seeded),
                f"{high} above {low} at {seeded:.4g} of all pairs, {equal}", "accuracy",
            )
            for high, low, equal in pairs
        ]  # fmt: skip
        return [*found, _fewer_pairs(results, looped[-1], base)]

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Accuracy by unique pairs, and by steps at the fraction of all seeds."""
        shapes, fractions = _shapes(results), _fractions(results)
        seeded = max(fractions, key=lambda fraction: len(results[_cell(shapes[0], fraction)]))
        by_step = {shape: results[_cell(shape, seeded)] for shape in shapes}
        return {
            "pairs": (
                curves({shape: _by_pairs(results, shape) for shape in shapes}, "unique pairs", "accuracy"),
                "Accuracy on held-out three-hop questions by the unique pairs trained on, after equal steps.",
            ),
            "steps": (
                curves(
                    {shape: [list(outcome.series["steps"]) for outcome in found] for shape, found in by_step.items()},
                    "training step", "accuracy",
                ),
                f"Accuracy on held-out three-hop questions over training at {seeded:.4g} of all pairs; bands from the "
                "lowest to the highest seed.",
            ),
        }  # fmt: skip


def measure(run: Run) -> Outcome:
    """Accuracy on held-out questions at every checkpoint; at the end on trained ones and facts, too."""
    source = run.recipe.data.sources["multi_hop"]
    assert isinstance(source, TaskSource)
    task = source.task
    assert isinstance(task, MultiHop)
    test = replace(task, split="test")
    held_out = [test.example(number) for number in range(min(task.held_out, source.held_out_questions))]
    drawn = [task.example(seed) for seed in range(4 * len(held_out))]
    trained = [example for example in drawn if example.difficulty == task.hops]
    facts = [example for example in drawn if example.difficulty == 1]
    steps: Points = [(float(step), _accuracy(run, held_out, model)) for step, model in checkpoints(run)]
    return Outcome(
        values={
            "accuracy": steps[-1][1],
            "trained pairs": _accuracy(run, trained, run.model),
            "facts": _accuracy(run, facts, run.model),
        },
        series={"steps": steps},
        facts={"unique pairs": task.trained},
    )


def _accuracy(run: Run, examples: Sequence[Example], model: LoopLMForCausalLM) -> float:
    loops = model.config.loops
    return float(answered_at(model, run.tokenizer, examples, [loops]).double().mean())


def _job(scale: Scale, sizes: tuple[int, int], fraction: float, seed: int) -> Job:
    layers, loops = sizes
    overrides = (
        f"model.core_layers={layers}", f"loops={loops}", f"data.sources.multi_hop.task.fraction={fraction}",
        *(_SMOKE if scale == "smoke" else ()),
    )  # fmt: skip
    recipe = "multi_hop_paper" if scale == "paper" else "multi_hop"
    return Trained(stages=(Stage(recipe=recipe, overrides=overrides),), measure=measure, seed=seed)


def _fewer_pairs(results: Results, looped: str, base: str) -> Verdict:
    """Of how many fractions more are solved with loops than without."""
    solved = {shape: _solved(results, shape) for shape in (looped, base)}
    least = {shape: f"{min(pairs):,} pairs" if pairs else "no fraction here" for shape, pairs in solved.items()}
    return Verdict(
        claim=f"99 % needs fewer unique pairs for {looped} ({least[looped]}) than for {base} ({least[base]})",
        holds=bool(solved[looped]) and (not solved[base] or min(solved[looped]) < min(solved[base])),
        effect=len(solved[looped]) - len(solved[base]), unit=f"of {len(_fractions(results))} fractions solved",
        seeds=1,
    )  # fmt: skip


def _solved(results: Results, shape: str) -> list[int]:
    """The unique pairs with which a shape's mean accuracy reaches 99 %."""
    cells = [results[_cell(shape, fraction)] for fraction in _fractions(results)]
    return [
        found[0].facts["unique pairs"]
        for found in cells
        if sum(outcome.values["accuracy"] for outcome in found) >= _SOLVED * len(found)
    ]


def _by_pairs(results: Results, shape: str) -> list[Points]:
    """One line a seed; a fraction with one seed stands in all of them."""
    cells = [results[_cell(shape, fraction)] for fraction in _fractions(results)]
    most = max(map(len, cells))
    columns = [
        [(float(outcome.facts["unique pairs"]), outcome.values["accuracy"]) for outcome in islice(cycle(found), most)]
        for found in cells
    ]
    return [list(line) for line in zip(*columns, strict=True)]


def _cell(shape: str, fraction: float) -> str:
    return f"{shape}, {100 * fraction:.4g} %"


def _shapes(results: Results) -> list[str]:
    known = dict.fromkeys((*SHAPES, *_PAPER_SHAPES))
    return [shape for shape in known if any(_cell(shape, fraction) in results for fraction in _fractions(results))]


def _fractions(results: Results) -> list[float]:
    known = sorted({*FRACTIONS, *_PAPER_FRACTIONS})
    shapes = (*SHAPES, *_PAPER_SHAPES)
    return [fraction for fraction in known if any(_cell(shape, fraction) in results for shape in shapes)]
