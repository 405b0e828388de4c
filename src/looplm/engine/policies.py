"""Depth policies: rules that say when a token leaves the loop, each a frozen value with a per-row memory.

A policy sees R tokens that have just done a loop, each at its own depth, and says which leave. Distances are float32.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.models import LoopLMConfig
from looplm.models.exits import exit_loops
from looplm.models.precision import at_least_float32

Decision = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a policy may look at, of R tokens after a loop.

    loop: [R] int64, 1-based · before, after: the states [R, D] around it · gate: its exit logits [R], or None
    read: gives hidden [R, D] and logits [R, V] of the states after it; called only by policies that need them.
    head: the head's weight [V, D] · config, loops: the model's, and how many there are at most.
    """

    loop: Tensor
    before: Tensor
    after: Tensor
    gate: Tensor | None
    read: Callable[[], tuple[Tensor, Tensor]]
    head: Tensor
    config: LoopLMConfig
    loops: int

    @cached_property
    def readings(self) -> tuple[Tensor, Tensor]:
        """`read()`, once."""
        hidden, logits = self.read()
        return at_least_float32(hidden), at_least_float32(logits)

    @cached_property
    def log_probs(self) -> Tensor:
        """[R, V]."""
        return self.readings[1].log_softmax(-1)


@dataclass(frozen=True)
class DepthPolicy:
    """When a token leaves; no token leaves before `min_loops`, or past its request's last loop.

    every: loops between two checks; a policy that compares looks back to the check before (Huginn's interval).
    """

    min_loops: int = field(default=1, kw_only=True)
    every: int = field(default=1, kw_only=True)

    needs_gate: ClassVar[bool] = False
    needs_logits: ClassVar[bool] = False
    notes_start: ClassVar[bool] = False  # whether loop 1 is kept in memory even where the interval skips it

    def __post_init__(self) -> None:
        if self.min_loops < 1 or self.every < 1:
            raise ValueError(f"{self}: min_loops and every must be at least 1")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """How many numbers it keeps for a token between loops; they are zeros before the first."""
        return 0

    def deepest(self, loops: int) -> int:
        """The loops that a token may need where `loops` are to be had."""
        return loops

    def check_model(self, config: LoopLMConfig, loops: int) -> None:
        """Refuse a model that has not what the policy looks at."""
        if self.needs_gate and not config.exit_gate:
            raise ValueError(f"{self} reads the exit gate, which this model has not; choose another depth policy")
        if self.min_loops > loops:
            raise ValueError(f"{self}: min_loops must be at most the engine's loops, {loops}")

    def decide(self, seen: Seen, memory: Tensor) -> Decision:
        """Which tokens leave [R], and the memory [R, M] for the next loop."""
        leave, after = self.check(seen, memory)
        checked = seen.loop % self.every == 0
        noted = checked | (seen.loop == 1) if self.notes_start else checked
        return leave & checked & (seen.loop >= self.min_loops), torch.where(noted[:, None], after, memory)

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """`decide` without interval and floor."""
        raise AssertionError("a policy says what it looks at")


# Depth fixed beforehand, and the gate -------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedLoops(DepthPolicy):
    """Always `loops` loops."""

    loops: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loops < 1:
            raise ValueError(f"{self}: loops must be at least 1")

    def deepest(self, loops: int) -> int:
        """`loops`, prefill included."""
        return self.loops

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """At the loop itself."""
        return seen.loop >= self.loops, memory


@dataclass(frozen=True)
class ExitCDF(DepthPolicy):
    """The first loop whose exit CDF reaches `q` (Ouro, arXiv 2510.25741): q = 0 is `min_loops`, q >= 1 all loops."""

    q: float
    needs_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.q >= 0:
            raise ValueError(f"{self}: q must be between 0 (first loop) and 1 (all loops)")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """The gate logit of every loop."""
        return loops

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """By `exit_loops` itself, on the logits so far; a logit of 0 further on has no say in it."""
        assert seen.gate is not None
        gates = memory.scatter(1, seen.loop[:, None] - 1, seen.gate[:, None].to(memory.dtype))
        ahead = F.pad(gates, (0, 1))  # the last loop's own logit counts here: the engine stops there anyway
        if self.q >= 1:
            return torch.zeros_like(seen.loop, dtype=torch.bool), gates
        unseen = torch.arange(ahead.shape[1], device=ahead.device) >= seen.loop[:, None]
        return exit_loops(ahead.masked_fill(unseen, -math.inf), self.q) <= seen.loop, gates


@dataclass(frozen=True)
class GateAbove(DepthPolicy):
    """sigmoid(gate) >= `threshold` at one loop: how a learned decider is read (RecurTrace, arXiv 2609.03379, floor 2)."""

    threshold: float = 0.5
    min_loops: int = field(default=2, kw_only=True)
    needs_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold < 1:
            raise ValueError(f"{self}: threshold must lie between 0 and 1")

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """On the logit's own scale."""
        assert seen.gate is not None
        return seen.gate >= math.log(self.threshold / (1 - self.threshold)), memory


