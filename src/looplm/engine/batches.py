"""Lanes and prompt blocks as the arrays that the runner takes."""

from collections.abc import Sequence

import numpy as np

from looplm.engine.memory import Memory
from looplm.engine.requests import Lane, Row
from looplm.engine.runner import BlockBatch, LaneBatch
from looplm.engine.store import PAGE


def lane_batch(lanes: Sequence[Lane], memory: Memory) -> LaneBatch:
    """The lanes at the loop that they are about to do; the last one's slot where they have left."""
    positions = np.array([lane.position for lane in lanes])
    loops = np.array([min(lane.loop + 1, lane.last) for lane in lanes])
    rows = np.array([lane.row.number for lane in lanes])
    pages = int(positions.max()) // PAGE + 1
    return LaneBatch(
        lanes=np.array([lane.number for lane in lanes]),
        tokens=np.array([lane.token for lane in lanes]),
        positions=positions,
        loops=loops,
        core=memory.core_tables[rows, memory.slots[loops], :pages],
        boundary=memory.boundary_tables[rows, : pages if memory.has_boundary else 0],
        seeds=np.array([lane.row.request.state_seed for lane in lanes]),
    )


def block_batch(blocks: Sequence[tuple[Row, int]], loops: int, memory: Memory) -> BlockBatch:
    """Blocks of prompts; `ends` are those that end one."""
    tokens = np.zeros((len(blocks), PAGE), dtype=np.int64)
    ends = []
    for place, (row, block) in enumerate(blocks):
        piece = row.request.prompt[block * PAGE : (block + 1) * PAGE]
        tokens[place, : len(piece)] = piece
        if block + 1 == row.prompt_blocks:
            ends.append((place, len(piece) - 1))
    numbers = np.array([row.number for row, _ in blocks])
    first = np.array([block for _, block in blocks]) * PAGE
    pages = int(first.max()) // PAGE + 1
    return BlockBatch(
        tokens=tokens,
        positions=first[:, None] + np.arange(PAGE),
        core=memory.core_tables[numbers, :loops, :pages].swapaxes(0, 1),
        boundary=memory.boundary_tables[numbers, : pages if memory.has_boundary else 0],
        seeds=np.array([row.request.state_seed for row, _ in blocks]),
        loops=loops,
        ends=ends,
    )
