"""Benchmark: training steps of ours, of a hand-written looped model, and of an unlooped one of equal FLOPs."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from looplm.analysis.allocations import peak_bytes
from looplm.models import LoopLMConfig, LoopLMForCausalLM
from looplm.models.accounting import flops_per_token
from looplm.objectives import ExpectedLoss
from looplm.studies.plain_model import PlainLoopedModel
from looplm.studies.timing import seconds_in_turn
from looplm.training.depth import Depth
from looplm.training.module import ObjectiveModule


@dataclass(frozen=True, kw_only=True)
class TrainProblem:
    """Sizes of the benchmark: `layers` shared layers looped `loops` times on `rows` rows of `length` tokens."""

    width: int = 512
    layers: int = 2
    loops: int = 4
    vocab: int = 8192
    rows: int = 4
    length: int = 256
    head_dim: int = 64

    @property
    def inner(self) -> int:
        """The MLP's width."""
        return 8 * self.width // 3 // 8 * 8

    def config(self, layers: int, loops: int) -> LoopLMConfig:
        """The model of so many layers and loops at these sizes."""
        return LoopLMConfig(
            vocab_size=self.vocab, hidden_size=self.width, intermediate_size=self.inner, core_layers=layers,
            loops=loops, num_attention_heads=self.width // self.head_dim, rope_theta=1e4,
            max_position_embeddings=self.length,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One model's training step: median seconds, tokens and FLOPs a second, and peak bytes that a step allocated."""

    model: str
    layers: int
    loops: int
    parameters: int
    step_gflops: float
    seconds: float
    tokens_per_second: float
    gflops_per_second: float
    peak_bytes: int


def bench_train(problem: TrainProblem, repeats: int) -> list[TrainRow]:
    """Steps of all models in turn (forward, backward, AdamW), on the same ids; the first round warms up."""
    ids = torch.randint(problem.vocab, (problem.rows, problem.length), generator=torch.Generator().manual_seed(0))
    models = _models(problem)
    steps = {name: _step(module, loss, ids) for name, (module, loss, _, _) in models.items()}
    seconds = seconds_in_turn(steps, repeats)
    return [
        _row(problem, name, module, layers, loops, statistics.median(seconds[name]), peak_bytes(steps[name]))
        for name, (module, _, layers, loops) in models.items()
    ]


Loss = Callable[[Any, Tensor], Tensor]


def _models(problem: TrainProblem) -> dict[str, tuple[nn.Module, Loss, int, int]]:
    layers, loops = problem.layers, problem.loops
    deep = unlooped_layers(problem)
    torch.manual_seed(0)
    ours = ObjectiveModule(LoopLMForCausalLM(problem.config(layers, loops)).train(), ExpectedLoss())
    sizes = (problem.vocab, problem.width, problem.inner, problem.width // problem.head_dim)
    return {
        "looplm": (ours, _our_loss, layers, loops),
        "plain looped": (PlainLoopedModel(*sizes, layers, loops), _plain_loss, layers, loops),
        "unlooped": (PlainLoopedModel(*sizes, deep, 1), _plain_loss, deep, 1),
    }


def _our_loss(module: ObjectiveModule, ids: Tensor) -> Tensor:
    loops = module.model.config.loops
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    weights = torch.full(ids.shape, 1.0 / (ids.shape[0] * (ids.shape[1] - 1)))
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "weights": weights}
    return module([(Depth(loops=loops, grad_loops=loops), batch)], 0)[0]


def _plain_loss(module: PlainLoopedModel, ids: Tensor) -> Tensor:
    return module(ids)


def _step(module: nn.Module, loss: Loss, ids: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(module, ids).backward()
        optimizer.step()

    return step


def unlooped_layers(problem: TrainProblem) -> int:
    """How many layers give an unlooped model's step nearly the looped one's FLOPs (which reads out at every loop)."""
    wanted = step_flops(problem, problem.layers, problem.loops)
    most = 4 * problem.layers * problem.loops + 4
    return min(range(1, most), key=lambda layers: abs(step_flops(problem, layers, 1) - wanted))


def step_flops(problem: TrainProblem, layers: int, loops: int) -> int:
    """FLOPs of forward and backward of a step, a pass with gradient counted as three forward ones."""
    forward = flops_per_token(problem.config(layers, loops), context_length=problem.length // 2)
    forward += (loops - 1) * 2 * problem.width * problem.vocab  # every loop is read out
    return 3 * forward * problem.rows * problem.length


def _row(
    problem: TrainProblem, name: str, module: nn.Module, layers: int, loops: int, seconds: float, peak: int
) -> TrainRow:
    tokens = problem.rows * problem.length
    flops = step_flops(problem, layers, loops)
    return TrainRow(
        model=name, layers=layers, loops=loops, parameters=sum(p.numel() for p in module.parameters()),
        step_gflops=flops / 1e9, seconds=seconds, tokens_per_second=tokens / seconds,
        gflops_per_second=flops / seconds / 1e9, peak_bytes=peak,
    )  # fmt: skip