# The state ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StatePolicy(DepthPolicy):
    """Compares the state with that of the check before, at first with the start state."""

    eps: float
    notes_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0:
            raise ValueError(f"{self}: eps must be above 0")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """The state of the last check."""
        return config.hidden_size

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """`distance` below eps."""
        now = at_least_float32(seen.after)
        last = torch.where((seen.loop == 1)[:, None], at_least_float32(seen.before), memory)
        # With an interval the first loop only notes the start state.
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
    notes_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0 or self.times < 1:
            raise ValueError(f"{self}: eps must be above 0 and times at least 1")

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
        if not self.eps > 0:
            raise ValueError(f"{self}: eps must be above 0")

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

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """Of this loop alone."""
        return -(seen.log_probs.exp() * seen.log_probs).sum(-1) < self.nats, memory


@dataclass(frozen=True)
class Margin(DepthPolicy):
    """The likeliest token leads the next by a probability of `margin` or more (CALM, arXiv 2207.07061)."""

    margin: float
    needs_logits: ClassVar[bool] = True

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """Of this loop alone."""
        best = seen.log_probs.topk(2, dim=-1).values.exp()
        return best[:, 0] - best[:, 1] >= self.margin, memory


@dataclass(frozen=True)
class ArgmaxStable(DepthPolicy):
    """The likeliest token was the same at `times` checks after the one that first gave it (Huginn; there 5)."""

    times: int = 5
    needs_logits: ClassVar[bool] = True

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
        ratio = (new / step)[:, 0]
        rest = torch.where(ratio < 1, new[:, 0] * ratio / (1 - ratio), torch.full_like(ratio, math.inf))
        best = logits.topk(2, dim=-1)
        first, second = (at_least_float32(seen.head[best.indices[:, rank]]) for rank in (0, 1))
        lead = best.values[:, 0] - best.values[:, 1]
        safe = rest * (first - second).norm(dim=-1) < lead
        return safe & (checks[:, 0] >= 2), torch.cat([hidden, new, checks + 1], dim=-1)


# Compositions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookAhead(DepthPolicy):
    """What `policy` says at loop r decides whether loop r + 2 runs (Continuous Depth Batching, arXiv 2608.09444).

    A scheduler that knows a loop ahead never waits for the gate; the price is one loop, so the floor is 2.
    """

    policy: DepthPolicy

    @property
    def needs_gate(self) -> bool:  # ty: ignore[invalid-method-override]
        """As the policy within."""
        return self.policy.needs_gate

    @property
    def needs_logits(self) -> bool:  # ty: ignore[invalid-method-override]
        """As the policy within."""
        return self.policy.needs_logits

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """What was said a loop ago, and the policy's own."""
        return 1 + self.policy.memory(config, loops)

    def deepest(self, loops: int) -> int:
        """One loop more than the policy's."""
        return min(loops, self.policy.deepest(loops) + 1)

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """What was said a loop ago."""
        said, own = memory[:, :1], memory[:, 1:]
        leave, own = self.policy.decide(seen, own)
        ever = torch.maximum(said, leave[:, None].to(said.dtype))
        return said[:, 0] > 0, torch.cat([ever, own], dim=-1)


@dataclass(frozen=True, init=False)
class AnyOf(DepthPolicy):
    """As soon as one of several policies says so."""

    policies: tuple[DepthPolicy, ...]

    def __init__(self, *policies: DepthPolicy, min_loops: int = 1, every: int = 1) -> None:
        if not policies:
            raise ValueError("AnyOf needs one policy or more")
        for name, value in (("policies", policies), ("min_loops", min_loops), ("every", every)):
            object.__setattr__(self, name, value)
        self.__post_init__()

    @property
    def needs_gate(self) -> bool:  # ty: ignore[invalid-method-override]
        """Whether one of them does."""
        return any(policy.needs_gate for policy in self.policies)

    @property
    def needs_logits(self) -> bool:  # ty: ignore[invalid-method-override]
        """Whether one of them does."""
        return any(policy.needs_logits for policy in self.policies)

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """All of theirs; how wide each is, is known from the model."""
        return sum(policy.memory(config, loops) for policy in self.policies)

    def deepest(self, loops: int) -> int:
        """The shallowest of theirs: none goes on past it."""
        return min(policy.deepest(loops) for policy in self.policies)

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """Each policy on its own part of the memory."""
        sizes = [policy.memory(seen.config, seen.loops) for policy in self.policies]
        parts = zip(self.policies, memory.split(sizes, dim=-1), strict=True)
        votes, after = zip(*(policy.decide(seen, part) for policy, part in parts), strict=True)
        return torch.stack(votes).any(0), torch.cat(after, dim=-1)


def first_exits(policy: DepthPolicy, steps: Iterable[Seen], last: Tensor) -> Tensor:
    """The loop [R] at which each token of `steps`, one loop after the other from the first, leaves; at most `last` [R]."""
    exits = torch.zeros_like(last)
    memory = None
    for seen in steps:
        if memory is None:
            memory = seen.after.new_zeros(len(last), policy.memory(seen.config, seen.loops), dtype=torch.float32)
        leave, memory = policy.decide(seen, memory)
        exits = torch.where((exits == 0) & (leave | (seen.loop >= last)), seen.loop, exits)
    return exits
