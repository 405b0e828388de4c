"""Seconds of several ways to do one thing, measured in turn."""

import time
from collections.abc import Callable, Mapping


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
