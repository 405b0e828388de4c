"""Seconds of several ways to do one thing, measured in turn."""

import time
from collections.abc import Callable, Iterator, Mapping


def seconds_in_turn(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """The seconds [repeats] of each way, all ways once a round; a first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, work in ways.items():
            began = time.perf_counter()
            work()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return seconds


class Clock:
    """Seconds of one's own: it stands still while others have their turn."""

    def __init__(self) -> None:
        self.spent, self._began = 0.0, 0.0

    @property
    def seconds(self) -> float:
        """So far, the present turn included."""
        return self.spent + time.perf_counter() - self._began

    def begin(self) -> None:
        """A turn begins."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """It ends."""
        self.spent = self.seconds


def seconds_by_turns(ways: Mapping[str, Callable[[Clock], Iterator[None]]], repeats: int) -> dict[str, list[float]]:
    """The seconds [repeats] of ways that take turns, a piece of work each; a first round warms up and is not counted.

    Ratios then hold on a machine whose speed swings: a slow second falls on all ways alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        clocks = {name: Clock() for name in ways}
        working = {name: way(clocks[name]) for name, way in ways.items()}
        while working:
            for name in list(working):
                clocks[name].begin()
                done = next(working[name], "done") == "done"
                clocks[name].end()
                if done:
                    del working[name]
        for name, clock in clocks.items():
            if repeat:
                seconds[name].append(clock.spent)
    return seconds
