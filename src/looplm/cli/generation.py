"""`looplm generate`: a prompt continued by transformers' generate, or token by token with exits."""

from dataclasses import dataclass
from typing import Any

import torch

from looplm.analysis.exit_decoding import decode_with_exits
from looplm.cli.paths import open_checkpoint
from looplm.data.tokenizer import load_tokenizer
from looplm.models import load
from looplm.models.tokens import end_token_ids


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What was made; `loops_per_token` is None where every token ran all loops."""

    text: str
    tokens: list[int]
    loops_per_token: list[int] | None


def continue_prompt(
    checkpoint: str, prompt: str, loops: int | None, exit_threshold: float | None, max_tokens: int,
    temperature: float, seed: int,
) -> Continuation:  # fmt: skip
    """Continue `prompt` at a fixed depth, or read each token at its own exit loop."""
    folder = open_checkpoint(checkpoint)
    model = load(folder)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].long()
    if ids.shape[1] == 0:
        raise ValueError("the prompt is empty; give at least one token")
    ends = end_token_ids(model, tokenizer.eos_token_id)
    if exit_threshold is not None:
        generator = torch.Generator().manual_seed(seed)
        made = decode_with_exits(model, ids, exit_threshold, max_tokens, temperature, loops, generator, ends)
        tokens, depths = [token.token for token in made], [token.loop for token in made]
    else:
        torch.manual_seed(seed)
        sampling: dict[str, Any] = (
            {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        )
        whole = model.generate(
            ids, max_new_tokens=max_tokens, loops=loops, eos_token_id=sorted(ends) or None, **sampling
        )
        tokens, depths = whole[0, ids.shape[1] :].tolist(), None
    return Continuation(text=str(tokenizer.decode(tokens)), tokens=tokens, loops_per_token=depths)
