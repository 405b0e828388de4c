"""The model's verbs on batches of lanes and of prompt blocks: the only file of the engine that computes.

Shapes: N lanes or blocks, S tokens of a block (1 in decoding), P pages a row, D width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from looplm.engine.batches import BlockBatch, LaneBatch
from looplm.engine.graphs import Capture, CoreCall, StepGraphs, bucket
from looplm.engine.kernels import Projection, for_decoding
from looplm.engine.kv_policies import KVPolicy
from looplm.engine.pages import SCRATCH
from looplm.engine.store import PAGE, PagedContext, PagedStore, Places, Pool
from looplm.models import LoopLMForCausalLM
from looplm.models.context import LoopContext, NoStore
from looplm.models.rotary import Tables, rotary_tables

ROWS = 16  # rows of a call in deterministic mode: a CPU's matrix products sum in an order that depends on their number


@dataclass(frozen=True, kw_only=True)
class PromptEnds:
    """Of the last tokens of E prompts: inputs [E, D], and the states before and after every loop [E, loops + 1, D]."""

    inputs: Tensor
    states: Tensor


@dataclass(frozen=True, kw_only=True)
class _Where:
    """What follows from positions alone, for a call of flat tokens [T]."""

    positions: Tensor
    rotary: Tables
    mask: Tensor


class Runner:
    """Lanes' tensors, and the verbs on them, for callers in inference mode.

    Lane `num_lanes` is nobody's: padding works on it.
    """

    def __init__(
        self, model: LoopLMForCausalLM, num_lanes: int, max_length: int, core: Pool, boundary: Pool,
        policy: KVPolicy, deterministic: bool, capture: Capture | None = None, fast: bool = False,
    ) -> None:  # fmt: skip
        config = self.config = model.config
        self.core, self.boundary, self.policy = core, boundary, policy
        self.deterministic = deterministic
        self.device, self.dtype = model.device, model.dtype
        shape = (num_lanes + 1, config.hidden_size)
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
        self._last_where: tuple[object, _Where] | None = None
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
        self.graphs = None if self._capture is None else StepGraphs(self._advance, self._idle, self._capture)

    # Decoding -------------------------------------------------------------------------------------------------

    def enter(self, batch: LaneBatch, starts: Tensor | None = None) -> None:
        """Embed the lanes' tokens, through the prelude: their inputs and start states (`starts` [N, D], if given)."""
        for part, rows in self._parts(batch):
            context, lanes = self._edge_context(part), self._tensor(part.lanes)
            inputs = self.backbone.embed(self._embedded(part.tokens), context)
            given = None if starts is None else _given(starts[rows.start : rows.stop], inputs)
            self.inputs.index_copy_(0, lanes, inputs)
            self.state.index_copy_(0, lanes, self.backbone.init_state(inputs, context, given))

    def step(self, batch: LaneBatch) -> None:
        """One application of the core to every lane, each at its own loop."""
        for part, _ in self._parts(batch):
            pages = part.core.shape[1]
            if self.graphs is None:
                self._advance(self._core_call(part), self._where(part.positions[:, None], pages))
            else:
                whole = part.padded(bucket(len(part)), self._nobody, bucket(pages))
                self.graphs.step(self._core_call(whole))

    def _advance(self, call: CoreCall, where: _Where | None = None) -> None:
        before, inputs = self.state.index_select(0, call.lanes), self.inputs.index_select(0, call.lanes)
        if where is None:
            where = self._place(call.positions[:, None], call.places.tables.shape[0] // call.places.rows)
        store = self._store(call.places, None)
        if self.policy.keeps != "newest":
            store = replace(store, sharing=self.policy, loop=call.loops, own=call.positions)
        after = self.backbone.step(before, inputs, call.loops, self._call(where, store, call.seeds))
        self.before.index_copy_(0, call.lanes, before)
        self.state.index_copy_(0, call.lanes, after)

    def _core_call(self, part: LaneBatch) -> CoreCall:
        lanes, _, positions, loops, seeds = self._tensor(part.numbers).unbind()
        places = self._places(part.core, part.positions[:, None])
        return CoreCall(lanes=lanes, loops=loops, positions=positions, seeds=seeds, places=places)

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

    # Prompts --------------------------------------------------------------------------------------------------

    def prefill(self, blocks: BlockBatch) -> PromptEnds:
        """All loops of prompt blocks, and the coda; keys and values of every loop go to their pages."""
        if not self.deterministic:
            return self._prefill(blocks)
        found = [self._prefill(blocks.take(number)) for number in range(len(blocks.tokens))]
        return PromptEnds(
            inputs=torch.cat([ends.inputs for ends in found]), states=torch.cat([ends.states for ends in found])
        )

    def _prefill(self, blocks: BlockBatch) -> PromptEnds:
        boundary = self._boundary(blocks.boundary, blocks.positions)
        stores = [self._store(self._places(tables, blocks.positions), boundary) for tables in blocks.core]
        seeds = self._tensor(blocks.seeds.repeat(PAGE))
        # Past the end lies only what fills up a prompt's last block.
        where = self._where(np.minimum(blocks.positions, self.max_length - 1), blocks.core.shape[-1])
        context = self._call(where, stores[0], seeds)
        inputs = self.backbone.embed(self._embedded(blocks.tokens.ravel()), context)
        state = self.backbone.init_state(inputs, context)
        ends = self._tensor(np.array([block * PAGE + offset for block, offset in blocks.ends], dtype=np.int64))
        states = [state[ends]]
        for loop, store in enumerate(stores, start=1):
            state = self.backbone.step(state, inputs, loop, replace(context, pages=store))
            states.append(state[ends])
        if self.config.coda_layers:
            self.backbone.readout(state, context)
        return PromptEnds(inputs=inputs[ends], states=torch.stack(states, dim=1))

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
        return self._call(where, self._store(None, boundary), seeds)

    def _call(self, where: _Where, store: PagedStore, seeds: Tensor) -> PagedContext:
        return PagedContext(
            position_ids=where.positions, rotary=where.rotary, mask=where.mask, store=NoStore(), past_length=1,
            state_seed=seeds, pages=store, blocks=where.mask.shape[0],
        )  # fmt: skip

    def _where(self, positions: np.ndarray, pages: int) -> _Where:
        """As in the call before, where that had the same positions [N, S]: lanes stay for several loops."""
        key = (positions.tobytes(), len(positions), pages)
        if self._last_where is None or self._last_where[0] != key:
            self._last_where = key, self._place(self._tensor(positions), pages)
        return self._last_where[1]

    def _place(self, positions: Tensor, pages: int) -> _Where:
        flat = positions.flatten()
        unseen = self.places[: pages * PAGE] > positions[..., None]
        return _Where(
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
