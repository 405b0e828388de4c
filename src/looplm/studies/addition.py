"""Study: four-digit addition with one shared block: where norms stand, random loops, and the Jacobian term."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from matplotlib.figure import Figure

from looplm.analysis.panels import panels, paths
from looplm.analysis.plots import curves
from looplm.studies.addition_measures import TRAINED, measure
from looplm.studies.study import Job, Points, Results, Scale, Study, Verdict, above
from looplm.studies.trained import Stage, Trained

PLACEMENTS = {"Pre": "pre", "Pre-Sandwich": "sandwich_branch", "Post": "post", "Post-Sandwich": "sandwich_dual"}
INTERNAL, EXTERNAL = ("Pre", "Pre-Sandwich"), ("Post", "Post-Sandwich")
NORMS = {"LayerNorm": "layer", "RMSNorm": "rms", "SimpleNorm": "plain"}
STATIC, RANDOM, STARS = "Post-Sandwich, LayerNorm", "Post-Sandwich, random loops", "Post-Sandwich, STARS"
_HEADLINE = (STATIC, "Pre-Sandwich, LayerNorm", RANDOM, STARS)
_FIXED, _NO_TERM = "depth=null", "stability=null"
_SCRATCH = " from scratch"
_SHORT = 0.01  # what a model may lose and still hold its peak

_ACROSS: dict[Scale, tuple[str, ...]] = {
    "paper": (),
    "cpu": (),
    "smoke": (
        "data.rows=2", "log_every=1", "stability.from_step=1", "data.sources.addition.held_out_questions=8",
        "model.hidden_size=16", "model.intermediate_size=16", "model.num_attention_heads=2",
    ),
}  # fmt: skip
_SHORT_RUN: dict[Scale, tuple[str, ...]] = {"paper": (), "cpu": (), "smoke": ("steps=3",)}
# A treatment goes on from a model that adds at 4 loops: from scratch, random loops teach nothing in as many steps.
_FIRST = (_FIXED, _NO_TERM, "micro_rows=null", "steps=800", "schedule={kind: constant, warmup_steps: 300}")
_THEN = ("model=null", "steps=2400", "schedule.warmup_steps=100")
_WIDEST: dict[Scale, int] = {"paper": 40, "cpu": 16, "smoke": 4}  # of the second uniform distribution
_DEEPEST: dict[Scale, tuple[int, int]] = {"paper": (4000, 4000), "cpu": (512, 4000), "smoke": (16, 32)}
_QUESTIONS: dict[Scale, int] = {"paper": 1024, "cpu": 128, "smoke": 8}


@dataclass(frozen=True, kw_only=True)
class AdditionStudy(Study):
    """Norm placements by kinds at fixed loops; prelude and coda; then what random loops, JSRR and L2 terms change."""

    name: ClassVar[str] = "addition"
    title: ClassVar[str] = "Addition: stable loops"
    claim: ClassVar[str] = (
        "where the norms stand decides, not their kind: at 4 fixed loops internal placements (Pre, Pre-Sandwich) add "
        "without error up to about 25 and 15 loops and then diverge, external ones (Post, Post-Sandwich) stay bounded "
        "but are right for 3 to 5 loop counts only; random loop counts alone hold about 85 %, with the Jacobian term "
        "(STARS) 100 % up to 4,000 loops; a weight of 0.15 fails (STARS, arXiv 2605.26733, Figures 2, 3, 5, "
        "Appendix C; width 512, no repeats)."
    )
    setting: ClassVar[str] = (
        "the same block at width 128 without dropout, 64 questions a step; the grid 2,000 steps at 4 loops, each "
        "treatment 800 such steps and then 2,400 of its own (`from scratch`: 2,000). Accuracy on 128 held-out pairs, "
        "whole answers. `fall` is the peak less the worst accuracy from 4 loops on, `holds to` the loops up to which "
        "it stays within a point of a peak above a half, `norm growth` the state norm at 64 loops over that at 4, "
        "`radius` the spectral radius of one loop's Jacobian there, `residual` the next loop's step relative to the "
        "state."
    )
    chance: ClassVar[str] = "guessing gets 0.0001"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """Headline cells with every seed, the others with one; the grid is measured at fewer loops."""
        shallow, deep = _DEEPEST[scale]
        found: dict[str, list[Job]] = {}
        treated = _treatments(scale)
        for cells, deepest, make in ((_grid(), shallow, _alone), (treated, deep, _after_fixed_loops)):
            for cell, overrides in cells.items():
                stages = (_alone if cell.endswith(_SCRATCH) else make)(scale, overrides)
                read = partial(measure, deepest=deep if cell in _HEADLINE else deepest, questions=_QUESTIONS[scale])
                count = seeds if cell in _HEADLINE else 1
                found[cell] = [Trained(stages=stages, measure=read, seed=seed) for seed in range(count)]
        return found

    def verdicts(self, results: Results) -> list[Verdict]:
        """The five findings, then STARS'."""
        return [*_of_placements(results), *_of_treatments(results)]

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Accuracy by loops for every question asked, then the states' size, rest and paths."""
        return {**_of_fixed_loops(results), **_of_training(results), **_of_states(results)}

    def columns(self, results: Results) -> list[str]:
        """The numbers that the verdicts and the text speak of."""
        far = next(name for name in reversed(list(results[STATIC][0].values)) if name.startswith("radius"))
        told = ("at 1", "at 4", "at 16", "at 64", "at the deepest", "peak", "fall", "holds to", "norm growth")
        return [*told, far, far.replace("radius", "residual")]


