"""The key/value pools, and the store that hands a call's attention the pages of its rows.

Shapes: N blocks of S tokens, P pages a row, G key/value heads, H head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from looplm.engine.kv_policies import KVPolicy, kept_loop
from looplm.models import LoopLMConfig
from looplm.models.context import LoopContext
from looplm.models.rotary import Tables

PAGE = 16  # tokens; float32 attention on CPU is bit-equal whatever multiple of it the keys are padded to


class Pool:
    """Keys and values of so many layers, side by side: [layers, pages, PAGE, 2 G, H], so that both are read at once."""

    def __init__(self, layers: int, pages: int, config: LoopLMConfig, like: Tensor) -> None:
        shape = (layers, pages, PAGE, 2 * config.num_key_value_heads, config.head_dim)
        self.planes = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.pages = list(self.planes)  # of each layer [pages, PAGE, 2 G, H]
        self.tokens = [plane.flatten(0, 1) for plane in self.planes]  # of each layer [pages * PAGE, 2 G, H]

    def clear(self, pages: Sequence[int]) -> None:
        """Zeros, for a new owner: what is not a number would reach it even behind a mask."""
        if len(self.planes) and pages:
            self.planes[:, list(pages)] = 0

    def copy(self, source: Tensor, target: Tensor, offsets: Tensor) -> None:
        """The tokens at `offsets` of pages `source`, in all layers, to the same places of pages `target`; all [X]."""
        self.planes[:, target, offsets] = self.planes[:, source, offsets]

    def average(self, sources: Tensor, target: Tensor) -> None:
        """The mean of pages `sources` [loops, X] to pages `target` [X]."""
        self.planes[:, target] = self.planes[:, sources].mean(1)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a call's tokens lie in one pool.

    tables: [rows * P], the pages of each row in order; one row's alone where all `blocks` are of one row
    write: [blocks * S], page * PAGE + offset of each token.
    """

    tables: Tensor
    write: Tensor
    rows: int
    blocks: int

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """`write`, and `tables` [rows, P], for compiled loops."""
        return self.write.numpy(), self.tables.view(self.rows, -1).numpy()

    def exchange(self, pool: Pool, layer: int, new: Tensor) -> Tensor:
        """Write the tokens' keys and values [N * S, 2 G, H], and read all of their rows' [N, P * PAGE, 2 G, H]."""
        pool.tokens[layer].index_copy_(0, self.write, new)
        return self.read(pool, layer)

    def read(self, pool: Pool, layer: int) -> Tensor:
        """All of the rows' tokens, for each block [N, P * PAGE, 2 G, H]."""
        found = pool.pages[layer].index_select(0, self.tables)
        found = found.view(self.rows, -1, *found.shape[2:])
        return found if self.rows == self.blocks else found.expand(self.blocks, -1, -1, -1)


@dataclass(frozen=True, kw_only=True)
class PagedStore:
    """The keys and values of one call at one loop (or a loop for each block).

    core, boundary: the pools, and where the call's tokens lie in each · first: the first core layer's number
    sharing: the rule by which loops share a slot, None while prefill keeps every loop · loop: [N], with `sharing` only
    own: [N], the place of the token itself among its row's tokens, with `sharing` only (S is 1 then).
    """

    core: Pool
    boundary: Pool
    core_places: Places | None
    boundary_places: Places | None
    first: int
    layers: int
    sharing: KVPolicy | None = None
    loop: Tensor | None = None
    own: Tensor | None = None

    def exchange(self, new: Tensor, layer: int) -> Tensor:
        """Keys, then values [N * S, 2 G, H] of one layer -> those of all tokens of their rows [N, P * PAGE, 2 G, H]."""
        if self.first <= layer < self.first + self.layers:
            return self._core(new, layer)
        pool, number, places = self._at(layer)
        return places.exchange(pool, number, new)

    def place(self, layer: int) -> tuple[Tensor, Places]:
        """The tokens [pages * PAGE, 2 G, H] of one layer's pool, and where the call's lie, unless loops share slots."""
        pool, number, places = self._at(layer)
        return pool.tokens[number], places

    def _at(self, layer: int) -> tuple[Pool, int, Places]:
        """The pool that keeps a layer, the layer's number in it, and where the call's tokens lie."""
        if self.first <= layer < self.first + self.layers:
            pool, number, places = self.core, layer - self.first, self.core_places
        else:
            pool, places = self.boundary, self.boundary_places
            number = layer if layer < self.first else layer - self.layers
        assert places is not None
        return pool, number, places

    def _core(self, new: Tensor, layer: int) -> Tensor:
        pool, number, places = self._at(layer)
        if self.sharing is None:
            return places.exchange(pool, number, new)
        assert self.loop is not None
        assert self.own is not None
        flat = pool.tokens[number]
        held, weight = flat[places.write], self.loop.to(new.dtype).reciprocal()[:, None, None]
        first = self.sharing.keeps == "first"
        flat[places.write] = torch.where(weight == 1, new, held if first else torch.lerp(held, new, weight))
        seen = places.read(pool, number)  # decoding has a row for each token, so nothing here is shared
        seen[torch.arange(len(new), device=new.device), self.own] = new  # a token sees itself as it is
        return seen


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens of a call that attend in one way: T = `blocks` * S of them lie flat, all of one block together.

    positions: [T] · rotary: [T, 1, width] · mask: [blocks, 1, S, P * PAGE].
    """

    positions: Tensor
    rotary: Tables
    mask: Tensor
    pages: PagedStore
    blocks: int

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cosines, sines and positions, for compiled loops."""
        cos, sin = self.rotary
        return cos.numpy(), sin.numpy(), self.positions.numpy()


@dataclass(frozen=True, kw_only=True)
class PagedContext(LoopContext):
    """What a call of the engine carries: its parts' tokens, one part after the other.

    position_ids and state_seed: [T], of all parts; each has its own rotary tables and mask.
    """

    parts: Sequence[Part]


def fold(pool: Pool, policy: KVPolicy, pages: Sequence[Sequence[int]]) -> list[int]:
    """Of the pages [loops][X] of a prefill, the loop [slots] whose pages each slot keeps; a mean is written there."""
    loops = len(pages)
    kept = [kept_loop(policy, slot, loops) for slot in range(policy.slots(loops))]
    if policy.keeps == "mean":
        every = torch.tensor(pages, device=pool.planes.device)
        pool.average(every, every[kept[0] - 1])
    return kept
