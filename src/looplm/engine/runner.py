"""The model's verbs on batches of lanes and of prompt blocks: the only file of the engine that computes.

Shapes: N lanes or blocks, S tokens of a block (1 in decoding), P pages a row, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from looplm.engine.kernels import for_decoding
from looplm.engine.kv_policies import KVPolicy
from looplm.engine.pages import SCRATCH
from looplm.engine.store import PAGE, PagedStore, Places, Pool
from looplm.models import LoopLMForCausalLM
from looplm.models.context import LoopContext
from looplm.models.rotary import rotary_tables

ROWS = 16  # rows of a call in deterministic mode: a CPU's matrix products sum in an order that depends on their number


@dataclass(frozen=True, kw_only=True)
class LaneBatch:
    """Lanes of one call: their numbers, tokens and positions [N], the loop that each is to do, and its pages [N, P].

    `core` holds the pages of the slot of that very loop, `boundary` those of prelude and coda (no columns if neither).
    """

    lanes: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    loops: np.ndarray
    core: np.ndarray
    boundary: np.ndarray

    def __len__(self) -> int:
        return len(self.lanes)

    def take(self, index: np.ndarray) -> "LaneBatch":
        """Some of the lanes."""
        return LaneBatch(
            lanes=self.lanes[index], tokens=self.tokens[index], positions=self.positions[index],
            loops=self.loops[index], core=self.core[index], boundary=self.boundary[index],
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BlockBatch:
    """Blocks of prompts, PAGE tokens each, for a prefill of `loops` loops.

    tokens, positions: [N, PAGE] · core: [loops, N, P], boundary: [N, P], the pages of each block's row, its own at
    index positions // PAGE · seeds: [N], of the start state · ends: (block, offset) of the tokens whose states count.
    """

    tokens: np.ndarray
    positions: np.ndarray
    core: np.ndarray
    boundary: np.ndarray
    seeds: np.ndarray
    loops: int
    ends: Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class PromptEnds:
    """Of the last tokens of E prompts: inputs [E, D], states before and after every loop [E, loops + 1, D], gates."""

    inputs: Tensor
    states: Tensor
    gates: Tensor | None


class Runner:
    """Lanes' tensors, and the verbs on them. Lane `num_lanes` is nobody's: padding works on it."""

    def __init__(
        self, model: LoopLMForCausalLM, num_lanes: int, max_length: int, core: Pool, boundary: Pool,
        policy: KVPolicy, deterministic: bool,
    ) -> None:  # fmt: skip
        self.config = model.config
        self.model = for_decoding(model)
        self.backbone = self.model.model
        self.core, self.boundary, self.policy = core, boundary, policy
        self.deterministic = deterministic
        self.device, self.dtype = model.device, model.dtype
        shape = (num_lanes + 1, self.config.hidden_size)
        self.state, self.before, self.inputs = (
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(3)
        )
        gates = torch.zeros(num_lanes + 1, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        self.gate = gates if self.config.exit_gate else None
        self.seeds = torch.zeros(num_lanes + 1, dtype=torch.int64, device=self.device)
        places = torch.arange(max_length, device=self.device)[None]
        config = self.config
        cos, sin = rotary_tables(places, config.head_dim, config.rope_theta, config.rope, self.dtype)
        self.cos, self.sin = cos[0, 0], sin[0, 0]

    # Decoding -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def enter(self, batch: LaneBatch, starts: Tensor | None = None) -> None:
        """Embed the lanes' tokens, through the prelude: their inputs and start states (`starts` [N, D], if given)."""
        for part, rows in self._parts(batch):
            context = self._context(part, decode=False)
            inputs = self.backbone.embed(self._embedded(part.tokens[:, None]), context)
            given = None if starts is None else self._given(starts, rows, inputs)
            lanes = self._tensor(part.lanes)
            self.inputs[lanes] = inputs[:, 0]
            self.state[lanes] = self.backbone.init_state(inputs, context, given)[:, 0]

    @torch.no_grad()
    def step(self, batch: LaneBatch) -> None:
        """One application of the core to every lane, each at its own loop; the gate of the new states."""
        for part, _ in self._parts(batch):
            lanes, loops = self._tensor(part.lanes), self._tensor(part.loops)
            before = self.state[lanes]
            context = self._context(part, decode=True)
            after = self.backbone.step(before[:, None], self.inputs[lanes][:, None], loops, context)
            self.before[lanes], self.state[lanes] = before, after[:, 0]
            if self.gate is not None:
                self.gate[lanes] = self.backbone.gate(after)[:, 0].to(self.gate.dtype)

    @torch.no_grad()
    def read(self, batch: LaneBatch) -> tuple[Tensor, Tensor]:
        """hidden [N, D] and logits [N, V] of the lanes' states."""
        hidden, logits = [], []
        for part, _ in self._parts(batch):
            state = self.state[self._tensor(part.lanes)][:, None]
            found = self.backbone.readout(state, self._context(part, decode=False))[:, 0]
            hidden.append(found)
            logits.append(self.model.lm_head(found))
        count = len(batch)
        return torch.cat(hidden)[:count], torch.cat(logits)[:count]

    def finite(self, lanes: np.ndarray) -> np.ndarray:
        """Which lanes' states are numbers [N]."""
        return self.state[self._tensor(lanes)].isfinite().all(-1).cpu().numpy()

    # Prompts --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, blocks: BlockBatch) -> PromptEnds:
        """All loops of prompt blocks, and the coda; keys and values of every loop go to their pages."""
        if not self.deterministic:
            return self._prefill(blocks)
        found = [self._prefill(_block(blocks, number)) for number in range(len(blocks.tokens))]
        gates = [ends.gates for ends in found if ends.gates is not None]
        return PromptEnds(
            inputs=torch.cat([ends.inputs for ends in found]),
            states=torch.cat([ends.states for ends in found]),
            gates=torch.cat(gates) if gates else None,
        )

    def _prefill(self, blocks: BlockBatch) -> PromptEnds:
        positions = self._tensor(blocks.positions)
        mask = self._mask(positions, blocks.core.shape[-1])
        boundary = None if blocks.boundary.shape[1] == 0 else self._places(blocks.boundary, positions)
        stores = [self._store(self._places(tables, positions), boundary) for tables in blocks.core]
        context = self._call(positions, mask, stores[0], self._tensor(blocks.seeds))
        inputs = self.backbone.embed(self._embedded(blocks.tokens), context)
        state = self.backbone.init_state(inputs, context)
        rows, offsets = (self._tensor(np.array(part, dtype=np.int64)) for part in _columns(blocks.ends))
        states, gates = [state[rows, offsets]], []
        for loop, store in enumerate(stores, start=1):
            state = self.backbone.step(state, inputs, loop, replace(context, store=store))
            states.append(state[rows, offsets])
            if self.gate is not None:
                gates.append(self.backbone.gate(state)[rows, offsets])
        if self.config.coda_layers:
            self.backbone.readout(state, context)
        return PromptEnds(
            inputs=inputs[rows, offsets],
            states=torch.stack(states, dim=1),
            gates=torch.stack(gates, dim=1) if gates else None,
        )

    # Parts of a call ------------------------------------------------------------------------------------------

    def _parts(self, batch: LaneBatch) -> Iterator[tuple[LaneBatch, range]]:
        """The batch whole; in deterministic mode in parts of exactly ROWS lanes, the last one padded."""
        if not self.deterministic:
            yield batch, range(len(batch))
            return
        for first in range(0, len(batch), ROWS):
            rows = range(first, min(first + ROWS, len(batch)))
            part = batch.take(np.arange(rows.start, rows.stop))
            yield (part if len(rows) == ROWS else self._padded(part)), rows

    def _padded(self, part: LaneBatch) -> LaneBatch:
        short = ROWS - len(part)
        lanes = np.pad(part.lanes, (0, short), constant_values=len(self.state) - 1)
        tokens, positions = (np.pad(column, (0, short)) for column in (part.tokens, part.positions))
        core, boundary = (
            np.pad(table, ((0, short), (0, 0)), constant_values=SCRATCH) for table in (part.core, part.boundary)
        )
        loops = np.pad(part.loops, (0, short), constant_values=1)
        return LaneBatch(
            lanes=lanes, tokens=tokens, positions=positions, loops=loops, core=core, boundary=boundary
        )  # fmt: skip

    def _context(self, part: LaneBatch, decode: bool) -> LoopContext:
        positions = self._tensor(part.positions)[:, None]
        boundary = None if part.boundary.shape[1] == 0 else self._places(part.boundary, positions)
        store = self._store(self._places(part.core, positions), boundary)
        if decode and self.policy.keeps != "newest":
            store = replace(store, sharing=self.policy, loop=self._tensor(part.loops), own=positions[:, 0])
        mask = self._mask(positions, part.core.shape[1])
        return self._call(positions, mask, store, self.seeds[self._tensor(part.lanes)])

    def _call(self, positions: Tensor, mask: Tensor, store: PagedStore, seeds: Tensor) -> LoopContext:
        known = positions.clamp(max=len(self.cos) - 1)  # past the end lies only what fills up a prompt's last block
        return LoopContext(
            position_ids=known, rotary=(self.cos[known][:, None], self.sin[known][:, None]), mask=mask,
            store=store, past_length=1, state_seed=seeds,
        )  # fmt: skip

    def _store(self, core: Places, boundary: Places | None) -> PagedStore:
        return PagedStore(
            core=self.core, boundary=self.boundary, core_places=core, boundary_places=boundary,
            first=self.config.prelude_layers, layers=self.config.core_layers,
        )  # fmt: skip

    def _places(self, tables: np.ndarray, positions: Tensor) -> Places:
        """Where tokens at `positions` [N, S] lie in pages `tables` [N, P]."""
        pages = self._tensor(tables)
        own = pages.gather(1, positions // PAGE)
        one_row = len(tables) > 1 and bool((tables == tables[0]).all())
        return Places(tables=pages[:1] if one_row else pages, write=(own * PAGE + positions % PAGE).flatten())

    def _mask(self, positions: Tensor, pages: int) -> Tensor:
        """What is added to the scores [N, 1, S, P * PAGE]: tokens after a token's own position are hidden from it."""
        keys = torch.arange(pages * PAGE, device=self.device)
        hidden = keys > positions[..., None]
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)[:, None]

    def _embedded(self, tokens: np.ndarray) -> Tensor:
        return self.backbone.embed_tokens(self._tensor(tokens))

    def _given(self, starts: Tensor, rows: range, inputs: Tensor) -> Tensor:
        given = torch.zeros_like(inputs)
        given[: len(rows), 0] = starts[rows.start : rows.stop]
        return given

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def _block(blocks: BlockBatch, number: int) -> BlockBatch:
    """One block of several, as a batch."""
    only = slice(number, number + 1)
    return BlockBatch(
        tokens=blocks.tokens[only], positions=blocks.positions[only], core=blocks.core[:, only],
        boundary=blocks.boundary[only], seeds=blocks.seeds[only], loops=blocks.loops,
        ends=[(0, offset) for block, offset in blocks.ends if block == number],
    )  # fmt: skip


def _columns(ends: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [block for block, _ in ends], [offset for _, offset in ends]
