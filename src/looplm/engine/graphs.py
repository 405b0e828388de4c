"""The core step as recorded graphs, one for each bucket of rows and pages: a GPU then waits for no Python."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from looplm.engine.store import Places
from looplm.models.rotary import Tables

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True, kw_only=True)
class Where:
    """What follows from positions alone, for a call of flat tokens [T]."""

    positions: Tensor
    rotary: Tables
    mask: Tensor


@dataclass(frozen=True, kw_only=True)
class CoreCall:
    """What one core step takes: the lanes' numbers, loops, positions and start seeds [T], and where they lie.

    where: what follows from the positions, if it is known already · decodes: whether they are single tokens, after
        their prompts.
    """

    lanes: Tensor
    loops: Tensor
    positions: Tensor
    seeds: Tensor
    places: Places
    where: Where | None = None
    decodes: bool = True

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, always in this order."""
        return [self.lanes, self.loops, self.positions, self.seeds, self.places.tables, self.places.write]


class StepGraphs:
    """Graphs by shape, each over tensors of its own that a call's are copied into.

    advance: the step, which must not look at values on the host · idle: makes of a call one of nobody's lanes, on which
        a graph is recorded · capture: makes of a step what replays it (`cuda_graph`).
    """

    def __init__(
        self, advance: Callable[[CoreCall], None], idle: Callable[[CoreCall], CoreCall], capture: Capture
    ) -> None:  # fmt: skip
        self.advance, self.idle, self.capture = advance, idle, capture
        self._recorded: dict[tuple[int, int, int], tuple[CoreCall, Replay]] = {}

    def step(self, call: CoreCall) -> None:
        """What `advance` does."""
        shape = (len(call.lanes), call.places.rows, len(call.places.tables))
        if shape not in self._recorded:
            held = self.idle(_copied(call))
            self._recorded[shape] = held, self.capture(lambda: self.advance(held))
        held, replay = self._recorded[shape]
        for mine, given in zip(held.tensors, call.tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        replay()


def bucket(count: int) -> int:
    """The next power of two."""
    return 1 << int(count - 1).bit_length()


def cuda_graph(work: Callable[[], None]) -> Replay:
    """Record `work`, which has run three times before on a stream of its own, as PyTorch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _copied(call: CoreCall) -> CoreCall:
    places = replace(call.places, tables=call.places.tables.clone(), write=call.places.write.clone())
    return CoreCall(
        lanes=call.lanes.clone(), loops=call.loops.clone(), positions=call.positions.clone(),
        seeds=call.seeds.clone(), places=places,
    )  # fmt: skip
