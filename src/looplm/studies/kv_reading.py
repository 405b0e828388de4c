"""Reading given tokens as if they were being generated, under any sharing of keys and values between loops."""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from looplm.engine.kv_policies import KVPolicy
from looplm.models import LoopLMForCausalLM
from looplm.models.context import build_context

Phase = Literal["generated", "decoding", "prefill", "both"]
_Pair = tuple[Tensor, Tensor]


@dataclass(kw_only=True)
class SharedStore:
    """Every loop's keys and values [B, G, S, head_dim] of the tokens before, seen through `policy` while `sharing`.

    A token always sees its own of the loop that it is in; of the tokens before, it sees what `policy` keeps in the slot
    of that loop, once they are through all their loops; of the first `whole` tokens it sees the loop's own even then.
    """

    policy: KVPolicy
    core: range
    loops: int
    sharing: bool = False
    whole: int = 0
    past: dict[tuple[int, int], _Pair] = field(default_factory=dict)
    now: dict[tuple[int, int], _Pair] = field(default_factory=dict)

    def update(self, key: Tensor, value: Tensor, layer: int, loop: int) -> _Pair:
        """A call's keys and values at (layer, loop); those of all tokens that its own see."""
        self.now[layer, loop] = (key, value)
        if not self.past:
            return key, value
        keys, values = self._seen(layer, loop)
        return torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)

    def end_call(self) -> None:
        """The call's tokens have done all loops: they are past."""
        for place, new in self.now.items():
            held = self.past.get(place)
            self.past[place] = (
                new if held is None else (torch.cat((held[0], new[0]), 2), torch.cat((held[1], new[1]), 2))
            )
        self.now = {}

    def _seen(self, layer: int, loop: int) -> _Pair:
        if not self.sharing or layer not in self.core:
            return self.past[layer, loop]
        shared = self._shared(layer, loop)
        if not self.whole:
            return shared
        own, whole = self.past[layer, loop], self.whole
        keys, values = (torch.cat((a[:, :, :whole], b[:, :, whole:]), 2) for a, b in zip(own, shared, strict=True))
        return keys, values

    def _shared(self, layer: int, loop: int) -> _Pair:
        slot = self.policy.slot(loop)
        same = [self.past[layer, other] for other in range(1, self.loops + 1) if self.policy.slot(other) == slot]
        if self.policy.keeps == "mean":
            keys, values = zip(*same, strict=True)
            return torch.stack(keys).mean(0), torch.stack(values).mean(0)
        return same[0] if self.policy.keeps == "first" else same[-1]


@torch.no_grad()
def read_shared(model: LoopLMForCausalLM, ids: Tensor, prompt: int, policy: KVPolicy, phase: Phase) -> Tensor:
    """Logits [B, S - prompt, V] for the tokens of `ids` [B, S] that follow the first `prompt`, at the model's loops.

    Loops share keys and values in one phase or both (Ouro, arXiv 2510.25741, Table 14):

    - "decoding": the prompt is read in one call in which every loop sees its own; then only what `policy` keeps is left
      of them, and each further token sees that of all tokens before it. This is what the engine does.
    - "generated": the same, but that every loop of the prompt's tokens is kept, and seen loop by loop.
    - "prefill": the prompt is read under the policy. A loop cannot see a later loop of an earlier token before that
      token has run it, so the prompt's tokens go one after the other, each through all loops, as in decoding: the form
      that never holds more than the policy's slots. All loops are then kept, and further tokens see each its own.
    - "both": the policy's slots alone, from the first token on.
    """
    config = model.config
    first = config.prelude_layers
    store = SharedStore(policy=policy, core=range(first, first + config.core_layers), loops=config.loops)
    store.sharing = phase in ("prefill", "both")
    width = 1 if store.sharing else prompt
    for begin in range(0, prompt, width):
        logits = _call(model, ids[:, begin : begin + width], begin, store)
    store.sharing, store.whole = phase != "prefill", prompt if phase == "generated" else 0
    read = [logits]
    for place in range(prompt, ids.shape[1] - 1):
        read.append(_call(model, ids[:, place : place + 1], place, store))
    return torch.stack(read, dim=1)


def _call(model: LoopLMForCausalLM, ids: Tensor, begin: int, store: SharedStore) -> Tensor:
    """Logits [B, V] after tokens `ids` [B, S] at positions from `begin` on; several tokens only where none is past."""
    backbone = model.model
    embeds = backbone.embed_tokens(ids)
    positions = torch.arange(begin, begin + ids.shape[1])[None]
    context = replace(build_context(model.config, embeds, None, positions, None), store=store)
    states, _ = backbone.unroll(backbone.embed(embeds, context), context, store.loops, {store.loops})
    hidden = backbone.readout(states[store.loops], context)
    store.end_call()
    return model.lm_head(hidden[:, -1])
