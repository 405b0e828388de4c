"""Conversations as ChatML documents whose assistant turns alone are targets, packed into rows epoch by epoch."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from looplm.data.files import Record, check_characters, read_records, value_of
from looplm.data.packing import Document, DocumentStore, pack, packed_row
from looplm.data.permutation import permute
from looplm.data.rows import Row
from looplm.data.tokenizer import CHAT_TOKENS, TURN_END, TURN_START, encode, padding_id

TooLong = Literal["drop", "truncate", "error"]
_ROLES = {"human": "user", "gpt": "assistant"}  # names that other formats use


class Turn(NamedTuple):
    """Who speaks, and what."""

    role: str
    content: str


class Conversation(NamedTuple):
    """Turns in order, and where they were read."""

    where: str
    turns: tuple[Turn, ...]


def read_conversations(
    path: str | Path, messages: str = "messages", prompt: str | None = None, answer: str | None = None,
    instruction: str | None = None,
) -> Iterator[Conversation]:  # fmt: skip
    """The conversations of a .jsonl, .parquet or .arrow file, a folder of them, or "hub:owner/name".

    A record has a list of turns under `messages`, each with role and content (or from and value); or a question and its
    answer under the fields `prompt` and `answer`, the question with `instruction` and an empty line before it.

    Raises:
        ValueError: for a record without these, named by file and line; or if there is no record.
    """
    record = None
    for record in read_records(path):
        if prompt is not None and answer is not None:
            pair = ((role, value_of(record, field)) for role, field in (("user", prompt), ("assistant", answer)))
            turns = [_turn(record, {"role": role, "content": content}) for role, content in pair]
            if instruction is not None:
                turns[0] = turns[0]._replace(content=f"{instruction}\n\n{turns[0].content}")
        else:
            found = value_of(record, messages)
            if not isinstance(found, Sequence) or isinstance(found, str):
                raise ValueError(f"{record.where}: '{messages}' is a {type(found).__name__}, not a list of turns")
            turns = [_turn(record, turn) for turn in found]
        yield Conversation(record.where, tuple(turns))
    if record is None:
        raise ValueError(f"'{path}' holds no conversation")


def chat_document(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Document:
    """ChatML: `<|im_start|>role`, a line break, the content, `<|im_end|>`, a line break, turn by turn.

    Targets are the content of the assistant's turns and the end token that closes each. What a turn says cannot forge a
    special token. No start-of-text token is added.

    Raises:
        ValueError: if the tokenizer lacks ChatML's tokens, or no token of the conversation is a target.
    """
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in CHAT_TOKENS)
    if not set(CHAT_TOKENS) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"the tokenizer has no special tokens {TURN_START} and {TURN_END}; "
            "add them with tokenizer.add_special_tokens({'extra_special_tokens': [...]})"
        )
    # An answer is a piece of its own, as it is when it is generated; what others say is one piece with its role.
    spoken = [turn.role == "assistant" for turn in conversation.turns]
    heads = [
        f"{turn.role}\n" + ("" if answer else turn.content)
        for turn, answer in zip(conversation.turns, spoken, strict=True)
    ]
    answers = [turn.content if answer else "" for turn, answer in zip(conversation.turns, spoken, strict=True)]
    *pieces, line = encode(tokenizer, [*heads, *answers, "\n"], plain=True)
    tokens: list[Any] = []
    is_target: list[bool] = []
    for answer, head, content in zip(spoken, pieces, pieces[len(heads) :], strict=False):
        tokens += [start, *head, *content, end, *line]
        is_target += [False] * (1 + len(head)) + [answer] * (len(content) + 1) + [False] * len(line)
    if not any(is_target):
        raise ValueError(f"{conversation.where} has no assistant turn, so no token of it would be learnt")
    return Document(tokens=tokens, is_target=is_target)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """What a model reads before it answers: text as it is, turns of role and content by the tokenizer's chat template.

    Raises:
        ValueError: for turns, if the tokenizer has no chat template, or it refuses them.
    """
    if isinstance(prompt, str):
        return encode(tokenizer, [prompt])[0]
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template for turns; give the prompt as text (chat=False)")
    return encode(tokenizer, [rendered(tokenizer, prompt, add_generation_prompt=True)])[0]


def rendered(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]], **options: Any) -> str:
    """Turns of role and content as the tokenizer's chat template spells them.

    Raises:
        ValueError: if the tokenizer has no chat template, or it refuses the turns.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; ask without turns, or give a chat model's tokenizer")
    given: dict[str, Any] = {**options, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template([dict(turn) for turn in turns], **given))
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from error


