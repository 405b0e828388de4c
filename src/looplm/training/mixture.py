"""The sources that a recipe names, and the plan that deals a step's rows to them."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from looplm.data.chat import ChatRows, read_conversations
from looplm.data.packing import Document, pack, packed_row
from looplm.data.rows import Row, RowSource, stack
from looplm.data.shards import TokenShards
from looplm.data.text import read_documents
from looplm.data.tokenizer import encode, padding_id
from looplm.data.windows import TextWindows, split_documents
from looplm.tasks import Example
from looplm.training.data_recipe import ChatSource, Data, ShardSource, Source, TaskSource, TextSource

_HELD_OUT_SEED = 10**9  # far from any training row's questions
_HASHED = 16  # rows of a source; they are drawn from all over it
_PER_ROW = 1024  # more questions than a row can hold


class TaskRows:
    """Rows filled with questions of a task until the next one does not fit; held out is the task's test split."""

    def __init__(self, source: TaskSource, length: int, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
        self._source, self._length, self._seed, self._tokenizer = source, length, seed, tokenizer
        self.row(0)

    def row(self, index: int) -> Row:
        """The row number `index` since the start of the run."""
        first = (self._seed * 2**32 + index) * _PER_ROW
        documents: list[Document] = []
        used = 0
        for number in range(_PER_ROW):
            document = self._document(self._source.task.example(first + number))
            if used + len(document.tokens) > self._length:
                break
            documents.append(document)
            used += len(document.tokens)
        if not documents:
            raise ValueError(f"a question of the task does not fit into rows of {self._length}; raise data.length")
        return packed_row(documents, self._length, padding_id(self._tokenizer))

    def rows_in_epochs(self, epochs: int) -> None:
        """Questions never end."""
        return

    def held_out(self) -> list[Row]:
        """Questions of the test split."""
        test = replace(self._source.task, split="test")
        numbers = range(_HELD_OUT_SEED, _HELD_OUT_SEED + self._source.held_out_questions)
        documents = [self._document(test.example(number)) for number in numbers]
        return pack(documents, self._length, padding_id(self._tokenizer))

    def _document(self, example: Example) -> Document:
        prompt, answer = encode(self._tokenizer, [example.prompt, example.answer])
        return Document(tokens=prompt + answer, is_target=[False] * len(prompt) + [True] * len(answer))


class Mixture:
    """Named sources of rows, and how many rows each gives to a step."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.data = data
        self.seed = seed
        self.pad = padding_id(tokenizer)
        total = sum(Fraction(source.share) for source in data.sources.values())
        self.shares = {name: Fraction(source.share) / total for name, source in data.sources.items()}
        self.sources = {
            name: _open(source, data.length, _seed_of(seed, index), tokenizer)
            for index, (name, source) in enumerate(data.sources.items())
        }

    def held_out(self) -> dict[str, dict[str, Tensor]]:
        """The held-out batch of every source that has one."""
        rows = {name: source.held_out() for name, source in self.sources.items()}
        return {name: stack(found) for name, found in rows.items() if found}

    def fingerprints(self) -> dict[str, str]:
        """A hash of every source's rows: how many an epoch has, and what the first of them hold."""
        return {name: _fingerprint(source) for name, source in self.sources.items()}

    def deal(self, counts: Mapping[str, int], num_rows: int) -> list[tuple[str, int]]:
        """(source, row of that source) of the next `num_rows` rows, after `counts` rows of each were taken.

        Of the sources that have less than their share, each row goes to the one that would first have too little (the
        earliest deadline), in exact fractions: counts stay within one row of the shares, for ever.
        """
        shares = self.shares
        taken = {name: counts.get(name, 0) for name in shares}
        done = sum(taken.values())
        dealt = []
        for number in range(done + 1, done + num_rows + 1):
            due = [name for name, share in shares.items() if taken[name] < share * number]
            name = min(due, key=lambda name: (taken[name] + 1) / shares[name])
            dealt.append((name, taken[name]))
            taken[name] += 1
        return dealt

    def rows_in_epochs(self, epochs: int) -> int:
        """How many rows until the first source has been through so many epochs; the others may be cut short.

        Raises:
            ValueError: if no source ever repeats.
        """
        lengths = {name: source.rows_in_epochs(epochs) for name, source in self.sources.items()}
        ends = [rows / self.shares[name] for name, rows in lengths.items() if rows is not None]
        if not ends:
            raise ValueError("epochs needs a source that ends; tasks never do: give steps instead")
        return math.ceil(min(ends))

    def steps_in_epochs(self, epochs: int) -> int:
        """The steps until then; the last may have fewer rows."""
        left, steps = self.rows_in_epochs(epochs), 0
        while left > 0:
            left -= self.data.rows_at(steps)
            steps += 1
        return steps


def _fingerprint(source: RowSource) -> str:
    epoch = source.rows_in_epochs(1)
    found = hashlib.blake2b(str(epoch).encode(), digest_size=16)
    for index in range(_HASHED if epoch is None else min(_HASHED, epoch)):
        for _, column in sorted(source.row(index).items()):
            found.update(column.numpy().tobytes())
    return found.hexdigest()


def _seed_of(seed: int, index: int) -> int:
    """A seed of a source's own: sources of one run, and those of runs with other seeds, share no order."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def _open(source: Source, length: int, seed: int, tokenizer: PreTrainedTokenizerFast) -> RowSource:
    if isinstance(source, TextSource):
        documents = encode(tokenizer, read_documents(source.path, source.field), plain=True)
        return TextWindows(*split_documents(documents, source.held_out), length, seed, source.held_out_rows)
    if isinstance(source, ShardSource):
        held_out = None if source.held_out is None else TokenShards(source.held_out, tokenizer)
        return TextWindows(TokenShards(source.path, tokenizer), held_out, length, seed, source.held_out_rows)
    if isinstance(source, ChatSource):
        conversations = read_conversations(
            source.path, source.messages, source.prompt, source.answer, source.instruction
        )
        return ChatRows(conversations, tokenizer, length, seed, source.too_long, source.held_out, source.held_out_rows)
    return TaskRows(source, length, seed, tokenizer)
