"""What a model reads: text with one start token at most, conversations as its chat template writes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from looplm.data.chat import rendered
from looplm.data.tokenizer import encode

Turns = Sequence[Mapping[str, str]]


def prefix_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that stands before a text with no context: the start token, else the end token.

    Raises:
        ValueError: if the tokenizer has neither.
    """
    found = tokenizer.bos_token_id
    found = tokenizer.eos_token_id if found is None else found
    if found is None:
        raise ValueError("the tokenizer has neither a start nor an end token; a text without context needs one")
    return found


def begins(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a start token before texts."""
    start = tokenizer.bos_token_id
    return start is not None and tokenizer("")["input_ids"][:1] == [start]


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, starts: bool | None = None) -> list[int]:
    """Token ids of `text`, with one start token where `starts` (the tokenizer) says so, also if the text holds it."""
    (tokens,) = encode(tokenizer, [text])
    if not (begins(tokenizer) if starts is None else starts):
        return tokens
    start = prefix_id(tokenizer)
    return tokens if tokens[:1] == [start] else [start, *tokens]


def asked_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Turns) -> list[int]:
    """What a model reads before it answers; an assistant's turn that comes last is to be continued.

    Nothing is added to what the template writes.

    Raises:
        ValueError: for turns, as `rendered` does.
    """
    if isinstance(prompt, str):
        return text_ids(tokenizer, prompt)
    ours = prompt[-1]["role"] == "assistant"
    return encode(
        tokenizer, [rendered(tokenizer, prompt, add_generation_prompt=not ours, continue_final_message=ours)]
    )[0]


def turn_ends(tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    """The special token that closes an answer in the template, which configs often do not name as an end (Ouro's)."""
    mark = "closing"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
    after = encode(tokenizer, [rendered(tokenizer, turns, **options).rpartition(mark)[2].lstrip()])[0]
    return [token for token in after[:1] if token in tokenizer.all_special_ids]
