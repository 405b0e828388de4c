"""Lanes and prompt blocks as the arrays that the runner takes.

Shapes: N lanes or blocks, P pages of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looplm.engine.memory import Memory
from looplm.engine.pages import BLANK, SCRATCH
from looplm.engine.requests import Lane, PromptBlock
from looplm.engine.store import PAGE


@dataclass(frozen=True, kw_only=True)
class LaneBatch:
    """Lanes of one call.

    numbers: [5, N], each lane's own number, its token, its position, the loop that it is to do, and its start seed
    core, boundary: [N, P], the pages of the slot of that very loop, and those of prelude and coda (no columns if
        neither).
    """

    numbers: np.ndarray
    core: np.ndarray
    boundary: np.ndarray

    def __len__(self) -> int:
        return self.numbers.shape[1]

    @property
    def lanes(self) -> np.ndarray:
        """[N]."""
        return self.numbers[0]

    @property
    def tokens(self) -> np.ndarray:
        """[N]."""
        return self.numbers[1]

    @property
    def positions(self) -> np.ndarray:
        """[N]."""
        return self.numbers[2]

    def take(self, first: int, count: int) -> "LaneBatch":
        """`count` of the lanes from `first` on."""
        rows = slice(first, first + count)
        return LaneBatch(numbers=self.numbers[:, rows], core=self.core[rows], boundary=self.boundary[rows])

    def padded(self, rows: int, nobody: int, pages: int) -> "LaneBatch":
        """Lane `nobody` added until there are so many rows, and blank pages until there are so many."""
        short, blank = rows - len(self), pages - self.core.shape[1]
        filling = np.array([[nobody], [0], [0], [1], [0]]).repeat(short, axis=1)
        core = np.pad(self.core, ((0, 0), (0, blank)), constant_values=BLANK)
        core, boundary = (
            np.pad(table, ((0, short), (0, 0)), constant_values=SCRATCH) for table in (core, self.boundary)
        )
        return LaneBatch(numbers=np.concatenate([self.numbers, filling], axis=1), core=core, boundary=boundary)


@dataclass(frozen=True, kw_only=True)
class BlockBatch:
    """Blocks of prompts, PAGE tokens each, in one call.

    slots: [N], where each keeps its tokens' states · tokens, positions: [N, PAGE] · loops: [N], which each is to do
    core, boundary: [N, P], the pages of each block's row at that loop, its own at index positions // PAGE
    seeds: [N], of the start state.
    """

    slots: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    loops: np.ndarray
    core: np.ndarray
    boundary: np.ndarray
    seeds: np.ndarray

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, number: int) -> "BlockBatch":
        """One of the blocks, as a batch."""
        only = slice(number, number + 1)
        return BlockBatch(
            slots=self.slots[only], tokens=self.tokens[only], positions=self.positions[only], loops=self.loops[only],
            core=self.core[only], boundary=self.boundary[only], seeds=self.seeds[only],
        )  # fmt: skip


def lane_batch(lanes: Sequence[Lane], memory: Memory) -> LaneBatch:
    """The lanes at the loop that they are about to do; the last one's slot where they have left."""
    numbers = np.array(
        [
            (lane.number, lane.token, lane.position, min(lane.loop + 1, lane.last), lane.row.request.state_seed)
            for lane in lanes
        ],
        dtype=np.int64,
    ).T  # fmt: skip
    rows = [lane.row.number for lane in lanes]
    pages = int(numbers[2].max()) // PAGE + 1
    return LaneBatch(
        numbers=numbers,
        core=memory.core_tables[rows, memory.slots[numbers[3]], :pages],
        boundary=memory.boundary_tables[rows, : pages if memory.has_boundary else 0],
    )


def block_batch(blocks: Sequence[PromptBlock], memory: Memory) -> BlockBatch:
    """Blocks of prompts at the loop that they are about to do; the last one's pages where they have done all."""
    tokens = np.zeros((len(blocks), PAGE), dtype=np.int64)
    for place, block in enumerate(blocks):
        tokens[place, : len(block.tokens)] = block.tokens
    slots, rows, indices, loops, seeds = np.array(
        [
            (block.slot, block.row.number, block.index, min(block.loop + 1, block.last), block.row.request.state_seed)
            for block in blocks
        ],
        dtype=np.int64,
    ).T
    pages = int(indices.max()) + 1
    return BlockBatch(
        slots=slots,
        tokens=tokens,
        positions=indices[:, None] * PAGE + np.arange(PAGE),
        loops=loops,
        core=memory.core_tables[rows, loops - 1, :pages],
        boundary=memory.boundary_tables[rows, : pages if memory.has_boundary else 0],
        seeds=seeds,
    )
