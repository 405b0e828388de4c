"""Which row has which pages: tables, growth, folding after a prefill, and giving back."""

import numpy as np
from torch import Tensor

from looplm.engine.kv_policies import KVPolicy
from looplm.engine.pages import BLANK, Block, Pages, PrefixCache
from looplm.engine.requests import Row
from looplm.engine.store import PAGE, Pool, fold
from looplm.models import LoopLMConfig


class Memory:
    """The pools, their pages, and the tables [rows, tables, blocks] through which rows see them.

    While a prompt is prefilled every loop has a table of its own; afterwards every slot of the policy. Prelude and coda
    layers share a second pool with one table a row.
    """

    def __init__(
        self, config: LoopLMConfig, like: Tensor, policy: KVPolicy, loops: int, rows: int, max_length: int,
        budget: int,
    ) -> None:  # fmt: skip
        self.config, self.policy, self.loops = config, policy, loops
        self.max_blocks = -(-max_length // PAGE)
        edge_layers = config.prelude_layers + config.coda_layers
        token = 2 * config.num_key_value_heads * config.head_dim * like.element_size() * PAGE
        block = token * (config.core_layers * policy.slots(loops) + edge_layers)
        # Beside all rows' longest texts, one prompt has room for every loop while it is prefilled.
        most = rows * self.max_blocks + -(-self.max_blocks * (loops - policy.slots(loops)) // policy.slots(loops))
        least = -(-loops // policy.slots(loops)) + 1  # one block of prompt, all loops of it
        blocks = min(budget // block, max(most, least))
        if blocks < least:
            raise ValueError(
                f"kv_bytes={budget} is too little; a prompt of one token takes {least * block} at {loops} loops"
            )
        num_core, num_boundary = blocks * policy.slots(loops), blocks if edge_layers else 0
        try:
            self.core = Pool(config.core_layers, num_core + 2, config, like)
            self.boundary = Pool(edge_layers, num_boundary + 2, config, like)
        except RuntimeError as error:  # so torch says it, wherever the memory is
            raise ValueError(
                f"keys and values of {blocks * block} bytes find no room on this machine; lower kv_bytes or max_length"
            ) from error
        self.core_pages, self.boundary_pages = Pages(num_core), Pages(num_boundary)
        self.has_boundary = edge_layers > 0
        self.slots = np.array([0, *(policy.slot(loop) for loop in range(1, loops + 1))])  # by loop
        self.core_tables = np.zeros((rows, loops, self.max_blocks), dtype=np.int64)
        self.boundary_tables = np.zeros((rows, self.max_blocks), dtype=np.int64)
        # A mean is written over pages of the prompt, which nobody else may hold then.
        self.prefixes = None if policy.keeps == "mean" else PrefixCache(self.core_pages, self.boundary_pages)
        self.weights = 0  # a count of the model's weights, one up whenever they change

    def check_fits(self, prompt: int, longest: int, loops: int) -> None:
        """Refuse a request that could not be finished with all memory to itself."""
        blocks, slots, pages = -(-longest // PAGE), self.policy.slots(loops), self.core_pages.num_pages
        if -(-prompt // PAGE) * loops > pages:
            raise ValueError(
                f"the prompt of {prompt} tokens does not fit into the key/value memory, which holds "
                f"{pages // loops * PAGE} tokens of a prompt at {loops} loops; raise kv_bytes"
            )
        if blocks * slots > pages or (self.has_boundary and blocks > self.boundary_pages.num_pages):
            fit = min(pages // slots, self.boundary_pages.num_pages if self.has_boundary else blocks) * PAGE
            raise ValueError(
                f"prompt and completion of {longest} tokens do not fit into the key/value memory, which holds {fit} "
                f"tokens of one request at {loops} loops; raise kv_bytes or lower max_tokens"
            )

    def admit(self, row: Row, blocks: list[tuple[int, ...]], alone: bool) -> bool:
        """Give `row` (its number is set) pages for its prompt, whose full `blocks` may be known; False if too few.

        A row that is not alone leaves a block free to grow into.
        """
        loops, row.weights = row.request.loops, self.weights
        found = [] if self.prefixes is None else self.prefixes.find(self.root(row), blocks)
        for block in found:
            self._append(row, block)
        new, spare = row.prompt_blocks - len(found), 0 if alone else 1
        if not self._available(new * loops + spare * self.policy.slots(loops), new + spare):
            self.release(row)
            return False
        for _ in range(new):
            self._append(row, self._take(loops))
        row.begun = row.prefilled = len(found)
        return True

    def grow(self, row: Row) -> bool:
        """One block more for `row`; False if there is none, even among prompts that may come again."""
        slots = self.policy.slots(row.request.loops)
        if not self._available(slots, 1):
            return False
        self._append(row, self._take(slots))
        return True

    def remember(self, row: Row, blocks: list[tuple[int, ...]]) -> None:
        """Keep the prompt's full blocks for prompts that begin like it; before `fold`.

        What a row that came before the weights changed has computed is of the old ones, in part at least.
        """
        if self.prefixes is not None and row.weights == self.weights:
            self.prefixes.add(self.root(row), blocks, row.blocks[: len(blocks)])

    def forget(self) -> None:
        """The weights have changed: nothing that was computed before is for later prompts."""
        self.weights += 1
        if self.prefixes is not None:
            self.prefixes.clear()

    def fold(self, row: Row) -> None:
        """After the prefill: give back the pages of loops that the policy does not keep."""
        loops = row.request.loops
        if self.policy.slots(loops) == loops:
            return
        by_loop = list(zip(*(block.core for block in row.blocks), strict=True))
        kept = fold(self.core, self.policy, by_loop)
        blocks, row.blocks = row.blocks, []
        self._blank(row)
        for block in blocks:
            stays = tuple(block.core[loop - 1] for loop in kept)
            self.core_pages.release([page for page in block.core if page not in stays])
            self._append(row, Block(stays, block.boundary))

    def release(self, row: Row) -> None:
        """Take all pages from `row`."""
        for block in row.blocks:
            self.core_pages.release(block.core)
            self.boundary_pages.release(block.boundary)
        row.blocks, row.begun, row.prefilled = [], 0, 0
        self._blank(row)

    def root(self, row: Row) -> tuple[int, KVPolicy, int]:
        """What the pages of a prompt depend on besides its tokens."""
        return row.request.loops, self.policy, row.request.state_seed

    def _append(self, row: Row, block: Block) -> None:
        place = len(row.blocks)
        self.core_tables[row.number, : len(block.core), place] = block.core
        if block.boundary:
            self.boundary_tables[row.number, place] = block.boundary[0]
        row.blocks.append(block)

    def _blank(self, row: Row) -> None:
        """No page of a row of before may be seen through this row's tables, even behind a mask."""
        self.core_tables[row.number] = BLANK
        self.boundary_tables[row.number] = BLANK

    def _take(self, tables: int) -> Block:
        core = self.core_pages.take(tables)
        boundary = self.boundary_pages.take(1) if self.has_boundary else []
        self.core.clear(core)
        self.boundary.clear(boundary)
        return Block(tuple(core), tuple(boundary))

    def _available(self, core: int, boundary: int) -> bool:
        """Whether so many pages are free, once what is only remembered has given way, where that will do."""
        more = core - self.core_pages.num_free, (boundary if self.has_boundary else 0) - self.boundary_pages.num_free
        return max(more) <= 0 or (self.prefixes is not None and self.prefixes.make_room(*more))
