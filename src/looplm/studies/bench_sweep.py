"""Benchmark: log-likelihoods at several loop counts from one forward, against a run for each."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from looplm.evals.depths import fixed_depths
from looplm.evals.scoring import Likelihood, Pair, likelihoods
from looplm.models import LoopLMForCausalLM
from looplm.studies.step_problem import StepProblem
from looplm.studies.timing import seconds_in_turn


@dataclass(frozen=True, kw_only=True)
class SweepProblem(StepProblem):
    """Pairs of `length` tokens of which the last `continuation` are scored, at every loop count up to `loops`."""

    width: int = 256
    layers: int = 2
    loops: int = 8
    vocab: int = 4096
    length: int = 96
    rows: int = 64
    continuation: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.continuation < self.length:
            raise ValueError(f"--continuation {self.continuation} must be at least 1 and below --length {self.length}")

    def pairs(self) -> list[Pair]:
        """As many random ones as there are rows."""
        tokens = torch.randint(self.vocab, (self.rows, self.length), generator=torch.Generator().manual_seed(0))
        cut = self.length - self.continuation
        return [Pair(context=tuple(row[:cut]), continuation=tuple(row[cut:])) for row in tokens.tolist()]


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One way: median seconds, how many times faster than a run for each loop count, and its largest difference."""

    way: str
    seconds: float
    speedup: float
    nats_apart: float


def bench_sweep(problem: SweepProblem, repeats: int, batch_size: int = 16) -> list[SweepRow]:
    """Both ways in turn on the same pairs."""
    model, pairs = problem.model().eval(), problem.pairs()
    depths = range(1, problem.loops + 1)
    ways: dict[str, Callable[[], list[list[Likelihood]]]] = {
        "a run for each": partial(_apart, model, pairs, depths, batch_size),
        "one forward": partial(_together, model, pairs, depths, batch_size),
    }
    seconds = {name: statistics.median(times) for name, times in seconds_in_turn(ways, repeats).items()}
    first, *_ = told = [way() for way in ways.values()]
    return [
        SweepRow(
            way=name, seconds=seconds[name], speedup=seconds["a run for each"] / seconds[name],
            nats_apart=_apart_by(first, found),
        )
        for name, found in zip(ways, told, strict=True)
    ]  # fmt: skip


def _apart(
    model: LoopLMForCausalLM, pairs: Sequence[Pair], depths: Sequence[int], batch_size: int
) -> list[list[Likelihood]]:  # fmt: skip
    runs = [likelihoods(model, pairs, fixed_depths([loops]), batch_size, model.config.max_position_embeddings)
            for loops in depths]  # fmt: skip
    return [[one for (one,) in row] for row in zip(*runs, strict=True)]


def _together(
    model: LoopLMForCausalLM, pairs: Sequence[Pair], depths: Sequence[int], batch_size: int
) -> list[list[Likelihood]]:  # fmt: skip
    return likelihoods(model, pairs, fixed_depths(depths), batch_size, model.config.max_position_embeddings)


def _apart_by(first: list[list[Likelihood]], other: list[list[Likelihood]]) -> float:
    return max(abs(a.logprob - b.logprob) for some, others in zip(first, other, strict=True)
               for a, b in zip(some, others, strict=True))  # fmt: skip
