"""Decoding one token at a time, written out: what the engine must equal, policy by policy.

Keys and values are kept for every (layer, loop, position) that was computed; each policy then says in words which of
them a later token sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from looplm.engine import AdjacentKV, AveragedKV, FirstKV, FullKV, KVPolicy, RingKV
from looplm.models import LoopLMForCausalLM
from looplm.models.context import build_context

Kept = dict[int, tuple[Tensor, Tensor]]  # loop -> key and value [1, G, 1, H] of one layer at one position


def seen_by_later_tokens(policy: KVPolicy, kept: Kept, loop: int) -> tuple[Tensor, Tensor]:
    """What a token at `loop` sees of an earlier one that did the loops of `kept`."""
    last = max(kept)
    if isinstance(policy, FirstKV):
        return kept[1]
    if isinstance(policy, AveragedKV):
        keys, values = zip(*kept.values(), strict=True)
        return torch.stack(keys).mean(0), torch.stack(values).mean(0)
    if isinstance(policy, FullKV):
        return kept[min(loop, last)]
    if isinstance(policy, RingKV):
        same = [done for done in kept if done % policy.size == loop % policy.size]
    else:
        assert isinstance(policy, AdjacentKV)
        same = [
            done for done in kept if (done + policy.size - 1) // policy.size == (loop + policy.size - 1) // policy.size
        ]
    return kept[max(same)] if same else kept[last]


@dataclass
class PlainStore:
    """Keys and values of everything so far: layer -> position -> loop."""

    policy: KVPolicy
    core: range
    past: dict[int, list[Kept]] = field(default_factory=dict)
    now: dict[int, Kept] = field(default_factory=dict)
    prompt: bool = True

    def update(self, key: Tensor, value: Tensor, layer: int, loop: int) -> tuple[Tensor, Tensor]:
        """One token's (or the prompt's) keys and values in, those that it sees out."""
        loop = loop if layer in self.core else 1
        if self.prompt:
            held = self.past.setdefault(layer, [{} for _ in range(key.shape[2])])
            for place, kept in enumerate(held):
                kept[loop] = (key[:, :, place : place + 1], value[:, :, place : place + 1])
            return key, value
        self.now.setdefault(layer, {})[loop] = (key, value)
        before = [seen_by_later_tokens(self.policy, kept, loop) for kept in self.past[layer]]
        keys, values = zip(*before, (key, value), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def end_token(self) -> None:
        """The token that was being made is past."""
        for layer, kept in self.now.items():
            self.past[layer].append(kept)
        self.now = {}


@torch.no_grad()
def decode_plainly(
    model: LoopLMForCausalLM, prompt: Sequence[int], policy: KVPolicy, loops: int, exits: Callable[[int, Tensor], int],
    num_tokens: int, state_seed: int = 0, warm_start: bool = False,
) -> tuple[list[int], list[int], list[Tensor]]:  # fmt: skip
    """Greedy tokens, their loops, and their logits [V].

    `exits` says of token number `index` how many loops it does, given the gate logits [loops] that it would have.
    """
    backbone, config = model.model, model.config
    first = config.prelude_layers
    store = PlainStore(policy, range(first, first + config.core_layers))
    tokens = torch.tensor([list(prompt)])
    made, depths, read = [], [], []
    start = None
    for index in range(num_tokens):
        embeds = backbone.embed_tokens(tokens)
        past = len(prompt) + index - 1 if index else 0
        positions = torch.arange(past, past + tokens.shape[1])[None]
        context = build_context(config, embeds, None, positions, None, state_seed)
        context = replace(context, store=store, mask=_causal(tokens.shape[1], past))
        inputs = backbone.embed(embeds, context)
        state = backbone.init_state(inputs, context, start)
        states, gates = [], []
        for loop in range(1, loops + 1):
            state = backbone.step(state, inputs, loop, context)
            states.append(state)
            gates.append(backbone.gate(state)[0, -1] if config.exit_gate else torch.tensor(0.0))
        depth = exits(index, torch.stack(gates))
        if index:  # the prompt keeps every loop; a later token only those that it did
            for layer in store.core:
                store.now[layer] = {loop: kept for loop, kept in store.now[layer].items() if loop <= depth}
        hidden = _read_last(backbone, states, depth, context, store)
        start = states[depth - 1][:, -1:] if warm_start else None
        store.end_token()
        store.prompt = False
        logits = model.lm_head(hidden)[0, -1]
        read.append(logits)
        made.append(int(logits.argmax()))
        depths.append(depth)
        tokens = torch.tensor([[made[-1]]])
    return made, depths, read


def _read_last(backbone, states, depth, context, store) -> Tensor:
    """The last position's hidden: a prompt goes through the coda at full depth, its last token then at its own."""
    if not (backbone.coda and store.prompt):
        return backbone.readout(states[depth - 1], context)
    backbone.readout(states[-1], context)
    mixed = torch.cat([states[-1][:, :-1], states[depth - 1][:, -1:]], dim=1)
    # The coda keys of the tokens before are those of full depth; only the last token's are its own.
    for layer in range(store.core.stop, store.core.stop + len(backbone.coda)):
        del store.past[layer]
    return backbone.readout(mixed, context)


def _causal(length: int, past: int) -> Tensor:
    rows = torch.arange(length)[:, None] + past
    return torch.zeros(length, past + length, dtype=torch.float64).masked_fill(
        torch.arange(past + length) > rows, -torch.inf
    )[None, None]
