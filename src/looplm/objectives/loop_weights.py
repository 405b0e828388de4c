"""How much each loop of a token's latent trajectory counts in the policy gradient (RLTT, arXiv 2602.10520)."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from looplm.objectives.kinds import ByKind


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """What a rule may look at: the loops as a column [T, 1] of floats, and the loop [N] at which each token left.

    log_pdf: the gate's [T, N], where there is one · logits: the learned ones [T], where there are some.
    """

    loop: Tensor
    exits: Tensor
    log_pdf: Tensor | None = None
    logits: Tensor | None = None

    def weights(self, rule: "LoopWeights") -> Tensor:
        """Weights [T, N] that sum to 1 over the loops which a token did, and are 0 past them."""
        scores = rule.scores(self).expand(len(self.loop), len(self.exits))
        return scores.masked_fill(self.loop > self.exits, -math.inf).softmax(0)


# Every rule gives scores that broadcast to [T, N]; their softmax over a token's loops are its weights.


@dataclass(frozen=True, kw_only=True)
class LastLoopWeight:
    """All weight on the loop that emitted the token: GRPO."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # for recipes

    kind: Literal["last"] = "last"

    def scores(self, seen: Trajectories) -> Tensor:
        """-inf before the exit."""
        return torch.zeros_like(seen.loop).masked_fill(seen.loop < seen.exits, -math.inf)


@dataclass(frozen=True, kw_only=True)
class UniformWeights:
    """1 / e for each of a token's e loops."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kind: Literal["uniform"] = "uniform"

    def scores(self, seen: Trajectories) -> Tensor:
        """All alike."""
        return torch.zeros_like(seen.loop)


@dataclass(frozen=True, kw_only=True)
class ProgressiveWeights:
    """t^gamma over their sum; the paper takes gamma = 1: 0.1, 0.2, 0.3, 0.4."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    kind: Literal["progressive"] = "progressive"
    gamma: float = 1.0

    def scores(self, seen: Trajectories) -> Tensor:
        """gamma log t."""
        return self.gamma * seen.loop.log()


@dataclass(frozen=True, kw_only=True)
class ExitWeights:
    """The gate's own distribution over a token's loops, the paper's choice.

    It is that of the policy which sampled, and no gradient reaches the gate through it. `live` takes today's with its
    gradient, as the published code does, so that the reward also moves the gate towards loops that say what it likes.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kind: Literal["exit"] = "exit"
    live: bool = False

    def scores(self, seen: Trajectories) -> Tensor:
        """log p_t."""
        assert seen.log_pdf is not None
        return seen.log_pdf


@dataclass(frozen=True, kw_only=True)
class LearnedWeights:
    """softmax(logits / temperature), the logits trained at `lr_factor` times the model's rate (published code only).

    start: weights to begin with, uniform or progressive (gamma = 1).
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    kind: Literal["learned"] = "learned"
    start: Literal["uniform", "progressive"] = "uniform"
    temperature: float = 1.0
    lr_factor: float = 10.0

    def __post_init__(self) -> None:
        for name in ("temperature", "lr_factor"):
            if getattr(self, name) <= 0:
                raise ValueError(f"learned loop weights need {name} above 0, got {getattr(self, name)}")

    def first_logits(self, loops: int) -> Tensor:
        """The logits [loops] to begin with."""
        scores = torch.arange(1, loops + 1).log() if self.start == "progressive" else torch.zeros(loops)
        return self.temperature * scores

    def scores(self, seen: Trajectories) -> Tensor:
        """The logits, tempered."""
        assert seen.logits is not None
        return (seen.logits / self.temperature)[:, None]


LoopWeights = Annotated[
    LastLoopWeight | UniformWeights | ProgressiveWeights | ExitWeights | LearnedWeights,
    ByKind(LastLoopWeight, UniformWeights, ProgressiveWeights, ExitWeights, LearnedWeights),
]
