"""Study: reachability in graphs, by a layer set by hand and by trained ones: how far t may lie, against loops."""

import statistics
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from matplotlib.figure import Figure

from looplm.analysis.plots import curves
from looplm.studies.answers import answered_at
from looplm.studies.path_doubling_check import DoublingCheck
from looplm.studies.study import Job, Outcome, Points, Results, Scale, Study, Verdict, above
from looplm.studies.trained import Run, Stage, Trained
from looplm.tasks import Example, Reachability
from looplm.training.data_recipe import TaskSource
from looplm.training.recipe import load_recipe

_SHAPES = {"1x1": (1, 1), "1x2": (1, 2), "1x4": (1, 4), "1x8": (1, 8), "4x1": (4, 1)}
_RECIPE: dict[Scale, str] = {"paper": "reachability_paper", "cpu": "reachability", "smoke": "reachability"}
_FARTHEST = "data.sources.reachability.task.farthest"
_NEAR: dict[Scale, tuple[str, ...]] = {  # near pairs first
    "paper": (f"{_FARTHEST}=2", "steps=10000"), "cpu": (f"{_FARTHEST}=2", "steps=2000"), "smoke": (f"{_FARTHEST}=2",),
}  # fmt: skip
_SMOKE = ("steps=4", "data.rows=2", "log_every=2", "data.sources.reachability.held_out_questions=16")
_BY_HAND = {
    "by hand, n = 3, all graphs": DoublingCheck(nodes=3),
    "by hand, n = 4, all graphs": DoublingCheck(nodes=4, distinct=True),
    "by hand, n = 8, random": DoublingCheck(nodes=8, stored=40, contexts=100),
    "by hand, n = 16, random": DoublingCheck(nodes=16, stored=40, contexts=50),
    "by hand, n = 32, random": DoublingCheck(nodes=32, stored=20, contexts=50),
}
_BY_HAND_SMOKE = {
    "by hand, n = 3, all graphs": DoublingCheck(nodes=3, distinct=True),
    "by hand, n = 8, random": DoublingCheck(nodes=8, stored=2, contexts=10),
}
_DEGREES = "degrees alone"
_QUESTIONS, _TEST_SEED = 512, 2 * 10**9  # for each distance; seeds past those of training and its held-out rows