def _of_fixed_loops(results: Results) -> dict[str, tuple[Figure, str]]:
    grid = {
        place: {norm: _lines(results, f"{place}, {norm}", "accuracy") for norm in NORMS} for place in PLACEMENTS
    }  # fmt: skip
    parts = [f"{place}, {part}" for place in ("Pre-Sandwich", "Post-Sandwich") for part in ("LayerNorm", *_PARTS)]
    return {
        "placements": (
            panels(grid, "loops used", "accuracy", marked=TRAINED),
            "Trained at 4 loops (dashed): accuracy by the loops used, for four placements and three kinds of norm.",
        ),
        "parts": (_accuracy(results, parts), "A prelude or a coda layer at 4 fixed loops: accuracy by the loops used."),
    }


def _of_training(results: Results) -> dict[str, tuple[Figure, str]]:
    external = "Post-Sandwich, "
    drawn = [external + name for name in ("random loops", *_distributions("cpu"))]
    terms = [external + name for name in ("STARS", "STARS 0.15", "STARS 0.2", "L2 0.2", "random loops and L2 0.2")]
    return {
        "stars": (
            _accuracy(results, [STATIC, external + "JSRR only", RANDOM, STARS, *_from_scratch(results)]),
            "Post-Sandwich at 4 fixed loops, with the Jacobian term alone, with random loops alone, and with both: "
            "accuracy by the loops used, in bands from the lowest to the highest seed.",
        ),
        "distributions": (
            _accuracy(results, drawn), "Random loops alone: accuracy by the loops used, by the distribution drawn from."
        ),
        "terms": (
            _accuracy(results, terms),
            "Accuracy by the loops used, by the weight of the Jacobian term and with an L2 term.",
        ),
    }  # fmt: skip


def _of_states(results: Results) -> dict[str, tuple[Figure, str]]:
    cells = {
        **{place: f"{place}, LayerNorm" for place in PLACEMENTS}, "random loops": RANDOM, "STARS": STARS
    }  # fmt: skip
    norms, residuals = (
        {name: _lines(results, cell, series) for name, cell in cells.items()} for series in ("state norm", "residual")
    )
    walked = {name: list(results[cell][0].series["path"]) for name, cell in cells.items()}
    return {
        "norms": (
            curves(norms, "loops used", "state norm", log_x=True, log_y=True),
            "The mean norm of a token's state by the loops used; four placements at 4 fixed loops, and Post-Sandwich "
            "under random loops without and with the Jacobian term.",
        ),
        "residuals": (
            curves(residuals, "loops used", "relative step", log_x=True, log_y=True),
            "How far one loop more moves the state, relative to its norm; the same models.",
        ),
        "paths": (
            paths(walked),
            "One question's state over up to 64 loops (dark to bright, a cross at the last) in its own two principal "
            "directions; the same models, seed 0.",
        ),
    }


