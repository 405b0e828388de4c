"""What a row of a batch is, and what every source of rows can say."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

IGNORED = -100
Row = dict[str, Tensor]


class RowSource(Protocol):
    """An endless sequence of rows in which `row(index)` depends on `index` alone, so that a counter is all its state.

    A row has `input_ids`, `labels` (-100 where no target; never a document's first token) and `position_ids` (from 0 in
    every document), each int64 [length].
    """

    def row(self, index: int) -> Row:
        """The row number `index` since the start of the run; a finite source goes on with its next epoch."""
        ...

    def rows_in_epochs(self, epochs: int) -> int | None:
        """How many rows the first `epochs` epochs have; None if the source never repeats."""
        ...

    def held_out(self) -> list[Row]:
        """Rows that training never sees, always the same."""
        ...


def stack(rows: Sequence[Row]) -> dict[str, Tensor]:
    """The batch [B, length] of some rows."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def empty_row(length: int, pad: int) -> Row:
    """A row of padding without targets."""
    return {
        "input_ids": torch.full((length,), pad),
        "labels": torch.full((length,), IGNORED),
        "position_ids": torch.zeros(length, dtype=torch.int64),
    }
