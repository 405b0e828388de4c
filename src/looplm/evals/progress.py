"""How far a long evaluation is, told to whoever listens."""

from collections.abc import Callable
from itertools import count

Advance = Callable[[str, int, int], None]  # what is counted, how many are done, of how many


def unheard(what: str, done: int, total: int) -> None:
    """Nobody listens."""


def each_of(total: int, what: str, advance: Advance) -> Callable[[object], None]:
    """To be called after each of `total`: it tells how many are done; that none is, it tells at once."""
    done = count(1)
    advance(what, 0, total)
    return lambda _: advance(what, next(done), total)
