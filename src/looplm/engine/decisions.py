"""Asking depth policies: one call for all lanes that share a policy, with the memory of each lane."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from looplm.engine.policies import DepthPolicy, Seen
from looplm.engine.requests import Lane
from looplm.engine.runner import Runner


class Decisions:
    """The policies' memories [lanes, M], one for each policy that is in use."""

    def __init__(self, runner: Runner, loops: int) -> None:
        self.runner, self.loops = runner, loops
        self._memories: dict[DepthPolicy, Tensor] = {}

    def leaving(self, lanes: Sequence[Lane], read: Callable[[Sequence[Lane]], tuple[Tensor, Tensor]]) -> list[Lane]:
        """Those of `lanes`, which have just done a loop, that leave; `read` gives hidden and logits of some lanes."""
        decided: dict[int, bool] = {}
        groups: dict[DepthPolicy, list[Lane]] = {}
        for lane in lanes:
            request = lane.row.request
            if lane.forced:
                decided[lane.number] = lane.loop >= lane.forced
            elif lane.loop >= lane.last:
                decided[lane.number] = True
            else:
                groups.setdefault(request.depth, []).append(lane)
        for policy, group in groups.items():
            votes = self._ask(policy, group, read)
            for lane, vote in zip(group, votes, strict=True):
                decided[lane.number] = bool(vote) and lane.loop >= lane.row.request.min_loops
        return [lane for lane in lanes if decided[lane.number]]

    def _ask(
        self, policy: DepthPolicy, lanes: list[Lane], read: Callable[[Sequence[Lane]], tuple[Tensor, Tensor]]
    ) -> np.ndarray:  # fmt: skip
        runner = self.runner
        numbers = torch.tensor([lane.number for lane in lanes], device=runner.device)
        loops = torch.tensor([lane.loop for lane in lanes], device=runner.device)
        memory = self._memory(policy)
        own = torch.where((loops == 1)[:, None], 0.0, memory[numbers])
        seen = Seen(
            loop=loops, before=runner.before[numbers], after=runner.state[numbers],
            gate=None if runner.gate is None else runner.gate[numbers], read=lambda: read(lanes),
            head=runner.model.lm_head.weight, config=runner.config, loops=self.loops,
        )  # fmt: skip
        leave, own = policy.decide(seen, own)
        memory[numbers] = own.to(memory.dtype)
        return leave.cpu().numpy()

    def _memory(self, policy: DepthPolicy) -> Tensor:
        if policy not in self._memories:
            width = policy.memory(self.runner.config, self.loops)
            self._memories[policy] = torch.zeros(len(self.runner.state), width, device=self.runner.device)
        return self._memories[policy]
