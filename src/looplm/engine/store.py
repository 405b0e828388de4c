"""The key/value pools, and the store that hands a call's attention the pages of its rows.

Shapes: N blocks of S tokens, P pages a row, G key/value heads, H head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looplm.engine.kv_policies import KVPolicy, kept_loop
from looplm.models import LoopLMConfig

PAGE = 16  # tokens; float32 attention on CPU is bit-equal whatever multiple of it the keys are padded to


class Pool:
    """Keys and values of so many layers, side by side: [layers, pages, PAGE, 2 G, H], so that both are read at once."""

    def __init__(self, layers: int, pages: int, config: LoopLMConfig, like: Tensor) -> None:
        shape = (layers, pages, PAGE, 2 * config.num_key_value_heads, config.head_dim)
        self.planes = torch.zeros(shape, dtype=like.dtype, device=like.device)

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

    tables: [N, P], or [1, P] where all blocks are of one row: the pages of that row, in order.
    write: [N * S], page * PAGE + offset of each token.
    """

    tables: Tensor
    write: Tensor

    def read(self, plane: Tensor) -> Tensor:
        """All of the rows' tokens, [N or 1, 2 G, P * PAGE, H], of `plane` [pages, PAGE, 2 G, H]."""
        rows, pages = self.tables.shape
        found = plane.index_select(0, self.tables.flatten())
        return found.view(rows, pages * PAGE, *plane.shape[2:]).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class PagedStore:
    """The KV seam of one call at one loop (or a loop for each block): writes the call's tokens, reads their rows' all.

    core, boundary: the pools, and where the call's tokens lie in each · first: the first core layer's number.
    sharing: the rule by which loops share a slot, None while prefill keeps every loop · loop: [N], with `sharing` only.
    own: [N], the place of the token itself among its row's tokens, with `sharing` only (S is 1 then).
    """

    core: Pool
    boundary: Pool
    core_places: Places
    boundary_places: Places | None
    first: int
    layers: int
    sharing: KVPolicy | None = None
    loop: Tensor | None = None
    own: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, layer: int, loop: int | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, G, S, H] of one layer -> those of their rows [N, G, P * PAGE, H]."""
        new = torch.cat([key, value], dim=1)
        if self.first <= layer < self.first + self.layers:
            seen = self._core(new, layer - self.first)
        else:
            assert self.boundary_places is not None
            number = layer if layer < self.first else layer - self.layers
            seen = _exchange(self.boundary.planes[number], self.boundary_places, new)
        keys, values = seen.chunk(2, dim=1)
        return keys, values

    def _core(self, new: Tensor, layer: int) -> Tensor:
        plane, places = self.core.planes[layer], self.core_places
        if self.sharing is None or self.sharing.keeps == "newest":
            return _exchange(plane, places, new)
        assert self.loop is not None
        assert self.own is not None
        flat, now = plane.flatten(0, 1), new[:, :, 0]
        held, weight = flat[places.write], self.loop.to(now.dtype).reciprocal()[:, None, None]
        first = self.sharing.keeps == "first"
        flat[places.write] = torch.where(weight == 1, now, held if first else torch.lerp(held, now, weight))
        seen = places.read(plane)
        seen[torch.arange(len(now), device=now.device), :, self.own] = now  # a token sees itself as it is
        return seen


def fold(pool: Pool, policy: KVPolicy, pages: Sequence[Sequence[int]]) -> list[int]:
    """Of the pages [loops][X] of a prefill, the loop [slots] whose pages each slot keeps; a mean is written there."""
    loops = len(pages)
    kept = [kept_loop(policy, slot, loops) for slot in range(policy.slots(loops))]
    if policy.keeps == "mean":
        every = torch.tensor(pages, device=pool.planes.device)
        pool.average(every, every[kept[0] - 1])
    return kept


def _exchange(plane: Tensor, places: Places, new: Tensor) -> Tensor:
    plane.flatten(0, 1).index_copy_(0, places.write, new.transpose(1, 2).flatten(0, 1))
    seen = places.read(plane)
    return seen if len(seen) == len(new) else seen.expand(len(new), -1, -1, -1)
