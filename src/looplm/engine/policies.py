"""Depth policies: rules that say when a token leaves the loop, each a frozen value with a per-row memory.

A policy sees R tokens that have just done a loop, each at its own depth, and says which leave.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import ClassVar, TypeGuard

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
    uniform: gives numbers [R] between 0 and 1, each fixed by its request's seed, the token's place and the loop.
    """

    loop: Tensor
    before: Tensor
    after: Tensor
    gate: Tensor | None
    read: Callable[[], tuple[Tensor, Tensor]]
    head: Tensor
    config: LoopLMConfig
    loops: int
    uniform: Callable[[], Tensor] | None = None

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
    leaves_early: ClassVar[bool] = True  # whether any token may leave before its request's last loop
    sees_all: ClassVar[bool] = False  # whether `check` is asked, and its memory kept, between two checks as well

    def __post_init__(self) -> None:
        for name in ("min_loops", "every"):
            self.need(is_whole(getattr(self, name)), f"{name} must be a whole number of at least 1")

    def need(self, good: bool, what: str) -> None:
        """Refuse a setting that is not good."""
        if not good:
            raise ValueError(f"{self}: {what}")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """How many numbers it keeps for a token between loops; they are zeros before the first."""
        return 0

    def deepest(self, loops: int) -> int:
        """The loops that a token may need where `loops` are to be had."""
        return loops

    def next_check(self, loop: int) -> int:
        """The first loop from `loop` on at which a token may leave."""
        return -(-max(loop, self.min_loops) // self.every) * self.every

    def check_model(self, config: LoopLMConfig, loops: int) -> None:
        """Refuse a model that has not what the policy looks at."""
        if self.needs_gate and not config.exit_gate:
            raise ValueError(f"{self} reads the exit gate, which this model has not; choose another depth policy")
        self.need(self.min_loops <= loops, f"min_loops must be at most the engine's loops, {loops}")

    def decide(self, seen: Seen, memory: Tensor) -> Decision:
        """Which tokens leave [R], and the memory [R, M] for the next loop."""
        if self.every == 1:
            leave, after = self.check(seen, memory)
            return leave if self.min_loops == 1 else leave & (seen.loop >= self.min_loops), after
        checked = seen.loop % self.every == 0
        if not (self.sees_all or bool(checked.any())):
            return checked, memory
        leave, after = self.check(seen, memory)
        if not self.sees_all:
            after = torch.where(checked[:, None], after, memory)
        return leave & checked & (seen.loop >= self.min_loops), after

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """`decide` without interval and floor."""
        raise AssertionError("a policy says what it looks at")


# Depth fixed beforehand, and the gate -------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedLoops(DepthPolicy):
    """Always `loops` loops; where `min_loops` or `every` put that off, as many as they ask for."""

    loops: int
    leaves_early: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_whole(self.loops), "loops must be a whole number of at least 1")

    def deepest(self, loops: int) -> int:
        """No more than it does, prefill included."""
        return min(loops, self.next_check(self.loops))

    def check_model(self, config: LoopLMConfig, loops: int) -> None:
        """Refuse more loops than there are."""
        super().check_model(config, loops)
        self.need(self.loops <= loops, f"loops must be at most the engine's loops, {loops}")

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """At the loop itself."""
        return seen.loop >= self.loops, memory


@dataclass(frozen=True)
class ExitCDF(DepthPolicy):
    """The first loop whose exit CDF reaches `q` (Ouro, arXiv 2510.25741): q = 0 is `min_loops`, q >= 1 all loops."""

    q: float
    needs_gate: ClassVar[bool] = True
    sees_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_number(self.q) and self.q >= 0, "q must be a number between 0 (first loop) and 1 (all loops)")

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """The gate logit of every loop."""
        return loops

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """By `exit_loops` itself, on the logits so far; a logit of 0 further on has no say in it."""
        assert seen.gate is not None
        gates = memory.scatter(1, seen.loop[:, None] - 1, seen.gate[:, None].to(memory.dtype))
        if self.q >= 1:
            return torch.zeros_like(seen.loop, dtype=torch.bool), gates
        ahead = F.pad(gates, (0, 1))  # the last loop's own logit counts here: the engine stops there anyway
        unseen = torch.arange(ahead.shape[1], device=ahead.device) >= seen.loop[:, None]
        return exit_loops(ahead.masked_fill(unseen, -math.inf), self.q) <= seen.loop, gates


@dataclass(frozen=True)
class GateAbove(DepthPolicy):
    """sigmoid(gate) >= `threshold` at one loop: a learned decider's reading (RecurTrace, arXiv 2609.03379; floor 2)."""

    threshold: float = 0.5
    min_loops: int = field(default=2, kw_only=True)
    needs_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(is_number(self.threshold) and 0 < self.threshold < 1, "threshold must lie between 0 and 1")

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """On the logit's own scale."""
        assert seen.gate is not None
        return seen.gate >= math.log(self.threshold / (1 - self.threshold)), memory


