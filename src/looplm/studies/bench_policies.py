"""Benchmark: what each depth policy costs in loss or accuracy, against the engine's tokens a second under it."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from looplm.analysis.plots import against_speed
from looplm.data.tokenizer import encode
from looplm.engine import DepthPolicy, Engine, FixedLoops, SamplingParams
from looplm.engine.calibration import FAMILIES, Family, ReadText
from looplm.models import LoopLMForCausalLM
from looplm.studies.depth_probe import held_out_questions, probe_questions
from looplm.studies.timing import seconds_in_turn
from looplm.tasks import Compose

FIXED = "fixed depth"
_PROMPT = 24  # tokens of a text's prompt

Measure = Literal["loss", "accuracy"]


@dataclass(frozen=True, kw_only=True)
class PoliciesProblem:
    """`requests` completions of `tokens` tokens, at most `rows` at once; `points` thresholds of each policy.

    families: names among `FAMILIES`; empty for all that the model can have.
    """

    requests: int = 16
    tokens: int = 64
    rows: int = 16
    points: int = 4
    families: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("requests", "tokens", "rows", "points"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        unknown = next((name for name in self.families if name not in FAMILIES), None)
        if unknown is not None:
            raise ValueError(f"policy '{unknown}' has no threshold; choose from {', '.join(FAMILIES)}")


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out tokens that a policy is judged by, and what the engine makes to be timed.

    by_loop: what each token costs, or whether it is right, at every loop [N, T] · weights: their shares [N]
    exits: the loop [N] at which each leaves under a policy · prompts: of the timed completions
    replayed: the timed completions do loops drawn from these exits, since the engine's own tokens are of another
        kind; what asking the policy costs is then not in the seconds. Else the policy is asked for every token.
    """

    measure: Measure
    by_loop: Tensor
    weights: Tensor
    exits: Callable[[DepthPolicy], Tensor]
    prompts: Sequence[Sequence[int]]
    replayed: bool

    def outcome(self, policy: DepthPolicy) -> tuple[float, float]:
        """Mean loops, and mean loss or accuracy."""
        exits = self.exits(policy)
        reached = self.by_loop.gather(1, exits[:, None] - 1)[:, 0]
        total = self.weights.sum()
        mean_loops, measured = (float(self.weights @ values.double() / total) for values in (exits, reached))
        return mean_loops, measured


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """One policy at one threshold (of fixed depth: its loops).

    mean_loops, measured: of the held-out tokens; `measured` is the loss in nats a token, or the accuracy
    made_loops: the mean loops of the timed completions' tokens · tokens_per_second: by the median of seconds.
    """

    policy: str
    threshold: float
    mean_loops: float
    measured: float
    made_loops: float
    tokens_per_second: float


def read_text(model: LoopLMForCausalLM, rows: Tensor, requests: int) -> HeldOut:
    """Loss on text [B, S]; what is timed goes on from places all over it, sampled at temperature 1.

    Raises:
        ValueError: if the text is too short for so many prompts.
    """
    stream = rows.flatten().tolist()
    stride = len(stream) // requests
    if stride < _PROMPT:
        raise ValueError(f"the text has {len(stream)} tokens, too few for {requests} prompts of {_PROMPT}; give more")
    text = ReadText(model, rows, model.config.loops)
    tokens = len(text.losses)
    return HeldOut(
        measure="loss", by_loop=text.losses, weights=torch.full((tokens,), 1 / tokens, dtype=torch.float64),
        exits=text.exits, prompts=[stream[place : place + _PROMPT] for place in range(0, stride * requests, stride)],
        replayed=False,
    )  # fmt: skip


def read_questions(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Compose, requests: int
) -> HeldOut:  # fmt: skip
    """Accuracy on a task's held-out questions, every number of hops alike; an answer is one token.

    Raises:
        ValueError: if the tokenizer has not the task's words.
    """
    missing = [word for word in task.words() if word not in tokenizer.get_vocab()]
    if missing:
        raise ValueError(f"the checkpoint's tokenizer has no '{missing[0]}': it has not learned the demo's questions")
    probe = probe_questions(model, tokenizer, task, model.config.loops)
    groups = [
        torch.tensor(encode(tokenizer, [example.prompt + example.answer for example in examples]))
        for examples in held_out_questions(task).values()
    ]
    texts = [ReadText(model, group, model.config.loops, batch=len(group)) for group in groups]

    def exits(policy: DepthPolicy) -> Tensor:
        each = [text.exits(policy).view(len(group), -1)[:, -1] for text, group in zip(texts, groups, strict=True)]
        return torch.cat(each)

    asked = [question[:-1] for group in groups for question in group.tolist()]
    chosen = random.Random(0).choices(asked, k=requests)
    return HeldOut(
        measure="accuracy", by_loop=probe.correct, weights=probe.weights, exits=exits, prompts=chosen, replayed=True
    )


