"""Study: what decides when a token leaves the loop: Ouro's Figure 5 with more signals, against loops and time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from looplm.analysis.exit_curve import oracle_exits
from looplm.analysis.plots import against_speed
from looplm.engine import DepthPolicy, FixedLoops, SecondDifference
from looplm.engine.calibration import FAMILIES, Family
from looplm.models import LoopLMForCausalLM, load
from looplm.studies.bench_policies import (
    FIXED,
    HeldOut,
    PoliciesProblem,
    read_questions,
    read_text,
    speeds_in_turn,
    spread,
    targets,
)
from looplm.studies.depth_probe import held_out_questions
from looplm.studies.study import Job, Outcome, Points, Results, Scale, Study, Verdict, within
from looplm.studies.trained import Run, Stage, Trained
from looplm.tasks import Compose
from looplm.training.data_recipe import TaskSource
from looplm.training.mixture import Mixture
from looplm.training.opening import latest_checkpoint

# The stage whose gate is read (any, where none is), and the policies that differ in one threshold.
POLICIES: dict[str, tuple[int, Family]] = {
    "untrained gate": (1, FAMILIES["exit_cdf"]),
    "Stage II gate": (2, FAMILIES["exit_cdf"]),
    "look-ahead gate": (3, FAMILIES["exit_cdf"]),
    "oracle decider": (4, replace(FAMILIES["gate_above"], floor=1)),
    "hidden difference": (1, FAMILIES["step_below"]),
    "second difference": (
        1, Family(make=partial(SecondDifference, times=1), threshold="eps", earliest=10.0, latest=1e-6),
    ),
    "margin": (1, FAMILIES["margin"]),
}  # fmt: skip
CELL = "the demo's model"
_ORACLE = json.dumps({"kind": "oracle_decider", "floor": 1})
_GATES = (("objective.label=paper",), ("objective.label=lookahead",), (f"objective={_ORACLE}",))
_PAPER_DATA = (
    "data.length=4096", "data.rows=1024", "data.sources.text.path=hub:HuggingFaceFW/fineweb-edu",
    "data.sources.compose.task.entities=200", "micro_rows=4", "precision=bfloat16",
)  # fmt: skip
_PAPER_MODEL = (
    "steps=5000", "vocab_size=49152", "model.hidden_size=2048", "model.intermediate_size=5632",
    "model.num_attention_heads=16", "model.core_layers=11", "model.max_position_embeddings=4096",
    "checkpointing=loop", "optimizer.lr=3.0e-4",
)  # fmt: skip
_SMOKE = (
    "steps=2", "log_every=1", "data.rows=4", "data.sources.text.held_out_rows=4",
    "data.sources.compose.task.entities=5",
)  # fmt: skip
_SMALL = PoliciesProblem(requests=2, tokens=2, rows=2, points=1)
_PROBLEM = PoliciesProblem(requests=16, tokens=32, rows=16, points=5)
_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class ExitStudy(Study):
    """One model, three gates trained on top of it, and signals that need no gate."""

    name: ClassVar[str] = "exit"
    title: ClassVar[str] = "When to leave the loop"
    claim: ClassVar[str] = (
        "a gate trained in Stage II gives more accuracy for the same mean loops than the gate that pretraining leaves, "
        "than a threshold on the state's change, and than fixed depth (Ouro, arXiv 2510.25741, Figure 5; MMLU, 1.4B: "
        "at 2.5 loops 66 against 64, about 60 at 2 fixed loops and 66 at 3; in the plot the three lie within 1 point)."
    )
    setting: ClassVar[str] = (
        "the demo's model (width 96, one layer looped 4 times) on questions of 1 to 4 hops, and on text. Each gate "
        "continues the same Stage I for 300 steps, the model frozen: Stage II with the paper's label, with the "
        "look-ahead label, and a decider distilled from an oracle (RecurTrace, floor 1). Thresholds are chosen on half "
        "of the held-out questions (text rows) for 1.5 to 3.5 mean loops, and all that is shown is of the other half. "
        "A policy's column: points of accuracy over fixed depths at the same mean loops, fixed depths joined by "
        "straight lines, the mean over thresholds; `text`: nats under them. `oracle`: leaving at the first loop from "
        "which the answer is right and stays right, `ever`: at the first at which it is right."
    )
    chance: ClassVar[str] = "guessing an answer gets 1/12 = 0.083"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """One model a seed, read by every policy."""
        problem = _SMALL if scale == "smoke" else _PROBLEM
        return {
            CELL: [
                Trained(stages=_stages(scale), measure=partial(measure, problem=problem), seed=seed)
                for seed in range(seeds)
            ]
        }

    def columns(self, results: Results) -> list[str]:
        """The questions' values, but for the fixed depths' own, which are 0."""
        return [name for name in super().columns(results) if not name.startswith((FIXED, "text"))]

    def verdicts(self, results: Results) -> list[Verdict]:
        """The paper's order, then that of the other signals."""
        order = [
            ("Stage II gate", FIXED, "the Stage II gate above fixed depth"),
            ("Stage II gate", "untrained gate", "the Stage II gate above the untrained gate"),
            ("Stage II gate", "hidden difference", "the Stage II gate above the hidden difference"),
            ("look-ahead gate", "Stage II gate", "the look-ahead label above the paper's label"),
            ("oracle decider", "look-ahead gate", "the oracle-distilled decider above the look-ahead label"),
        ]
        return [
            within(results, CELL, f"{kind}{high}", f"{kind}{low}", f"{label}: {claim}", unit)
            for kind, label, unit in (("", "questions", "points"), ("text: ", "text", "nats"))
            for high, low, claim in order
        ]

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Accuracy and loss, against mean loops and against the time measured."""
        found = {}
        for kind, label in (("questions", "accuracy (%)"), ("text", "loss (nats per token)")):
            for axis, xlabel in (("loops", "mean loops"), ("speed", "tokens per second, all loops = 1")):
                lines = _lines(results[CELL], kind, axis)
                fixed = lines.pop(FIXED)
                found[f"{kind}_{axis}"] = (
                    against_speed(lines, fixed, label, xlabel), f"{_CAPTIONS[kind]}, against {xlabel}. {_MEANS}",
                )  # fmt: skip
        return found


_CAPTIONS = {
    "questions": "Accuracy on the test half of the held-out questions",
    "text": "Loss on the test half of the held-out text",
}
_MEANS = (
    "Points are means over seeds of both coordinates; thresholds come from the validation half; squares are fixed "
    "depths. What asking a policy costs is in the seconds of text, not in those of questions."
)


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What a policy reached on the test half, at a threshold that was to give `target` mean loops."""

    target: float
    loops: float
    measured: float
    speed: float