_PARTS = {"prelude": "model.prelude_layers=1", "coda": "model.coda_layers=1"}


def _alone(scale: Scale, overrides: tuple[str, ...]) -> tuple[Stage, ...]:
    """A run from scratch."""
    recipe = "stars_addition" if scale == "paper" else "addition"
    return (Stage(recipe=recipe, overrides=(*_ACROSS[scale], *overrides, *_SHORT_RUN[scale])),)


def _after_fixed_loops(scale: Scale, overrides: tuple[str, ...]) -> tuple[Stage, ...]:
    """The paper trains every treatment from scratch; in fewer steps that needs a model that adds already."""
    if scale == "paper":
        return _alone(scale, overrides)
    of_model = tuple(override for override in overrides if override.startswith("model."))
    treatment = tuple(override for override in overrides if override not in of_model)
    return _alone(scale, (*of_model, *_FIRST)) + _alone(scale, (*treatment, *_THEN))


def _grid() -> dict[str, tuple[str, ...]]:
    """Cells at fixed loops without a term: every placement by every kind, then with a prelude or a coda."""
    grid = {
        f"{place}, {norm}": (f"model.norm_placement={PLACEMENTS[place]}", f"model.norm={NORMS[norm]}")
        for place in PLACEMENTS
        for norm in NORMS
    } | {
        f"{place}, {part}": (f"model.norm_placement={PLACEMENTS[place]}", override)
        for place in ("Pre-Sandwich", "Post-Sandwich")
        for part, override in _PARTS.items()
    }
    return {cell: (*overrides, _FIXED, _NO_TERM, "micro_rows=null") for cell, overrides in grid.items()}


def _treatments(scale: Scale) -> dict[str, tuple[str, ...]]:
    """Cells of the Post-Sandwich block (two of them with the Pre-Sandwich) with random loops, terms, or both."""
    inside = "model.norm_placement=sandwich_branch"
    scratch = {RANDOM + _SCRATCH: (_NO_TERM,), STARS + _SCRATCH: ("stability.from_step=600",)}
    return ({} if scale == "paper" else scratch) | {
        "Post-Sandwich, L2 0.2": (_FIXED, _l2(0.2)),
        "Post-Sandwich, JSRR only": (_FIXED,),
        RANDOM: (_NO_TERM,),
        **{f"Post-Sandwich, {name}": (_NO_TERM, depth) for name, depth in _distributions(scale).items()},
        "Post-Sandwich, random loops and L2 0.2": (_l2(0.2),),
        STARS: (),
        "Post-Sandwich, STARS 0.15": ("stability.weight=0.15",),
        "Post-Sandwich, STARS 0.2": ("stability.weight=0.2",),
        "Pre-Sandwich, random loops": (inside, _NO_TERM),
        "Pre-Sandwich, STARS": (inside,),
    }


def _distributions(scale: Scale) -> dict[str, str]:
    """The paper's Table 1 beside the log-normal, drawn as often as the recipe draws."""
    per = "step" if scale == "paper" else "micro_batch"
    return {
        "Poisson 5": f"depth={{kind: poisson, mean: 5, low: 1, high: 30, per: {per}}}",
        "Poisson 10": f"depth={{kind: poisson, mean: 10, low: 1, high: 30, per: {per}}}",
        "uniform to 10": f"depth={{kind: uniform, low: 1, high: 10, per: {per}}}",
        "uniform, wide": f"depth={{kind: uniform, low: 1, high: {_WIDEST[scale]}, per: {per}}}",
    }


def _l2(weight: float) -> str:
    return f"stability={{form: {{kind: adjacent_l2}}, weight: {weight}, mixing: additive}}"


