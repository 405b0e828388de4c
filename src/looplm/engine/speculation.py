"""Self-speculation on the diagonal: a token enters the loop before its predecessor has left it.

The first s loops of a proposed token are the very loops that plain decoding would run, so only rejected tokens waste
work: one core step carries token n at loop 4, n + 1 at loop 3, n + 2 at loop 2. With acceptance p and s = 1 that makes
about 1 / (1 + (1 - p)(T - 1)) tokens a step against 1 / T (LoopSpec, arXiv 2609.17184; WaveFront, arXiv 2609.23033).
"""

from dataclasses import dataclass

from looplm.engine.kv_policies import FullKV, KVPolicy


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """When tokens enter.

    entry: the loop of its predecessor at which a token may be proposed · width: tokens of a row in the loop at once;
        as many as can be by default · reread: whether a deeper loop that proposes another token replaces it at once.
    """

    entry: int = 1
    width: int | None = None
    reread: bool = True

    def __post_init__(self) -> None:
        if self.entry < 1 or (self.width is not None and self.width < 2):
            raise ValueError(f"{self}: entry must be at least 1, and width at least 2")

    def check(self, policy: KVPolicy, loops: int) -> None:
        """Refuse what could not be exact."""
        if self.entry >= loops:
            raise ValueError(f"{self}: entry must be below the engine's loops, {loops}; else nothing is gained")
        if policy != FullKV():
            raise ValueError(
                f"under {policy} a token's keys are not settled before its last loop; speculation needs kv='full'"
            )

    def width_at(self, loops: int) -> int:
        """Tokens of a row in the loop at once, at most."""
        most = -(-loops // self.entry)
        return most if self.width is None else min(self.width, most)