def bench_policies(
    model: LoopLMForCausalLM, held_out: HeldOut, problem: PoliciesProblem, repeats: int
) -> list[PolicyRow]:  # fmt: skip
    """Fixed depths, then every policy at thresholds that spread its mean loops evenly; all timed in turn.

    Raises:
        ValueError: if a policy was asked for that the model cannot have.
    """
    ways = _fixed(model) + _policies(model, held_out, problem)
    speeds = speeds_in_turn([(model, held_out, way.policy) for way in ways], problem, repeats)
    rows = []
    for way, (made_loops, tokens_per_second) in zip(ways, speeds, strict=True):
        mean_loops, measured = held_out.outcome(way.policy)
        rows.append(
            PolicyRow(
                policy=way.name, threshold=way.threshold, mean_loops=mean_loops, measured=measured,
                made_loops=made_loops, tokens_per_second=tokens_per_second,
            )
        )  # fmt: skip
    return rows


def speeds_in_turn(
    ways: Sequence[tuple[LoopLMForCausalLM, HeldOut, DepthPolicy]], problem: PoliciesProblem, repeats: int
) -> list[tuple[float, float]]:  # fmt: skip
    """The mean loops of the tokens made and tokens a second (by the median) of each policy on a model, all in turn."""
    longest = max(len(prompt) for _, held_out, _ in ways for prompt in held_out.prompts) + problem.tokens
    engines = {id(model): Engine(model, max_rows=problem.rows, max_length=longest) for model, _, _ in ways}
    replays = [_replays(held_out, policy, problem.tokens) for _, held_out, policy in ways]
    made: dict[int, list[int]] = {}

    def work(number: int) -> None:
        model, held_out, policy = ways[number]
        made[number] = _complete(engines[id(model)], held_out.prompts, policy, replays[number], problem.tokens)

    seconds = seconds_in_turn({str(number): partial(work, number) for number in range(len(ways))}, repeats)
    return [
        (statistics.mean(made[number]), len(made[number]) / statistics.median(seconds[str(number)]))
        for number in range(len(ways))
    ]


def draw(rows: Sequence[PolicyRow], measure: Measure) -> Figure:
    """Loss or accuracy against tokens a second, a line for each policy, fixed depths as squares."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        value = 100 * row.measured if measure == "accuracy" else row.measured
        lines.setdefault(row.policy, []).append((row.tokens_per_second, value))
    fixed = lines.pop(FIXED)
    label = "accuracy (%)" if measure == "accuracy" else "held-out loss (nats per token)"
    return against_speed(lines, fixed, label)


@dataclass(frozen=True)
class _Way:
    name: str
    threshold: float
    policy: DepthPolicy


def _fixed(model: LoopLMForCausalLM) -> list[_Way]:
    return [_Way(FIXED, loops, FixedLoops(loops)) for loops in range(1, model.config.loops + 1)]


def _policies(model: LoopLMForCausalLM, held_out: HeldOut, problem: PoliciesProblem) -> list[_Way]:
    asked = problem.families or [
        name
        for name, family in FAMILIES.items()
        if model.config.exit_gate or not family.policy(family.earliest).needs_gate
    ]
    ways = []
    for name in asked:
        for threshold in dict.fromkeys(spread(FAMILIES[name], held_out, targets(model.config.loops, problem.points))):
            ways.append(_Way(name, threshold, FAMILIES[name].policy(threshold)))
    return ways


def targets(loops: int, points: int) -> list[float]:
    """Mean loops that lie evenly between 1 and all."""
    return [1 + (loops - 1) * point / (points + 1) for point in range(1, points + 1)]


def spread(family: Family, held_out: HeldOut, wanted: Sequence[float]) -> list[float]:
    """For each of the `wanted` mean loops the earliest threshold that reaches it."""
    mean_loops = cache(lambda policy: held_out.outcome(policy)[0])
    return [family.nearest(lambda policy, target=target: mean_loops(policy) >= target) for target in wanted]


def _replays(held_out: HeldOut, policy: DepthPolicy, tokens: int) -> list[list[int]]:
    """The loops of every token of every completion; none where the policy is asked."""
    if not held_out.replayed:
        return [[] for _ in held_out.prompts]
    choice, weights = random.Random(1), held_out.weights.tolist()
    exits = held_out.exits(policy).tolist()
    return [choice.choices(exits, weights, k=tokens) for _ in held_out.prompts]


def _complete(
    engine: Engine, prompts: Sequence[Sequence[int]], policy: DepthPolicy, replays: Sequence[Sequence[int]], tokens: int
) -> list[int]:  # fmt: skip
    """The loops of all tokens that the engine makes."""
    engine.forget_prefixes()
    for seed, (prompt, replay) in enumerate(zip(prompts, replays, strict=True)):
        params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True)
        engine.submit(prompt, params, depth=policy, replay=replay)
    loops: list[int] = []
    while engine.busy:
        for event in engine.tick():
            if event.completion is not None:
                assert event.completion.error is None, event.completion.error
                loops += event.completion.loops
    return loops
