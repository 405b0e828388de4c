"""What depth policies may see of chosen places of a call that has kept all its loops."""

from collections.abc import Iterator

import torch
from torch import Tensor

from looplm.engine.policies import DepthPolicy, Seen, first_exits
from looplm.models import LoopLMForCausalLM, Trace


class TracedPlaces:
    """The tokens of `trace` [B, S] that `places` [B, S] marks, N of them in order, at every loop up to `loops`.

    States are those of all loops run, as in prefill.
    """

    def __init__(self, model: LoopLMForCausalLM, trace: Trace, places: Tensor, loops: int) -> None:
        self.model, self.trace, self.places, self.loops = model, trace, places, loops
        self.count = int(places.sum())

    def logits(self, loop: int) -> tuple[Tensor, Tensor]:
        """The normed hidden states [N, D] of a loop, and their logits [N, V]."""
        hidden = self.model.hidden_at(self.trace, loop)[self.places]
        return hidden, self.model.lm_head(hidden)

    def exits(self, policy: DepthPolicy) -> Tensor:
        """The loop [N] at which each leaves.

        Raises:
            ValueError: if the model has not what the policy looks at.
        """
        policy.check_model(self.model.config, self.loops)
        last = torch.full((self.count,), min(self.loops, policy.deepest(self.loops)))
        return first_exits(policy, self._steps(), last)

    def _steps(self) -> Iterator[Seen]:
        before = self.model.model.init_state(self.trace.inputs, self.trace.context)
        for loop in range(1, self.loops + 1):
            after, gates = self.trace.states[loop], self.trace.gate_logits
            yield Seen(
                loop=torch.full((self.count,), loop), before=before[self.places], after=after[self.places],
                gate=None if gates is None else gates[..., loop - 1][self.places],
                read=lambda loop=loop: self.logits(loop), head=self.model.lm_head.weight, config=self.model.config,
                loops=self.loops,
            )  # fmt: skip
            before = after
