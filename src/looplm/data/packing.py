"""Documents packed into rows of equal length, each document blind to the others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Document:
    """Token ids, and for each whether it is a target of the loss."""

    tokens: Sequence[int]
    is_target: Sequence[bool]


def pack(documents: Sequence[Document], length: int, pad: int = 0) -> dict[str, Tensor]:
    """Rows [R, length] of `input_ids`, `labels` (-100 where no target) and `position_ids`.

    First fit, in order. Positions restart with every document, which is how the model keeps packed documents apart;
    padding at a row's end restarts at every token and is no target. A document's first token is never a target.

    Raises:
        ValueError: if a document is longer than a row.
    """
    rows: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        size = len(document.tokens)
        if size > length:
            raise ValueError(f"a document of {size} tokens does not fit into rows of {length}")
        row = next((row for row, free in enumerate(room) if free >= size), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(document)
        room[row] -= size
    return _stack([_row(row, length, pad) for row in rows])


def _row(documents: list[Document], length: int, pad: int) -> dict[str, list[int]]:
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for document in documents:
        tokens += document.tokens
        positions += range(len(document.tokens))
        targets = zip(document.tokens[1:], document.is_target[1:], strict=True)
        labels += [IGNORED, *(token if counts else IGNORED for token, counts in targets)]
    missing = length - len(tokens)
    return {
        "input_ids": tokens + [pad] * missing,
        "labels": labels + [IGNORED] * missing,
        "position_ids": positions + [0] * missing,
    }


def _stack(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
