"""Documents packed into rows of equal length, each document blind to the others."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from looplm.data.rows import IGNORED, Row


@dataclass(frozen=True, kw_only=True)
class Document:
    """Token ids, and for each whether it is a target of the loss."""

    tokens: Sequence[int]
    is_target: Sequence[bool]


class DocumentStore:
    """Documents by number, held end to end in five bytes a token."""

    def __init__(self, documents: Iterable[Document]) -> None:
        tokens, is_target, ends = array("i"), bytearray(), [0]
        for document in documents:
            tokens.extend(document.tokens)
            is_target.extend(document.is_target)
            ends.append(len(tokens))
        self._tokens, self._is_target = np.asarray(tokens, dtype=np.int32), np.frombuffer(is_target, dtype=np.bool_)
        self._ends = np.asarray(ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Document:
        part = slice(self._ends[number], self._ends[number + 1])
        return Document(tokens=self._tokens[part].tolist(), is_target=self._is_target[part].tolist())

    def size(self, number: int) -> int:
        """How many tokens a document has."""
        return int(self._ends[number + 1] - self._ends[number])


def pack(documents: Sequence[Document], length: int, pad: int = 0) -> list[Row]:
    """Rows of `length` tokens that hold all documents: first fit, in order.

    Raises:
        ValueError: if a document is longer than a row.
    """
    rows: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        size = len(document.tokens)
        row = next((row for row, free in enumerate(room) if free >= size), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(document)
        room[row] -= size
    return [packed_row(row, length, pad) for row in rows]


def packed_row(documents: Sequence[Document], length: int, pad: int) -> Row:
    """One row of `length` tokens: the documents one after another, then padding.

    Positions restart with every document, which is how the model keeps packed documents apart; padding restarts at
    every token and is no target. A document's first token is never a target. Masks follow the documents' lengths, never
    ids, so that a padding id which is also the end token hides no end.

    Raises:
        ValueError: if the documents are longer than the row.
    """
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for document in documents:
        tokens += document.tokens
        positions += range(len(document.tokens))
        targets = zip(document.tokens[1:], document.is_target[1:], strict=True)
        labels += [IGNORED, *(token if counts else IGNORED for token, counts in targets)]
    missing = length - len(tokens)
    if missing < 0:
        raise ValueError(f"a document of {len(tokens)} tokens does not fit into rows of {length}")
    return {
        "input_ids": torch.tensor(tokens + [pad] * missing),
        "labels": torch.tensor(labels + [IGNORED] * missing),
        "position_ids": torch.tensor(positions + [0] * missing),
    }
