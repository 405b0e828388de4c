"""The model's verbs on batches of lanes and of prompt blocks: the only file of the engine that computes.

Shapes: N lanes or blocks, S tokens of a block (1 in decoding), P pages a row, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from looplm.engine.batches import BlockBatch, LaneBatch
from looplm.engine.graphs import Capture, CoreCall, StepGraphs, Where, bucket
from looplm.engine.kernels import Projection, for_decoding
from looplm.engine.kv_policies import KVPolicy
from looplm.engine.pages import SCRATCH
from looplm.engine.store import PAGE, PagedContext, PagedStore, Part, Places, Pool
from looplm.models import LoopLMForCausalLM
from looplm.models.context import LoopContext, NoStore
from looplm.models.rotary import rotary_tables

ROWS = 16  # rows of a call in deterministic mode: a CPU's matrix products sum in an order that depends on their number


class Runner:
    """Lanes' tensors, and the verbs on them, for callers in inference mode.

    Lane `num_lanes` is nobody's: padding works on it. After it, every slot of a prompt's block has PAGE lanes.
    """

    def __init__(
        self, model: LoopLMForCausalLM, num_lanes: int, num_blocks: int, max_length: int, core: Pool, boundary: Pool,
        policy: KVPolicy, deterministic: bool, capture: Capture | None = None, fast: bool = False,
    ) -> None:  # fmt: skip
        config = self.config = model.config
        self.core, self.boundary, self.policy = core, boundary, policy
        self.deterministic = deterministic
        self.device, self.dtype = model.device, model.dtype
        shape = (num_lanes + 1 + num_blocks * PAGE, config.hidden_size)
        self.state, self.before, self.inputs = (
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(3)
        )
        places = torch.arange(bucket(-(-max_length // PAGE)) * PAGE, device=self.device)[None]
        tables = rotary_tables(places, config.head_dim, config.rope_theta, config.rope, self.dtype)
        self.cos, self.sin = (table[0].transpose(0, 1).contiguous() for table in tables)
        self.places, self.max_length = places[0], max_length
        self.seen, self.hidden = (
            torch.tensor(bias, dtype=self.dtype, device=self.device) for bias in (0.0, -torch.inf)
        )
        self._nobody, self._first_layer, self._core_layers = num_lanes, config.prelude_layers, config.core_layers
        self._last_where: dict[int, tuple[object, Where]] = {}
        self._capture, self._fast, self._read = capture, fast, list[int]()
        self.read_weights(model)

    def read_weights(self, model: LoopLMForCausalLM) -> None:
        """Compute with the model's weights as they are now, also where others have taken their place.

        Raises:
            ValueError: for another dtype or device than before.
        """
        if (model.dtype, model.device) != (self.dtype, self.device):
            raise ValueError(f"the model is {model.dtype} on '{model.device}' now; build a new Engine for it")
        if self._read == _addresses(model):
            return
        self.backbone, self.head = for_decoding(model, self._fast), Projection(model.lm_head.weight, model.lm_head.bias)
        self._read = _addresses(model)
        self.graphs = (
            None if self._capture is None else StepGraphs(lambda call: self._advance([call]), self._idle, self._capture)
        )

    # Tokens and prompts in the loop ---------------------------------------------------------------------------

    def enter(self, batch: LaneBatch, starts: Tensor | None = None) -> None:
        """Embed the lanes' tokens, through the prelude: their inputs and start states (`starts` [N, D], if given)."""
        for part, rows in self._parts(batch):
            context = self._edge_context(part)
            given = None if starts is None else starts[rows.start : rows.stop]
            self._begin(self._tensor(part.lanes), self._embedded(part.tokens), context, given)

    def enter_blocks(self, batch: BlockBatch) -> None:
        """The same for blocks of prompts."""
        for part in self._block_parts(batch):
            self._begin(self._block_lanes(part), self._embedded(part.tokens.ravel()), self._block_edge_context(part))

    def _begin(self, lanes: Tensor, embeds: Tensor, context: LoopContext, starts: Tensor | None = None) -> None:
        inputs = self.backbone.embed(embeds, context)
        given = None if starts is None else _given(starts, inputs)
        self.inputs.index_copy_(0, lanes, inputs)
        self.state.index_copy_(0, lanes, self.backbone.init_state(inputs, context, given))

    def step(self, batch: LaneBatch | None, blocks: BlockBatch | None = None) -> None:
        """One application of the core to every lane and block, each at its own loop.

        All are one call, but in deterministic mode, where their number would decide the rounding, and beside recorded
        graphs, which know lanes alone.
        """
        calls = []
        if batch is not None:
            for part, _ in self._parts(batch):
                if self.graphs is None:
                    calls.append(self._core_call(part))
                else:
                    whole = part.padded(bucket(len(part)), self._nobody, bucket(part.core.shape[1]))
                    self.graphs.step(self._core_call(whole))
        if blocks is not None:
            calls += [self._block_call(part) for part in self._block_parts(blocks)]
        for together in ([call] for call in calls) if self.deterministic else [calls]:
            if together:
                self._advance(together)

    def _advance(self, calls: Sequence[CoreCall]) -> None:
        lanes, loops, seeds = (
            torch.cat(found) if len(found) > 1 else found[0]
            for found in zip(*((call.lanes, call.loops, call.seeds) for call in calls), strict=True)
        )
        before, inputs = self.state.index_select(0, lanes), self.inputs.index_select(0, lanes)
        context = self._context([self._part(call) for call in calls], seeds)
        after = self.backbone.step(before, inputs, loops, context)
        self.before.index_copy_(0, lanes, before)
        self.state.index_copy_(0, lanes, after)

    def _part(self, call: CoreCall) -> Part:
        store = self._store(call.places, None)
        if self.policy.keeps != "newest" and call.decodes:
            store = replace(store, sharing=self.policy, loop=call.loops, own=call.positions)
        where = call.where or self._place(call.positions[:, None], call.places.tables.shape[0] // call.places.rows)
        return self._attending(where, store)

    def _core_call(self, part: LaneBatch) -> CoreCall:
        lanes, _, positions, loops, seeds = self._tensor(part.numbers).unbind()
        places = self._places(part.core, part.positions[:, None])
        where = None if self.graphs is not None else self._where(part.positions[:, None], part.core.shape[1])
        return CoreCall(lanes=lanes, loops=loops, positions=positions, seeds=seeds, places=places, where=where)

    def _block_call(self, part: BlockBatch) -> CoreCall:
        where = self._block_where(part, part.core.shape[1])
        return CoreCall(
            lanes=self._block_lanes(part), loops=self._tensor(part.loops.repeat(PAGE)), positions=where.positions,
            seeds=self._tensor(part.seeds.repeat(PAGE)), places=self._places(part.core, part.positions), where=where,
            decodes=False,
        )  # fmt: skip

    def _idle(self, call: CoreCall) -> CoreCall:
        """Nobody's lanes, all of them."""
        call.lanes.fill_(self._nobody)
        call.places.tables.fill_(SCRATCH)
        call.places.write.fill_(SCRATCH * PAGE)
        return call

    def read(self, batch: LaneBatch) -> tuple[Tensor, Tensor]:
        """hidden [N, D] and logits [N, V] of the lanes' states."""
        found = [
            self.backbone.readout(self.state.index_select(0, self._tensor(part.lanes)), self._edge_context(part))
            for part, _ in self._parts(batch)
        ]
        logits = torch.cat([self.head(hidden) for hidden in found])
        return torch.cat(found)[: len(batch)], logits[: len(batch)]

    def gate(self, lanes: np.ndarray) -> Tensor:
        """Exit logits [N] of the lanes' states."""
        count = len(lanes)
        if self.deterministic:
            lanes = np.pad(lanes, (0, -count % ROWS), constant_values=self._nobody)
        states = self.state.index_select(0, self._tensor(lanes))
        found = [self.backbone.gate(part) for part in states.split(ROWS if self.deterministic else len(lanes))]
        return torch.cat(found)[:count]

    def finite(self, lanes: np.ndarray) -> list[bool]:
        """Which lanes' states are numbers [N]."""
        return self.state.index_select(0, self._tensor(lanes)).isfinite().all(-1).tolist()

    def read_blocks(self, batch: BlockBatch) -> None:
        """The coda of blocks that have done all loops, for the keys and values that it leaves."""
        for part in self._block_parts(batch):
            states = self.state.index_select(0, self._block_lanes(part))
            self.backbone.readout(states, self._block_edge_context(part))

    def block_states(self, places: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Inputs and states [N, D] of the tokens at so many (slot, offset)."""
        lanes = self._tensor(np.array([self._nobody + 1 + slot * PAGE + offset for slot, offset in places]))
        return self.inputs.index_select(0, lanes), self.state.index_select(0, lanes)

    # Parts of a call ------------------------------------------------------------------------------------------

    def _parts(self, batch: LaneBatch) -> Iterator[tuple[LaneBatch, range]]:
        """The batch whole; in deterministic mode in parts of exactly ROWS lanes, the last one padded."""
        if not self.deterministic:
            yield batch, range(len(batch))
            return
        for first in range(0, len(batch), ROWS):
            rows = range(first, min(first + ROWS, len(batch)))
            part = batch.take(first, ROWS)
            yield (part if len(part) == ROWS else part.padded(ROWS, self._nobody, part.core.shape[1])), rows

    def _block_parts(self, batch: BlockBatch) -> Iterator[BlockBatch]:
        """The blocks all together; in deterministic mode one by one."""
        if not self.deterministic:
            yield batch
            return
        for number in range(len(batch)):
            yield batch.take(number)

    def _block_lanes(self, part: BlockBatch) -> Tensor:
        return self._tensor((self._nobody + 1 + part.slots[:, None] * PAGE + np.arange(PAGE)).ravel())

    def _block_where(self, part: BlockBatch, pages: int) -> Where:
        # Past the end lies only what fills up a prompt's last block.
        return self._where(np.minimum(part.positions, self.max_length - 1), pages)

    def _block_edge_context(self, part: BlockBatch) -> LoopContext:
        seeds, boundary = self._tensor(part.seeds.repeat(PAGE)), self._boundary(part.boundary, part.positions)
        where = self._block_where(part, part.core.shape[1])
        return self._context([self._attending(where, self._store(None, boundary))], seeds)

    def _edge_context(self, part: LaneBatch) -> LoopContext:
        """Of prelude and coda; without them, what embedding and start state ask for."""
        positions, seeds = self._tensor(part.positions), self._tensor(part.numbers[4])
        boundary = self._boundary(part.boundary, part.positions[:, None])
        if boundary is None:
            return LoopContext(
                position_ids=positions, rotary=(self.cos, self.sin), mask=None, store=NoStore(), past_length=1,
                state_seed=seeds,
            )  # fmt: skip
        where = self._where(part.positions[:, None], part.boundary.shape[1])
        return self._context([self._attending(where, self._store(None, boundary))], seeds)

    def _attending(self, where: Where, store: PagedStore) -> Part:
        return Part(
            positions=where.positions, rotary=where.rotary, mask=where.mask, pages=store, blocks=where.mask.shape[0]
        )

    def _context(self, parts: Sequence[Part], seeds: Tensor) -> PagedContext:
        positions = parts[0].positions if len(parts) == 1 else torch.cat([part.positions for part in parts])
        return PagedContext(
            position_ids=positions, rotary=(self.cos, self.sin), mask=None, store=NoStore(), past_length=1,
            state_seed=seeds, parts=parts,
        )  # fmt: skip

    def _where(self, positions: np.ndarray, pages: int) -> Where:
        """As in the call before, where that had the same positions [N, S]: lanes stay for several loops."""
        key, kind = (positions.tobytes(), pages), positions.shape[1]
        if kind not in self._last_where or self._last_where[kind][0] != key:
            self._last_where[kind] = key, self._place(self._tensor(positions), pages)
        return self._last_where[kind][1]

    def _place(self, positions: Tensor, pages: int) -> Where:
        flat = positions.flatten()
        unseen = self.places[: pages * PAGE] > positions[..., None]
        return Where(
            positions=flat,
            rotary=(self.cos.index_select(0, flat), self.sin.index_select(0, flat)),
            mask=torch.where(unseen, self.hidden, self.seen)[:, None],
        )

    def _store(self, core: Places | None, boundary: Places | None) -> PagedStore:
        return PagedStore(
            core=self.core, boundary=self.boundary, core_places=core, boundary_places=boundary,
            first=self._first_layer, layers=self._core_layers,
        )  # fmt: skip

    def _boundary(self, tables: np.ndarray, positions: np.ndarray) -> Places | None:
        return self._places(tables, positions) if tables.shape[1] else None

    def _places(self, tables: np.ndarray, positions: np.ndarray) -> Places:
        """Where tokens at `positions` [N, S] lie in pages `tables` [N, P]."""
        own = tables[np.arange(len(tables))[:, None], positions // PAGE]
        one_row = len(tables) > 1 and bool((tables == tables[0]).all())
        seen = tables[:1] if one_row else tables
        return Places(
            tables=self._tensor(seen.ravel()), write=self._tensor((own * PAGE + positions % PAGE).ravel()),
            rows=len(seen), blocks=len(tables),
        )  # fmt: skip

    def _embedded(self, tokens: np.ndarray) -> Tensor:
        return self.backbone.embed_tokens(self._tensor(tokens))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def _given(starts: Tensor, inputs: Tensor) -> Tensor:
    """Start states for some, and zeros for the padding."""
    given = torch.zeros_like(inputs)
    given[: len(starts)] = starts
    return given


def _addresses(model: LoopLMForCausalLM) -> list[int]:
    """Where the weights lie."""
    return [parameter.data_ptr() for parameter in model.parameters()]
