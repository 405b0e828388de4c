"""A walk through the loops of a model, one state at a time, so that thousands of loops take no more memory than one."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from looplm.models import LoopLMForCausalLM
from looplm.models.outputs import LoopModelOutput


@dataclass(frozen=True, kw_only=True)
class Visit:
    """The state [B, S, D] after 1-based `loop`, and the one before that loop."""

    loop: int
    before: Tensor
    state: Tensor
    model: LoopLMForCausalLM
    out: LoopModelOutput

    def hidden(self) -> Tensor:
        """The state made ready for the head [B, S, D]."""
        return self.model.model.readout(self.state, self.out.context.without_store())

    def step(self, state: Tensor) -> Tensor:
        """What one loop more makes of a state [B, S, D]."""
        return self.model.model.step(state, self.out.inputs, self.loop + 1, self.out.context)


def walk(
    model: LoopLMForCausalLM, input_ids: Tensor, loops: int, *, init_state: Tensor | None = None, state_seed: int = 0
) -> Iterator[Visit]:  # fmt: skip
    """Every loop of a call on `input_ids` [B, S], in order; `init_state` [B, S, D] is where it starts, if given."""
    backbone = model.model
    out = backbone(input_ids, loops=1, keep_loops="all", use_cache=False, init_state=init_state, state_seed=state_seed)
    before = backbone.init_state(out.inputs, out.context, init_state)
    state = out.states[1]
    for loop in range(1, loops + 1):
        if loop > 1:
            before, state = state, backbone.step(state, out.inputs, loop, out.context)
        yield Visit(loop=loop, before=before, state=state, model=model, out=out)