@dataclass(frozen=True, kw_only=True)
class ReachabilityStudy(Study):
    """Theorem 1 as weights, and one layer looped T times (1xT) against 4 x 1."""

    name: ClassVar[str] = "reachability"
    title: ClassVar[str] = "Reachability: paths doubled by loops"
    claim: ClassVar[str] = (
        "for graphs of up to n nodes there is a one-layer transformer, whatever the graph in its context, that decides "
        "in O(log2 D) loops what is reached in the union of a stored graph and that one (Ouro, arXiv 2510.25741, "
        "Theorem 1: existence, not learnability). Trained models decide farther pairs with more loops."
    )
    setting: ClassVar[str] = (
        "by hand: the layer of `studies/path_doubling.py`, every pair of every graph against networkx, at exactly "
        "max(1, ceil(log2 D)) loops behind one reading layer, or at floor(log2 D) + 1 without it. Trained: causal "
        "models of width 96 on shuffled edges, a token each, of random directed graphs of 12 nodes (task "
        "`reachability`), pairs 1 to 8 edges apart or, by an exchange of two edges' ends, out of reach; 2,000 steps at "
        "up to 2 edges, then 6,000 at all; the loss on the answer at the last loop; accuracy on held-out questions, as "
        "many at every distance; 'distance at 0.75' is how far every accuracy is at least that."
    )
    chance: ClassVar[str] = "guessing gets 0.5"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """By hand, the baseline, and every shape; the slowest shape with one seed."""
        found: dict[str, list[Job]] = {
            cell: [check] for cell, check in (_BY_HAND_SMOKE if scale == "smoke" else _BY_HAND).items()
        }
        overrides = _SMOKE if scale == "smoke" else ()
        source = load_recipe(_RECIPE[scale], overrides).data.sources["reachability"]
        assert isinstance(source, TaskSource)
        assert isinstance(source.task, Reachability)
        found[_DEGREES] = [Degrees(task=source.task, learnt=40 * source.held_out_questions)]
        for shape, (layers, loops) in _SHAPES.items():
            sizes = (f"model.core_layers={layers}", f"loops={loops}")
            stages = tuple(
                Stage(recipe=_RECIPE[scale], overrides=(*sizes, *part, *overrides)) for part in (_NEAR[scale], ())
            )
            found[shape] = [
                Trained(stages=stages, measure=measure, seed=seed) for seed in range(1 if shape == "1x8" else seeds)
            ]
        return found

    def verdicts(self, results: Results) -> list[Verdict]:
        """The theorem, then more loops against fewer, then equal FLOPs."""
        by_hand = [found[0].values for cell, found in results.items() if cell.startswith("by hand")]
        graphs = round(sum(values["graphs"] for values in by_hand))
        late = [values["missed a loop earlier"] for values in by_hand if "missed a loop earlier" in values]
        wrong = sum(count for values in by_hand for name, count in values.items() if name.startswith("wrong"))
        return [
            Verdict(
                claim="by hand, ceil(log2 D) loops behind the reading layer, or floor(log2 D) + 1 without it, decide "
                "every pair of every graph", holds=wrong == 0,
                effect=graphs, unit="graphs", seeds=1,
            ),
            Verdict(
                claim="one loop fewer misses a pair wherever D > 2", holds=min(late) == 1,
                effect=statistics.mean(late), unit="of those graphs", seeds=1,
            ),
            above(results, "accuracy", "1x2", "1x1", "trained, 2 loops above 1", "accuracy"),
            above(results, "accuracy", "1x4", "1x2", "trained, 4 loops above 2", "accuracy"),
            above(results, "distance at 0.75", "1x4", "1x1", "accuracy against distance moves right", "edges"),
            above(results, "accuracy", "1x4", "4x1", "trained, 1x4 above 4x1 at equal FLOPs", "accuracy"),
        ]  # fmt: skip

    def columns(self, results: Results) -> list[str]:
        """Near and far accuracies are the figure's."""
        return [name for name in super().columns(results) if not name.startswith("accuracy, ")]

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Accuracy by distance, by the loops trained and by the loops used."""
        by_distance = {
            cell: [list(outcome.series["distance"]) for outcome in found]
            for cell, found in results.items()
            if "distance" in found[0].series
        }
        used = {
            f"{loop} loops": [list(outcome.series[f"distance, loop {loop}"]) for outcome in results["1x4"]]
            for loop in (1, 2, 3, 4, 6, 8)
        }
        return {
            "distance": (
                curves(by_distance, "edges from s to t", "accuracy"),
                "Accuracy on held-out questions by distance; half of each are out of reach, the distance being that "
                "before the exchange. Bands from the lowest to the highest seed.",
            ),
            "loops": (
                curves(used, "edges from s to t", "accuracy"),
                "The same of the model trained at 4 loops, by the loops used.",
            ),
        }


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The likelier answer by the four degrees of s and t, counted on `learnt` questions of the training split."""

    task: Reachability
    learnt: int

    def steps(self) -> int:
        """Nothing is trained."""
        return 0

    def __call__(self, folder: Path) -> Outcome:
        """Accuracy on the test split."""
        counts: dict[tuple[int, ...], Counter[str]] = {}
        for seed in range(self.learnt):
            example = self.task.example(seed)
            counts.setdefault(self._degrees(example), Counter())[example.answer] += 1
        likelier = {degrees: found.most_common(1)[0][0] for degrees, found in counts.items()}
        asked = questions(self.task, min(_QUESTIONS, self.learnt // 20))
        right = {
            distance: statistics.mean(likelier.get(self._degrees(e), "<no>") == e.answer for e in examples)
            for distance, examples in asked.items()
        }
        return _outcome([(float(distance), float(share)) for distance, share in right.items()])

    def _degrees(self, example: Example) -> tuple[int, ...]:
        edges, start, end = self.task.read(example)
        columns = [[edge[side] for edge in edges] for side in (0, 1)]
        return tuple(column.count(node) for node in (start, end) for column in columns)


def questions(task: Reachability, count: int) -> dict[int, list[Example]]:
    """`count` questions of the test split at each distance, half of them out of reach (to one)."""
    task, seed = replace(task, split="test"), _TEST_SEED
    wanted = {
        (distance, answer): count // 2 for distance in range(1, task.farthest + 1) for answer in ("<yes>", "<no>")
    }
    found: dict[int, list[Example]] = {distance: [] for distance, _ in wanted}
    while any(wanted.values()):
        example = task.example(seed)
        seed += 1
        if wanted[example.difficulty, example.answer]:
            wanted[example.difficulty, example.answer] -= 1
            found[example.difficulty].append(example)
    return found


def measure(run: Run) -> Outcome:
    """Accuracy by distance at the trained loops, and at up to twice as many."""
    source = run.recipe.data.sources["reachability"]
    assert isinstance(source, TaskSource)
    assert isinstance(source.task, Reachability)
    trained = run.model.config.loops
    loops = list(range(1, 2 * trained + 1))
    by_loop: dict[int, Points] = {loop: [] for loop in loops}
    for distance, examples in questions(source.task, min(_QUESTIONS, source.held_out_questions)).items():
        right = answered_at(run.model, run.tokenizer, examples, loops).double().mean(0).tolist()
        for loop, share in zip(loops, right, strict=True):
            by_loop[loop].append((float(distance), share))
    return _outcome(by_loop[trained], by_loop)


def _outcome(points: Points, by_loop: dict[int, Points] | None = None) -> Outcome:
    half = len(points) // 2
    near, far = points[:half], points[half:]
    return Outcome(
        values={
            "accuracy": _mean(points),
            f"accuracy, {near[0][0]:g} to {near[-1][0]:g} edges": _mean(near),
            f"accuracy, {far[0][0]:g} to {far[-1][0]:g} edges": _mean(far),
            "distance at 0.75": _held(points),
        },
        series={"distance": points, **{f"distance, loop {loop}": found for loop, found in (by_loop or {}).items()}},
    )


def _mean(points: Points) -> float:
    return sum(share for _, share in points) / len(points)


def _held(points: Points, level: float = 0.75) -> float:
    """The distance up to which every accuracy is at least `level`, halfway between right and guessed."""
    held = 0.0
    for distance, share in points:
        if share < level:
            break
        held = distance
    return held
