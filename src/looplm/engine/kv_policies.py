"""What is kept of each loop's keys and values once a token is made: one map from loops to slots.

Prefill always keeps every loop while it runs; then the pages that the policy does not keep are given back. A token that
is being made always sees its own keys and values of the loop that it is in.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from looplm.engine.policies import is_whole


class KVPolicy(Protocol):
    """How loops share slots.

    keeps: what a slot holds of the loops that share it: the "newest" one's keys and values, the "first" one's, or the
        "mean" of them all.
    """

    @property
    def keeps(self) -> Literal["newest", "first", "mean"]: ...  # noqa: D102

    def __hash__(self) -> int: ...  # a value, such as a frozen dataclass

    def slots(self, loops: int) -> int:
        """Slots of a core layer for a request of so many loops."""
        ...

    def slot(self, loop: int) -> int:
        """The 0-based slot of 1-based `loop`."""
        ...


@dataclass(frozen=True)
class FullKV:
    """A slot for every loop; `fill` says what the slots get that a token which leaves early does not reach.

    "copy": its last keys and values · "recompute": what it would have computed, once a later token goes that deep; the
    tokens are then those of running every loop, and as much work is saved as no later token asks for.
    """

    fill: Literal["copy", "recompute"] = "copy"
    keeps: ClassVar[Literal["newest", "first", "mean"]] = "newest"

    def __post_init__(self) -> None:
        if self.fill not in ("copy", "recompute"):
            raise ValueError(f"fill={self.fill!r} is not known; choose 'copy' or 'recompute'")

    def slots(self, loops: int) -> int:
        """As many as loops."""
        return loops

    def slot(self, loop: int) -> int:
        """The loop's own."""
        return loop - 1


@dataclass(frozen=True)
class RingKV:
    """`size` slots in turn: loop t uses slot (t - 1) mod size (Huginn's budget, arXiv 2502.05171, section 6).

    With size 1 it is the single overwritten slot, which holds every token's last loop (Ouro's Table 14, "last").
    """

    size: int = 1
    keeps: ClassVar[Literal["newest", "first", "mean"]] = "newest"

    def __post_init__(self) -> None:
        if not is_whole(self.size):
            raise ValueError(f"{self}: size must be a whole number of at least 1")

    def slots(self, loops: int) -> int:
        """At most `size`."""
        return min(self.size, loops)

    def slot(self, loop: int) -> int:
        """Round and round."""
        return (loop - 1) % self.size


@dataclass(frozen=True)
class AdjacentKV:
    """Every `size` loops that follow one another share a slot, which holds the newest (WaveFront, arXiv 2609.23033)."""

    size: int = 2
    keeps: ClassVar[Literal["newest", "first", "mean"]] = "newest"

    def __post_init__(self) -> None:
        if not is_whole(self.size):
            raise ValueError(f"{self}: size must be a whole number of at least 1")

    def slots(self, loops: int) -> int:
        """The loops by `size`, rounded up."""
        return -(-loops // self.size)

    def slot(self, loop: int) -> int:
        """Group by group."""
        return (loop - 1) // self.size


@dataclass(frozen=True)
class _OneSlot:
    def slots(self, loops: int) -> int:
        """One."""
        return 1

    def slot(self, loop: int) -> int:
        """The only one."""
        return 0


@dataclass(frozen=True)
class FirstKV(_OneSlot):
    """One slot, which holds the first loop's keys and values (Ouro's Table 14)."""

    keeps: ClassVar[Literal["newest", "first", "mean"]] = "first"


@dataclass(frozen=True)
class AveragedKV(_OneSlot):
    """One slot, which holds the mean over the loops that the token did (Ouro's Table 14)."""

    keeps: ClassVar[Literal["newest", "first", "mean"]] = "mean"


BY_NAME: dict[str, KVPolicy] = {
    "full": FullKV(),
    "recomputed": FullKV("recompute"),
    "last": RingKV(1),
    "single": RingKV(1),
    "first": FirstKV(),
    "averaged": AveragedKV(),
    "adjacent": AdjacentKV(2),
}


def kv_policy(given: str | KVPolicy) -> KVPolicy:
    """The policy of a name, or the policy itself.

    Raises:
        ValueError: for a name that is not known.
    """
    if not isinstance(given, str):
        if isinstance(given, type) or not hasattr(given, "slots"):
            raise ValueError(f"kv={given!r} must be a name ({', '.join(BY_NAME)}) or a policy such as RingKV(2)")
        return given
    if given not in BY_NAME:
        raise ValueError(f"kv='{given}' is not known; choose one of {', '.join(BY_NAME)}, or give RingKV(size)")
    return BY_NAME[given]


def kept_loop(policy: KVPolicy, slot: int, loops: int) -> int:
    """The loop whose pages become `slot` when a prefill of `loops` loops is folded (the mean is written over them)."""
    sharing = _sharing(policy, slot, range(1, loops + 1))
    return sharing[-1] if policy.keeps == "newest" else sharing[0]


def slots_to_fill(policy: KVPolicy, left: int, loops: int) -> list[int]:
    """The slots that a token which leaves after `left` of `loops` loops has not written."""
    written = {policy.slot(loop) for loop in range(1, left + 1)}
    return sorted({policy.slot(loop) for loop in range(left + 1, loops + 1)} - written)


def recomputes(policy: KVPolicy) -> bool:
    """Whether what an early exit leaves out is computed later."""
    return isinstance(policy, FullKV) and policy.fill == "recompute"


def _sharing(policy: KVPolicy, slot: int, loops: Iterable[int]) -> list[int]:
    return [loop for loop in loops if policy.slot(loop) == slot]
