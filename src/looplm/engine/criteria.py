"""Depth policies that watch a token's state or its prediction settle."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.engine.policies import Decision, DepthPolicy, Seen, is_number, is_positive, is_whole
from looplm.models import LoopLMConfig
from looplm.models.precision import at_least_float32

# The state ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StatePolicy(DepthPolicy):
    """Compares the state with that of the check before, at first with the start state."""

    eps: float
    sees_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_positive(self.eps), "eps must be a number above 0")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """The state of the last check."""
        return config.hidden_size

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """`distance` below eps."""
        now = at_least_float32(seen.after)
        last = torch.where((seen.loop == 1)[:, None], at_least_float32(seen.before), memory)
        # Between two checks only the start state is noted.
        kept = torch.where((seen.loop % self.every == 0)[:, None], now, last)
        return self.distance(now, last) < self.eps, kept

    def distance(self, now: Tensor, last: Tensor) -> Tensor:
        """[R], of two states [R, D]."""
        raise AssertionError("a policy says how it measures")


@dataclass(frozen=True)
class StateConverged(_StatePolicy):
    """||h_t - h_s|| / ||h_t|| < eps for the check s before (Huginn's latent-diff, arXiv 2502.05171; there 0.03)."""

    eps: float = 0.03

    def distance(self, now: Tensor, last: Tensor) -> Tensor:
        """Relative to the newer state."""
        return (now - last).norm(dim=-1) / now.norm(dim=-1)


@dataclass(frozen=True)
class StepBelow(_StatePolicy):
    """||h_t - h_s|| < eps (Ouro's hidden difference, arXiv 2510.25741, figure 5)."""

    def distance(self, now: Tensor, last: Tensor) -> Tensor:
        """Absolute."""
        return (now - last).norm(dim=-1)


@dataclass(frozen=True)
class CosineConverged(_StatePolicy):
    """1 - cos(h_t, h_s) < eps (Huginn; there 1e-3)."""

    eps: float = 1e-3

    def distance(self, now: Tensor, last: Tensor) -> Tensor:
        """Blind to length."""
        return 1 - F.cosine_similarity(now, last, dim=-1)


@dataclass(frozen=True)
class SecondDifference(DepthPolicy):
    """||D_t - D_s|| / ||h_t|| < eps at `times` checks running, with D_t = h_t - h_s (arXiv 2509.23314; there twice)."""

    eps: float
    times: int = 2
    sees_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_positive(self.eps), "eps must be a number above 0")
        self.need(is_whole(self.times), "times must be a whole number of at least 1")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """The last state, the last difference, how often it was small, and how many checks there were."""
        return 2 * config.hidden_size + 2

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """From the second difference on, which needs two checks."""
        width = seen.after.shape[-1]
        now = at_least_float32(seen.after)
        last, difference, small, checks = memory.split([width, width, 1, 1], dim=-1)
        last = torch.where((seen.loop == 1)[:, None], at_least_float32(seen.before), last)
        new = now - last
        near = (new - difference).norm(dim=-1, keepdim=True) / now.norm(dim=-1, keepdim=True) < self.eps
        small = torch.where(near & (checks >= 1), small + 1, torch.zeros_like(small))
        after = torch.cat([now, new, small, checks + 1], dim=-1)
        noted = torch.cat([last, memory[:, width:]], dim=-1)
        checked = (seen.loop % self.every == 0)[:, None]
        return small[:, 0] >= self.times, torch.where(checked, after, noted)


# The prediction -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitsKL(DepthPolicy):
    """KL(p_s || p_t) < eps for the check s before, at first the uniform distribution (Huginn; 5e-4 in its figures)."""

    eps: float = 5e-4
    needs_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_positive(self.eps), "eps must be a number above 0")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """The last log-probabilities."""
        return config.vocab_size

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """In nats."""
        now = self.distribution(seen)
        first = (seen.loop <= self.every)[:, None]
        last = torch.where(first, torch.full_like(now, -math.log(now.shape[-1])), memory)
        return (last.exp() * (last - now)).sum(-1) < self.eps, now

    def distribution(self, seen: Seen) -> Tensor:
        """Log-probabilities [R, V]."""
        return seen.log_probs


