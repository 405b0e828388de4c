"""What happens inside the loop: its states one at a time, so that thousands take no more memory than one, or layers."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


@contextmanager
def layers_recorded(
    model: LoopLMForCausalLM, pick: Callable[[Tensor], Tensor]
) -> Generator[dict[tuple[int, int], Tensor]]:  # fmt: skip
    """What `pick` takes of the output [B, S, D] of every visit of a layer, by (loop, layer), as long as this is open.

    Layers count from 1, the prelude's first; the prelude's visits belong to loop 0, the coda's are left out. Each call
    of the model replaces what the one before left.
    """
    found: dict[tuple[int, int], Tensor] = {}

    def keep(block: Any, args: tuple[Any, ...], output: Tensor) -> None:
        found[args[1], block.layer + 1] = pick(output)

    hooks = [block.register_forward_hook(keep) for block in (*model.model.prelude, *model.model.core)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
