"""A text run at the loops that each of its tokens did when it was generated, in one parallel call with gradient."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from looplm.models.backbone import LoopLMModel
from looplm.models.context import build_context
from looplm.models.outputs import LoopModelOutput


@dataclass(frozen=True, kw_only=True)
class FilledStore:
    """Keys and values as the engine's full store has them: of loops past a token's last, those of its last.

    exits: [B, S], the loops that each token did.
    """

    exits: Tensor
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def update(self, key: Tensor, value: Tensor, layer: int, loop: int) -> tuple[Tensor, Tensor]:
        """This loop's, where a token still is in the loop. Prelude and coda come with loop 0 and are left as they are.

        Every loop's are kept apart, so that activation checkpointing, which runs a loop again, finds the loop before.
        """
        if loop > 1:
            left = (self.exits < loop)[:, None, :, None]
            earlier = self.kept[layer, loop - 1]
            key, value = torch.where(left, earlier[0], key), torch.where(left, earlier[1], value)
        if loop:
            self.kept[layer, loop] = key, value
        return key, value


def replay(
    model: LoopLMModel, input_ids: Tensor, attention_mask: Tensor | None, *, exits: Tensor, read: Tensor, loops: int,
    state_seed: int | Tensor = 0,
) -> LoopModelOutput:  # fmt: skip
    """All loops of `input_ids` [B, S], each token standing still after its last one; every loop is kept.

    The state of loop t is that of loop min(t, read), so that what is read of the last loop is what the engine read, by
    a coda as well, and every earlier loop is read among tokens as they stood then.

    Args:
        exits: [B, S], the loops whose keys and values each token has left behind; all of a prompt's tokens do `loops`.
        read: [B, S], the loop at which each token was read. It is `exits`, but for a prompt's last token, whose reading
            the depth policy chose.
    """
    embeds = model.embed_tokens(input_ids)
    context = build_context(model.config, embeds, attention_mask, None, None, state_seed)
    inside = replace(context, store=FilledStore(exits=exits))
    inputs = model.embed(embeds, inside)
    states, gate_logits = model.unroll(inputs, inside, loops, set(range(1, loops + 1)))
    for loop in range(2, loops + 1):
        states[loop] = torch.where((read < loop)[..., None], states[loop - 1], states[loop])
    return LoopModelOutput(
        last_hidden_state=model.readout(states[loops], context), gate_logits=gate_logits, states=states,
        context=context, inputs=inputs,
    )  # fmt: skip