def _of_placements(results: Results) -> list[Verdict]:
    """Findings 1 and 2: what grows, what falls, and whether the kind of norm matters."""
    growth, fall, held = (
        {side: [value for place in places for norm in NORMS for value in _values(results, f"{place}, {norm}", name)]
         for side, places in (("in", INTERNAL), ("out", EXTERNAL))}
        for name in ("norm growth", "fall", "holds to")
    )  # fmt: skip
    areas = {place: [_mean(_values(results, f"{place}, {norm}", "area")) for norm in NORMS] for place in PLACEMENTS}
    kinds = max(max(found) - min(found) for found in areas.values())
    means = [_mean(found) for found in areas.values()]
    places = max(means) - min(means)
    return [
        Verdict(
            claim="states of internal placements grow beyond the trained loops, those of external ones do not",
            holds=min(growth["in"]) > 2 > max(growth["out"]), effect=_mean(growth["in"]) / _mean(growth["out"]),
            unit="times the growth of external ones", seeds=1,
        ),
        Verdict(
            claim="internal placements lose at least half of the answers at some loop count beyond the trained",
            holds=min(fall["in"]) > 0.5, effect=-_mean(fall["in"]), unit="accuracy from the peak to the worst", seeds=1,
        ),
        Verdict(
            claim="external placements hold for fewer loops than internal ones",
            holds=max(held["out"]) < min(held["in"]), effect=_mean(held["out"]) - _mean(held["in"]),
            unit="loops held, external - internal", seeds=1,
        ),
        Verdict(
            claim="the place of the norms matters more than their kind", holds=places > kinds, effect=places - kinds,
            unit="mean accuracy over log loops, spread over places - largest spread over kinds", seeds=1,
        ),
    ]  # fmt: skip


def _of_treatments(results: Results) -> list[Verdict]:
    """Findings 4 and 5, and what the Jacobian term adds."""
    alone, both = _values(results, RANDOM, "fall"), _values(results, STARS, "fall")
    l2, plain = (_mean(_values(results, cell, "area")) for cell in ("Post-Sandwich, L2 0.2", STATIC))
    learned = min(_values(results, STARS, "peak"))
    heavy = [_values(results, f"Post-Sandwich, STARS {weight}", "peak")[0] for weight in ("0.15", "0.2")]
    mixed = _values(results, "Post-Sandwich, random loops and L2 0.2", "area")
    random = _values(results, RANDOM, "area")
    return [
        above(results, "area", RANDOM, STATIC, "random loops hold more loop counts than 4 fixed loops", "accuracy"),
        Verdict(
            claim="random loops alone lose more than a point at some loop count", holds=min(alone) > _SHORT,
            effect=-_mean(alone), unit="accuracy from the peak to the worst", seeds=len(alone),
        ),
        Verdict(
            claim="STARS stays within a point of its peak at every loop count from 4 on",
            holds=max(both) <= _SHORT and learned > 0.9,
            effect=-_mean(both), unit="accuracy from the peak to the worst", seeds=len(both),
        ),
        above(results, "at the deepest", STARS, RANDOM, "at the deepest STARS is above random loops alone", "accuracy"),
        Verdict(
            claim="an L2 term brings little at fixed loops", holds=abs(l2 - plain) < 0.1, effect=l2 - plain,
            unit="accuracy, mean over log loops", seeds=1,
        ),
        Verdict(
            claim="an L2 term hurts under random loops", holds=max(mixed) < min(random),
            effect=_mean(mixed) - _mean(random), unit="accuracy, mean over log loops", seeds=1,
        ),
        Verdict(
            claim="STARS with a weight of 0.15 or 0.2 fails to learn", holds=max(heavy) < 0.5 < learned,
            effect=_mean(heavy),
            unit="peak accuracy", seeds=1,
        ),
    ]  # fmt: skip


def _from_scratch(results: Results) -> list[str]:
    return [cell for cell in results if cell.endswith(_SCRATCH)]


def _accuracy(results: Results, cells: Iterable[str]) -> Figure:
    return curves({cell: _lines(results, cell, "accuracy") for cell in cells}, "loops used", "accuracy", log_x=True)


def _values(results: Results, cell: str, name: str) -> list[float]:
    return [outcome.values[name] for outcome in results[cell]]


def _lines(results: Results, cell: str, series: str) -> list[Points]:
    return [list(outcome.series[series]) for outcome in results[cell]]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
