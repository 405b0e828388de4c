"""Decoding that shows the loop each token was read at: all loops run, and the exit rule picks a stored state."""

from dataclasses import dataclass

import torch
from torch import Tensor

from looplm.models import LoopLMForCausalLM
from looplm.models.tokens import end_token_ids


@dataclass(frozen=True, kw_only=True)
class ExitToken:
    """A generated token and the 1-based loop that its exit rule picked."""

    token: int
    loop: int


@torch.no_grad()
def decode_with_exits(
    model: LoopLMForCausalLM, input_ids: Tensor, q: float, max_new_tokens: int, temperature: float = 0.0,
    loops: int | None = None, generator: torch.Generator | None = None,
    ends: set[int] | None = None,
) -> list[ExitToken]:  # fmt: skip
    """Continue one prompt [1, S]; each token comes from the logits of the first loop whose exit CDF reaches `q`.

    Greedy at temperature 0, else sampled. Stops at any of `ends` (by default `end_token_ids`), which is included.
    """
    made: list[ExitToken] = []
    ends = end_token_ids(model) if ends is None else ends
    cache, new = None, input_ids
    while len(made) < max_new_tokens:
        out = model(new, cache=cache, use_cache=True, loops=loops, keep_loops="all", logits_to_keep=1)
        cache = out.cache
        logits = model.logits_at_exit(out, q)[:, -1].float()
        if temperature > 0:
            new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            new = logits.argmax(-1, keepdim=True)
        made.append(ExitToken(token=int(new), loop=int(model.exit_loops(out, q)[0, -1])))
        if made[-1].token in ends:
            break
    return made