class ChatRows:
    """Conversations packed into rows of `length`: each epoch in an order of its own, next fit.

    Too long conversations are dropped or cut at the end (`dropped` and `truncated` count them), or refused. Held out is
    a share drawn at random, of several at least one, and never all.

    Raises:
        ValueError: if no conversation is left.
    """

    def __init__(
        self, conversations: Iterator[Conversation], tokenizer: PreTrainedTokenizerFast, length: int, seed: int,
        too_long: TooLong = "drop", held_out: float = 0.05, held_out_rows: int = 64,
    ) -> None:  # fmt: skip
        self._length, self._seed, self._pad = length, seed, padding_id(tokenizer)
        self._held_out_rows = held_out_rows
        self.dropped = self.truncated = 0
        fitted = (self._fitted(chat_document(tokenizer, each), each.where, too_long) for each in conversations)
        self._documents = DocumentStore(document for document in fitted if document is not None)
        if not len(self._documents):
            raise ValueError(f"no conversation fits into rows of {length} ({self.dropped} dropped); raise data.length")
        self._train, self._test = _split(len(self._documents), held_out)
        self._epochs: list[list[list[int]]] = []
        self._ends: list[int] = []  # rows up to the end of each epoch

    def row(self, index: int) -> Row:
        """The row number `index` since the start of the run."""
        while not self._ends or index >= self._ends[-1]:
            self._pack_epoch()
        epoch = bisect_right(self._ends, index)
        before = self._ends[epoch - 1] if epoch else 0
        return packed_row(
            [self._documents[number] for number in self._epochs[epoch][index - before]], self._length, self._pad
        )

    def rows_in_epochs(self, epochs: int) -> int:
        """The rows of the first `epochs` epochs."""
        while len(self._ends) < epochs:
            self._pack_epoch()
        return self._ends[epochs - 1]

    def held_out(self) -> list[Row]:
        """The conversations that training does not see, packed."""
        return pack([self._documents[number] for number in self._test], self._length, self._pad)[: self._held_out_rows]

    def _fitted(self, document: Document, where: str, too_long: TooLong) -> Document | None:
        size = len(document.tokens)
        if size <= self._length:
            return document
        if too_long == "error":
            raise ValueError(f"{where} has {size} tokens, more than a row's {self._length}; raise data.length")
        cut = Document(tokens=document.tokens[: self._length], is_target=document.is_target[: self._length])
        if too_long == "truncate" and any(cut.is_target):
            self.truncated += 1
            return cut
        self.dropped += 1
        return None

    def _pack_epoch(self) -> None:
        """Lay out the conversations of the next epoch's rows."""
        order = permute(np.arange(len(self._train)), len(self._train), [self._seed, len(self._epochs)])
        rows: list[list[int]] = []
        room = 0
        for place in order.tolist():
            number = self._train[place]
            size = self._documents.size(number)
            if size > room:
                rows.append([])
                room = self._length
            rows[-1].append(number)
            room -= size
        self._epochs.append(rows)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(rows))


def _split(size: int, held_out: float) -> tuple[list[int], list[int]]:
    """The numbers of the documents of the training part and of the held-out part, the same whatever the run's seed."""
    num_test = min(max(1, round(held_out * size)), size - 1) if held_out else 0
    order = permute(np.arange(size), size, [0]).tolist()
    return sorted(order[num_test:]), sorted(order[:num_test])


def _turn(record: Record, turn: Any) -> Turn:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{record.where}: a turn is a {type(turn).__name__}, not an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"{record.where}: a turn needs role and content as text, got {sorted(map(str, turn))}")
    return Turn(_ROLES.get(role, check_characters(record, role)), check_characters(record, content))
