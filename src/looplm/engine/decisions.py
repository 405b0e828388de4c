"""Asking depth policies: one call for all lanes that share a policy, with the memory of each lane."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from looplm.engine.batches import LaneBatch
from looplm.engine.policies import DepthPolicy, Seen
from looplm.engine.requests import Lane
from looplm.engine.runner import Runner


class Decisions:
    """The policies' memories [lanes, M], one for each policy that is in use."""

    def __init__(self, runner: Runner, loops: int) -> None:
        self.runner, self.loops = runner, loops
        self._memories: dict[DepthPolicy, Tensor] = {}

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
        numbers = torch.tensor([lane.number for lane in lanes], device=runner.device)
        loops = torch.tensor([lane.loop for lane in lanes], device=runner.device)
        memory = self._memory(policy)
        own = torch.where((loops == 1)[:, None], 0.0, memory[numbers])
        seen = Seen(
            loop=loops, before=runner.before[numbers], after=runner.state[numbers],
            gate=runner.gate(batch(lanes)) if policy.needs_gate else None, read=lambda: runner.read(batch(lanes)),
            head=runner.head.weight, config=runner.config, loops=self.loops,
        )  # fmt: skip
        leave, own = policy.decide(seen, own)
        memory[numbers] = own.to(memory.dtype)
        return leave.tolist()

    def _memory(self, policy: DepthPolicy) -> Tensor:
        if policy not in self._memories:
            width = policy.memory(self.runner.config, self.loops)
            self._memories[policy] = torch.zeros(len(self.runner.state), width, device=self.runner.device)
        return self._memories[policy]