@dataclass(frozen=True)
class ExitSampled(DepthPolicy):
    """Leave after each loop with the gate's own probability there, so that exits are draws from `exit_pdf`.

    The exit is then an action of the policy, with a log-probability that reinforcement learning can move
    (`PolicyGradient(learn_exits=True)`).
    """

    needs_gate: ClassVar[bool] = True

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """sigmoid(gate) against a number that is the token's own at this loop."""
        assert seen.gate is not None
        assert seen.uniform is not None, "only the engine draws exits"
        return seen.uniform() < seen.gate.double().sigmoid(), memory


# Compositions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookAhead(DepthPolicy):
    """What `policy` says at loop r decides whether loop r + 2 runs (Continuous Depth Batching, arXiv 2608.09444).

    A scheduler that knows a loop ahead never waits for the gate; the price is one loop, so the floor is 2. What was
    said once holds, where `min_loops` or `every` put it off.
    """

    policy: DepthPolicy
    sees_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need(isinstance(self.policy, DepthPolicy), "policy must be a depth policy")

    @property
    def needs_gate(self) -> bool:  # ty: ignore[incompatible-property-override]
        """As the policy within."""
        return self.policy.needs_gate

    @property
    def needs_logits(self) -> bool:  # ty: ignore[incompatible-property-override]
        """As the policy within."""
        return self.policy.needs_logits

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """Whether it was said, and the policy's own."""
        return 1 + self.policy.memory(config, loops)

    def deepest(self, loops: int) -> int:
        """One loop more than the policy's."""
        return min(loops, self.next_check(self.policy.deepest(loops) + 1))

    def check_model(self, config: LoopLMConfig, loops: int) -> None:
        """By the policy's own measure, too."""
        super().check_model(config, loops)
        self.policy.check_model(config, loops)

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """What was said a loop ago or before."""
        said, own = memory[:, :1], memory[:, 1:]
        leave, own = self.policy.decide(seen, own)
        ever = torch.maximum(said, leave[:, None].to(said.dtype))
        return said[:, 0] > 0, torch.cat([ever, own], dim=-1)


@dataclass(frozen=True, init=False, repr=False)
class AnyOf(DepthPolicy):
    """As soon as one of several policies says so."""

    policies: tuple[DepthPolicy, ...]
    sees_all: ClassVar[bool] = True

    def __init__(self, *policies: DepthPolicy, min_loops: int = 1, every: int = 1) -> None:
        for name, value in (("policies", policies), ("min_loops", min_loops), ("every", every)):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        super().__post_init__()
        good = bool(self.policies) and all(isinstance(policy, DepthPolicy) for policy in self.policies)
        self.need(good, "give it one depth policy or more")

    def __repr__(self) -> str:
        inside = [*map(repr, self.policies), f"min_loops={self.min_loops}", f"every={self.every}"]
        return f"AnyOf({', '.join(inside)})"

    @property
    def needs_gate(self) -> bool:  # ty: ignore[incompatible-property-override]
        """Whether one of them does."""
        return any(policy.needs_gate for policy in self.policies)

    @property
    def needs_logits(self) -> bool:  # ty: ignore[incompatible-property-override]
        """Whether one of them does."""
        return any(policy.needs_logits for policy in self.policies)

    def memory(self, config: LoopLMConfig, loops: int) -> int:
        """All of theirs; how wide each is, is known from the model."""
        return sum(policy.memory(config, loops) for policy in self.policies)

    def deepest(self, loops: int) -> int:
        """The shallowest of theirs: none goes on past it."""
        return min(loops, self.next_check(min(policy.deepest(loops) for policy in self.policies)))

    def check_model(self, config: LoopLMConfig, loops: int) -> None:
        """By the measure of each."""
        super().check_model(config, loops)
        for policy in self.policies:
            policy.check_model(config, loops)

    def check(self, seen: Seen, memory: Tensor) -> Decision:
        """Each policy on its own part of the memory."""
        sizes = [policy.memory(seen.config, seen.loops) for policy in self.policies]
        parts = zip(self.policies, memory.split(sizes, dim=-1), strict=True)
        votes, after = zip(*(policy.decide(seen, part) for policy, part in parts), strict=True)
        return torch.stack(votes).any(0), torch.cat(after, dim=-1)


def first_exits(policy: DepthPolicy, steps: Iterable[Seen], last: Tensor) -> Tensor:
    """The loop [R] at which each token leaves, at most `last` [R]; `steps` are all its loops from the first on."""
    exits = torch.zeros_like(last)
    memory = None
    for seen in steps:
        if memory is None:
            memory = seen.after.new_zeros(len(last), policy.memory(seen.config, seen.loops), dtype=torch.float32)
        leave, memory = policy.decide(seen, memory)
        exits = torch.where((exits == 0) & (leave | (seen.loop >= last)), seen.loop, exits)
    return exits


def check_policy(depth: object) -> DepthPolicy:
    """`depth` itself, if it is a depth policy.

    Raises:
        ValueError: for anything else, a policy's class included.
    """
    if not isinstance(depth, DepthPolicy):
        raise ValueError(f"depth={depth!r} must be a depth policy, such as ExitCDF(0.5)")
    return depth


def is_whole(value: object, least: float = 1) -> bool:
    """Whether it is a whole number (numpy's, too) of at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_positive(value: object) -> bool:
    """Whether it is a finite number above 0."""
    return is_number(value) and 0 < value < math.inf