def measure(run: Run, problem: PoliciesProblem) -> Outcome:
    """Every policy on questions and on text, with the seconds of the engine's completions under it."""
    models = [load(latest_checkpoint(path)).eval() for path in run.stages]
    values: dict[str, float] = {}
    series: dict[str, Points] = {}
    for kind, read, sign in (("questions", _questions, 100.0), ("text", _text, -1.0)):
        halves = [read(run, model, problem) for model in models]
        found = _reach(models, halves, problem)
        fixed = found[FIXED]
        prefix = "" if kind == "questions" else "text: "
        for name, points in found.items():
            values[f"{prefix}{name}"] = sign * float(np.mean([over_fixed(point, fixed) for point in points]))
            for quantity in ("loops", "measured", "speed"):
                series[f"{kind}, {name}, {quantity}"] = [(point.target, getattr(point, quantity)) for point in points]
        if kind == "questions":
            values |= _oracles(halves[0][1])
    return Outcome(values=values, series=series)


def over_fixed(point: Reached, fixed: Sequence[Reached]) -> float:
    """How far a point lies above the straight lines between the fixed depths."""
    line = np.interp(point.loops, [one.loops for one in fixed], [one.measured for one in fixed])
    return point.measured - float(line)


def halves_of(held_out: HeldOut, groups: Sequence[int]) -> tuple[HeldOut, HeldOut]:
    """Validation and test: each a random half of every group of held-out tokens, which lie in order of their groups."""
    generator = torch.Generator().manual_seed(0)
    first, mine, others = 0, [], []
    for size in groups:
        shuffled = first + torch.randperm(size, generator=generator)
        mine.append(shuffled[: size // 2])
        others.append(shuffled[size // 2 :])
        first += size
    return _part(held_out, mine), _part(held_out, others)


def _part(held_out: HeldOut, groups: Sequence[Tensor]) -> HeldOut:
    """Some of the tokens, every group with the same weight."""
    chosen = torch.cat(list(groups))
    weights = torch.cat([torch.full((len(group),), 1 / (len(group) * len(groups))) for group in groups]).double()
    return replace(
        held_out, by_loop=held_out.by_loop[chosen], weights=weights,
        exits=lambda policy: held_out.exits(policy)[chosen],
    )  # fmt: skip


def _questions(run: Run, model: LoopLMForCausalLM, problem: PoliciesProblem) -> tuple[HeldOut, HeldOut]:
    source = run.recipe.data.sources["compose"]
    assert isinstance(source, TaskSource)
    assert isinstance(source.task, Compose)
    sizes = [len(examples) for examples in held_out_questions(source.task).values()]
    return halves_of(read_questions(model, run.tokenizer, source.task, problem.requests), sizes)


def _text(run: Run, model: LoopLMForCausalLM, problem: PoliciesProblem) -> tuple[HeldOut, HeldOut]:
    rows = Mixture(run.recipe.data, run.tokenizer, run.recipe.seed).held_out()["text"]["input_ids"]
    validation, test = rows[::2], rows[1::2]
    return read_text(model, validation, problem.requests), read_text(model, test, problem.requests)


def _reach(
    models: Sequence[LoopLMForCausalLM], halves: Sequence[tuple[HeldOut, HeldOut]], problem: PoliciesProblem
) -> dict[str, list[Reached]]:  # fmt: skip
    """Fixed depths and all policies on the test halves; speed is relative to all loops, timed in turn with them."""
    loops = models[0].config.loops
    wanted = targets(loops, problem.points)
    ways: list[tuple[str, float, int, DepthPolicy]] = [
        (FIXED, float(count), 0, FixedLoops(count)) for count in range(1, loops + 1)
    ]
    for name, (stage, family) in POLICIES.items():
        thresholds = spread(family, halves[stage - 1][0], wanted)
        ways += [
            (name, target, stage - 1, family.policy(threshold))
            for target, threshold in zip(wanted, thresholds, strict=True)
        ]
    speeds = speeds_in_turn([(models[at], halves[at][1], policy) for _, _, at, policy in ways], problem, _REPEATS)
    all_loops = speeds[loops - 1][1]
    found: dict[str, list[Reached]] = {}
    for (name, target, at, policy), (_, speed) in zip(ways, speeds, strict=True):
        mean_loops, measured = halves[at][1].outcome(policy)
        point = Reached(target=target, loops=mean_loops, measured=measured, speed=speed / all_loops)
        found.setdefault(name, []).append(point)
    return found


def _oracles(test: HeldOut) -> dict[str, float]:
    """What one who knows the answers would reach."""
    found = {}
    for name, stays in (("oracle", True), ("oracle, ever", False)):
        exits = oracle_exits(test.by_loop, stays)
        right = test.by_loop.gather(1, exits[:, None] - 1)[:, 0].double()
        found |= {
            f"{name}: loops": float(test.weights @ exits.double()), f"{name}: accuracy": float(test.weights @ right)
        }  # fmt: skip
    return found


def _stages(scale: Scale) -> tuple[Stage, ...]:
    data = {"paper": _PAPER_DATA, "cpu": (), "smoke": _SMOKE}[scale]
    model = _PAPER_MODEL if scale == "paper" else ()
    return (
        Stage(recipe="mini_stage1", overrides=(*data, *model)),
        *(Stage(recipe="mini_stage2", overrides=(*data, *gate), after=1) for gate in _GATES),
    )


def _lines(found: Sequence[Outcome], kind: str, axis: str) -> dict[str, Points]:
    """Each policy's points (loops or speed, accuracy in % or loss), means over seeds."""
    scale = 100 if kind == "questions" else 1

    def mean(name: str, quantity: str) -> list[float]:
        series = [[y for _, y in outcome.series[f"{kind}, {name}, {quantity}"]] for outcome in found]
        return [float(np.mean(ys)) for ys in zip(*series, strict=True)]

    names = (FIXED, *POLICIES)
    lines = {
        name: [(x, scale * y) for x, y in zip(mean(name, axis), mean(name, "measured"), strict=True)] for name in names
    }
    if (kind, axis) == ("questions", "loops"):
        loops, accuracy = (
            float(np.mean([o.values[f"oracle: {part}"] for o in found])) for part in ("loops", "accuracy")
        )
        lines["oracle"] = [(loops, scale * accuracy)]
    return lines
