"""Benchmark: a training step of RLTT, which reads every loop, beside GRPO's, which reads the last, in one run."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from looplm.analysis.allocations import peak_bytes
from looplm.objectives import PolicyGradient
from looplm.objectives.loop_weights import ExitWeights, LastLoopWeight, LoopWeights, UniformWeights
from looplm.rl.module import PolicyModule
from looplm.studies.step_problem import StepProblem
from looplm.studies.timing import seconds_in_turn

WEIGHTS: dict[str, LoopWeights] = {
    "GRPO": LastLoopWeight(), "RLTT, uniform": UniformWeights(), "RLTT, exit distribution": ExitWeights()
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RLProblem(StepProblem):
    """Sizes of the benchmark; a row is a completion with its prompt."""

    width: int = 512
    layers: int = 8
    loops: int = 4
    vocab: int = 4096
    length: int = 128
    rows: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 4:
            raise ValueError(f"--length {self.length} leaves no room for prompt and completion; take 4 or more")

    def batch(self) -> dict[str, Tensor]:
        """Random completions: a quarter of every row is its prompt."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, self.length)
        ids = torch.randint(self.vocab, shape, generator=generator)
        labels = ids.clone()
        labels[:, : self.length // 4] = -100
        advantages = torch.randn(self.rows, 1, generator=generator).expand(shape)
        return {
            "input_ids": ids, "attention_mask": torch.ones(shape, dtype=torch.long), "labels": labels,
            "weights": torch.full(shape, 1 / ids.numel()), "advantages": advantages,
            "exits": torch.full(shape, self.loops), "sampled": torch.full(shape, -8.0),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RLRow:
    """One weighting's step: median seconds, and time and peak memory over GRPO's."""

    weights: str
    seconds: float
    time_ratio: float
    memory_ratio: float
    peak_bytes: int


def bench_rl(problem: RLProblem, repeats: int) -> list[RLRow]:
    """Steps (forward, backward, AdamW) under every weighting in turn; the first round warms up.

    The time ratio is the median over rounds of a weighting's seconds over GRPO's in the same round.
    """
    steps = {name: training_step(problem, weights) for name, weights in WEIGHTS.items()}
    seconds = seconds_in_turn(steps, repeats)
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    return [
        RLRow(
            weights=name,
            seconds=statistics.median(seconds[name]),
            time_ratio=statistics.median(a / b for a, b in zip(seconds[name], seconds["GRPO"], strict=True)),
            memory_ratio=peaks[name] / peaks["GRPO"],
            peak_bytes=peaks[name],
        )
        for name in WEIGHTS
    ]


def training_step(problem: RLProblem, weights: LoopWeights) -> Callable[[], None]:
    """One optimiser step, with a model and an optimiser of its own."""
    module = PolicyModule(problem.model(), PolicyGradient(loop_weights=weights, kl=0.0), problem.loops)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    batch = problem.batch()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss, _ = module(batch, problem.loops)
        loss.backward()
        optimizer.step()

    return step
