"""Study: Mano, arithmetic on trees: loops against layers at equal parameters and at equal FLOPs."""

from dataclasses import dataclass
from typing import ClassVar

from matplotlib.figure import Figure

from looplm.analysis.plots import curves
from looplm.studies.answers import answered_at
from looplm.studies.study import Job, Outcome, Results, Scale, Study, Verdict, above
from looplm.studies.trained import Run, Stage, Trained
from looplm.tasks import Mano
from looplm.training.data_recipe import TaskSource

SHAPES = {"1x1": (1, 1), "1x4": (1, 4), "4x1": (4, 1)}
_PAPER_SHAPES = {
    "2x1": (2, 1), "3x1": (3, 1), "6x1": (6, 1), "12x1": (12, 1), "2x6": (2, 6), "3x4": (3, 4), "6x2": (6, 2),
}  # fmt: skip
_PAPER_STEPS = {10: 80_000, 16: 110_000, 24: 200_000}
_SMOKE = ("steps=4", "data.rows=2", "log_every=2", "data.sources.mano.held_out_questions=16")
_QUESTIONS, _TEST_SEED = 1024, 2 * 10**9  # of each length; seeds past those of training and its held-out rows


@dataclass(frozen=True, kw_only=True)
class ManoStudy(Study):
    """k layers looped T times (kxT), against k x 1 and against kT x 1."""

    name: ClassVar[str] = "mano"
    title: ClassVar[str] = "Mano: arithmetic on trees"
    claim: ClassVar[str] = (
        "at equal parameters loops win by far, at equal FLOPs often (Ouro, arXiv 2510.25741, Appendix B.2; F_23, "
        "expressions of up to 24 operations, width 1024: 2x1 7.5 %, 2x6 78.0 %, 12x1 34.8 %; but 6x2 loses to 12x1 at "
        "10 and 16 operations; the best of 3 seeds and 4 rates)."
    )
    setting: ClassVar[str] = (
        "F_7, expressions of up to 3 operations, width 96, the loss on the answer at the last loop; accuracy on "
        "held-out expressions, `accuracy` on the longest."
    )
    chance: ClassVar[str] = "guessing gets 1/7 = 0.143, the commonest answer (0) 0.24"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """Every shape; at the paper's scale every shape at every length."""
        if scale == "paper":
            return {
                f"{shape}, length {length}": [_job("mano_paper", sizes, seed, _length(length)) for seed in range(seeds)]
                for length in _PAPER_STEPS
                for shape, sizes in _PAPER_SHAPES.items()
            }
        overrides = _SMOKE if scale == "smoke" else ()
        return {
            shape: [_job("mano", sizes, seed, overrides) for seed in range(seeds)] for shape, sizes in SHAPES.items()
        }

    def verdicts(self, results: Results) -> list[Verdict]:
        """Equal parameters, then equal FLOPs."""
        pairs = [("1x4", "1x1", "4x1")] if "1x4" in results else _paper_pairs(results)
        found = []
        for looped, shallow, deep in pairs:
            found += [
                above(
                    results, "accuracy", looped, shallow, f"{looped} above {shallow} at equal parameters", "accuracy"
                ),
                above(results, "accuracy", looped, deep, f"{looped} above {deep} at equal FLOPs", "accuracy"),
            ]
        return found

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Accuracy by length, and by the loops used."""
        by_loops = {cell: found for cell, found in results.items() if len(found[0].series["loops"]) > 2}
        return {
            "length": (
                curves(_series(results, "length"), "operations", "accuracy"),
                "Accuracy on held-out expressions by their length; bands from the lowest to the highest seed.",
            ),
            "loops": (
                curves(_series(by_loops, "loops"), "loops used", "accuracy"),
                "Accuracy on the longest expressions by the loops used; 1x4 was trained at 4.",
            ),
        }


def measure(run: Run) -> Outcome:
    """Accuracy by length at the trained loops; on the longest expressions at up to twice as many, too."""
    source = run.recipe.data.sources["mano"]
    assert isinstance(source, TaskSource)
    assert isinstance(source.task, Mano)
    trained = run.model.config.loops
    count = min(_QUESTIONS, 4 * source.held_out_questions)
    by_length, by_loop = [], []
    for length in range(1, source.task.length + 1):
        # The test split asks its longest; a task of that length gives the shorter ones. One operation has few.
        task = Mano(modulus=source.task.modulus, length=length, held_out=source.task.held_out, split="test")
        longest = length == source.task.length
        loops = range(1, 2 * trained + 1) if longest else [trained]
        examples = [task.example(seed) for seed in range(_TEST_SEED, _TEST_SEED + count)]
        right = answered_at(run.model, run.tokenizer, examples, list(loops)).double().mean(0).tolist()
        by_length.append((float(length), right[trained - 1] if longest else right[0]))
        if longest:
            by_loop = [(float(loop), value) for loop, value in zip(loops, right, strict=True)]
    return Outcome(
        values={
            "accuracy": by_length[-1][1],
            "accuracy, all lengths": sum(value for _, value in by_length) / len(by_length),
        },
        series={"length": by_length, "loops": by_loop},
    )


def _job(recipe: str, sizes: tuple[int, int], seed: int, overrides: tuple[str, ...]) -> Job:
    layers, loops = sizes
    shape = (f"model.core_layers={layers}", f"loops={loops}")
    return Trained(stages=(Stage(recipe=recipe, overrides=(*shape, *overrides)),), measure=measure, seed=seed)


def _length(length: int) -> tuple[str, ...]:
    return (f"data.sources.mano.task.length={length}", f"steps={_PAPER_STEPS[length]}")


def _paper_pairs(results: Results) -> list[tuple[str, str, str]]:
    lengths = sorted({cell.split(", ")[1] for cell in results})
    return [
        (f"{layers}x{12 // layers}, {length}", f"{layers}x1, {length}", f"12x1, {length}")
        for length in lengths
        for layers in (2, 3, 6)
    ]


def _series(results: Results, name: str) -> dict[str, list[list[tuple[float, float]]]]:
    return {cell: [list(outcome.series[name]) for outcome in found] for cell, found in results.items()}
