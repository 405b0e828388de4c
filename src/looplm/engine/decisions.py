"""Asking depth policies: one call for all lanes that share a policy, with the memory of each lane."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.engine.batches import LaneBatch
from looplm.engine.policies import DepthPolicy, Seen
from looplm.engine.requests import Lane
from looplm.engine.runner import Runner
from looplm.models.noise import position_uniform

_EXITS = -1  # the noise stream of exits


class Decisions:
    """Lanes, their policies, and what each policy remembers of a lane, in its first numbers of that lane's row."""

    def __init__(self, runner: Runner, loops: int) -> None:
        self.runner, self.loops = runner, loops
        self._memory = torch.zeros(len(runner.state), 0, device=runner.device)

    def leaving(self, lanes: Sequence[Lane], batch: Callable[[Sequence[Lane]], LaneBatch]) -> list[Lane]:
        """Those of `lanes`, which have just done a loop, that leave; `batch` makes what the runner takes of some."""
        decided: dict[int, bool] = {}
        groups: dict[DepthPolicy, list[Lane]] = {}
        for lane in lanes:
            request = lane.row.request
            if lane.forced:
                decided[lane.number] = lane.loop >= lane.forced
            elif lane.loop >= lane.last or not request.depth.leaves_early:
                decided[lane.number] = lane.loop >= lane.last
            else:
                groups.setdefault(request.depth, []).append(lane)
        for policy, group in groups.items():
            votes = self._ask(policy, group, batch)
            for lane, vote in zip(group, votes, strict=True):
                decided[lane.number] = vote and lane.loop >= lane.row.request.min_loops
        return [lane for lane in lanes if decided[lane.number]]

    def _ask(
        self, policy: DepthPolicy, lanes: list[Lane], batch: Callable[[Sequence[Lane]], LaneBatch]
    ) -> list[bool]:  # fmt: skip
        runner = self.runner
        asked = np.array([(lane.number, lane.loop) for lane in lanes])
        numbers, loops = torch.from_numpy(asked).to(runner.device).unbind(1)
        width = policy.memory(runner.config, self.loops)
        if width > self._memory.shape[1]:
            self._memory = F.pad(self._memory, (0, width - self._memory.shape[1]))
        own = self._memory.index_select(0, numbers)[:, :width]
        new = [place for place, lane in enumerate(lanes) if lane.loop == 1]
        if new:  # what the lane's token before it left there
            own[new] = 0
        seen = Seen(
            loop=loops, before=runner.before.index_select(0, numbers), after=runner.state.index_select(0, numbers),
            gate=runner.gate(asked[:, 0]) if policy.needs_gate else None, read=lambda: runner.read(batch(lanes)),
            head=runner.head.weight, config=runner.config, loops=self.loops, uniform=lambda: _uniform(lanes, loops),
        )  # fmt: skip
        leave, own = policy.decide(seen, own)
        self._memory[numbers, :width] = own.to(self._memory.dtype)
        return leave.tolist()


def _uniform(lanes: Sequence[Lane], loops: Tensor) -> Tensor:
    """A number [R] for each lane at its loop."""
    positions, seeds = (
        torch.tensor([(lane.position, lane.row.request.seed) for lane in lanes]).to(loops.device).unbind(1)
    )
    every = position_uniform(positions, int(loops.max()), seeds, _EXITS)
    return every.gather(1, loops[:, None] - 1)[:, 0]