@dataclass(frozen=True)
class MinPKL(LogitsKL):
    """`LogitsKL` once every p below `min_p` times the largest is set to 1/V, and all are normed (Huginn's minp-kl)."""

    eps: float = 1e-5
    min_p: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p must be a number from 0 to 1")

    def distribution(self, seen: Seen) -> Tensor:
        """Of the likely tokens."""
        probs = seen.log_probs.exp()
        few = torch.where(probs < self.min_p * probs.amax(-1, keepdim=True), 1 / probs.shape[-1], probs)
        return (few / few.sum(-1, keepdim=True)).log()


@dataclass(frozen=True)
class EntropyDifference(DepthPolicy):
    """|H_t - H_s| < eps for the check s before (Huginn's entropy-diff, with log(p + 1e-10) and H = 100 at first)."""

    eps: float = 1e-3
    needs_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_positive(self.eps), "eps must be a number above 0")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """The last entropy."""
        return 1

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """In nats."""
        probs = seen.log_probs.exp()
        now = -(probs * (probs + 1e-10).log()).sum(-1, keepdim=True)
        last = torch.where((seen.loop <= self.every)[:, None], torch.full_like(now, 100.0), memory)
        return (now - last).abs()[:, 0] < self.eps, now


@dataclass(frozen=True)
class EntropyBelow(DepthPolicy):
    """The prediction's entropy is below `nats`."""

    nats: float
    needs_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_number(self.nats) and 0 <= self.nats < math.inf, "nats must be a number of at least 0")

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """Of this loop alone."""
        return -(seen.log_probs.exp() * seen.log_probs).sum(-1) < self.nats, memory


@dataclass(frozen=True)
class Margin(DepthPolicy):
    """The likeliest token leads the next by a probability of `margin` or more (CALM, arXiv 2207.07061)."""

    margin: float
    needs_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_number(self.margin) and 0 <= self.margin <= 1, "margin must be a number from 0 to 1")

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """Of this loop alone."""
        best = seen.log_probs.topk(2, dim=-1).values.exp()
        return best[:, 0] - best[:, 1] >= self.margin, memory


@dataclass(frozen=True)
class ArgmaxStable(DepthPolicy):
    """The likeliest token was the same at `times` checks after the one that first gave it (Huginn; there 5)."""

    times: int = 5
    needs_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_whole(self.times), "times must be a whole number of at least 1")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """The token plus one, and how often it came again."""
        return 2

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """The count starts anew with another token."""
        token = seen.log_probs.argmax(-1).to(memory.dtype) + 1
        count = torch.where(token == memory[:, 0], memory[:, 1] + 1, torch.zeros_like(token))
        return count >= self.times, torch.stack([token, count], dim=-1)


@dataclass(frozen=True)
class Certificate(DepthPolicy):
    """What is left of the way cannot change the choice (after the exit certificate of arXiv 2608.18222).

    With steps d_t = ||hidden_t - hidden_s|| that shrink by rho = d_t / d_s < 1, the rest of the way is at most
    d_t rho / (1 - rho) long; it is safe if that, times the distance of the two likeliest tokens' head rows, is below
    the lead of their logits.
    """

    needs_logits: ClassVar[bool] = True

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """The last hidden, its step, and how many checks there were."""
        return config.hidden_size + 2

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """From the second step on."""
        hidden, logits = seen.readings
        last, step, checks = memory.split([hidden.shape[-1], 1, 1], dim=-1)
        new = (hidden - last).norm(dim=-1, keepdim=True)
        ratio = torch.where(new == 0, 0.0, new / step)[:, 0]
        rest = torch.where(ratio < 1, new[:, 0] * ratio / (1 - ratio), torch.full_like(ratio, math.inf))
        best = logits.topk(2, dim=-1)
        first, second = (at_least_float32(seen.head[best.indices[:, rank]]) for rank in (0, 1))
        lead = best.values[:, 0] - best.values[:, 1]
        safe = rest * (first - second).norm(dim=-1) < lead
        return safe & (checks[:, 0] >= 2), torch.cat([hidden, new, checks + 1], dim=-1)
