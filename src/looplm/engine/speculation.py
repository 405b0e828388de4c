"""Self-speculation on the diagonal: a token enters the loop before its predecessor has left it.

The first s loops of a proposed token are the very loops that plain decoding would run, so only rejected tokens waste
work: one core step carries token n at loop 4, n + 1 at loop 3, n + 2 at loop 2. With acceptance p and s = 1 that makes
about 1 / (1 + (1 - p)(T - 1)) tokens a step against 1 / T (LoopSpec, arXiv 2609.17184; WaveFront, arXiv 2609.23033).

A proposal is what the sampler would choose from an earlier loop under the token's own noise, so it is accepted exactly
if the exit chooses the same; what is emitted is, token for token, what plain decoding emits. A token may leave early by
its own depth policy; it becomes final when all before it have.
"""

from dataclasses import dataclass

from looplm.engine.kv_policies import FullKV, KVPolicy
from looplm.engine.policies import is_whole

_MEMORY = 0.95  # of a moving mean, for each new observation
_RETRY = 64  # tokens after which loops that are no longer read are thought of as at first


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """When tokens enter.

    entry: the loop of its predecessor at which a token is proposed; None lets every row choose it, from how often its
        loops were right and what a tick has cost · width: tokens of a row in the loop at most; T / entry by default
    reread: whether a deeper loop that proposes another token replaces it at once
    anytime: whether proposals are reported as they come, as events that say `provisional`.
    """

    entry: int | None = None
    width: int | None = None
    reread: bool = True
    anytime: bool = False

    def __post_init__(self) -> None:
        for name, least in (("entry", 1), ("width", 2)):
            value = getattr(self, name)
            if value is not None and not is_whole(value, least):
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}, or None")

    def check(self, policy: KVPolicy, loops: int) -> None:
        """Refuse what could not be exact."""
        if self.entry is not None and self.entry >= loops:
            raise ValueError(f"{self}: entry must be below the engine's loops, {loops}; else nothing is gained")
        if policy != FullKV():
            raise ValueError(
                f"under {policy} a token's keys are not settled before its last loop; speculation needs kv='full'"
            )

    def width_at(self, loops: int) -> int:
        """Tokens of a row in the loop at once, at most."""
        most = -(-loops // (self.entry or 1))
        return most if self.width is None else min(self.width, most)


def check_speculation(given: object) -> Speculation:
    """`given` itself, if it says when tokens enter.

    Raises:
        ValueError: for anything else, such as True.
    """
    if not isinstance(given, Speculation):
        raise ValueError(f"speculate={given!r} must be a Speculation, such as Speculation(), or None")
    return given


class TickCost:
    """Seconds of a tick as a line over its lanes, by moving least squares."""

    def __init__(self) -> None:
        self.weight = self.lanes = self.seconds = self.squares = self.products = 0.0

    def add(self, lanes: int, seconds: float) -> None:
        """One tick was seen."""
        new = (1.0, lanes, seconds, lanes * lanes, lanes * seconds)
        old = (self.weight, self.lanes, self.seconds, self.squares, self.products)
        self.weight, self.lanes, self.seconds, self.squares, self.products = (
            _MEMORY * before + now for before, now in zip(old, new, strict=True)
        )

    def at(self, lanes: int) -> float:
        """Seconds of a tick of so many lanes; at first a tenth more for every further one."""
        if not self.weight:
            return 1 + 0.1 * (lanes - 1)
        mean, height = self.lanes / self.weight, self.seconds / self.weight
        spread = self.squares / self.weight - mean * mean
        slope = 0.1 * height if spread < 1e-9 else (self.products / self.weight - mean * height) / spread
        return max(height + max(slope, 0.0) * (lanes - mean), 0.1 * height)


class RowAcceptance:
    """How often each loop of a row's tokens proposed what the exit then chose."""

    def __init__(self, loops: int) -> None:
        self.loops = loops
        self.right = dict.fromkeys(range(1, loops), 1.0)  # hope, until it is disappointed
        self.unread = dict.fromkeys(range(1, loops), 0)

    def add(self, proposals: dict[int, int], token: int) -> None:
        """A token is final, after `proposals` of it by loop."""
        for loop in self.right:
            if loop in proposals:
                agreed = float(proposals[loop] == token)
                self.right[loop] = _MEMORY * self.right[loop] + (1 - _MEMORY) * agreed
                self.unread[loop] = 0
            else:
                self.unread[loop] += 1
                if self.unread[loop] == _RETRY:
                    self.right[loop] = 1.0

    def entry(self, width: int, others: int, cost: TickCost) -> int:
        """The loop to propose at: least seconds a token; the last one is no speculation.

        At entry s an accepted token takes s ticks of ceil(T / s) lanes, a rejected one T.
        """

        def seconds(entry: int) -> float:
            right = self.right.get(entry, 1.0)
            lanes = min(width, -(-self.loops // entry))
            return (entry * right + self.loops * (1 - right)) * cost.at(others + lanes)

        return min(range(1, self.loops + 1), key=seconds)
