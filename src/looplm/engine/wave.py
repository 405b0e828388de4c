"""A text in the parallel sampler: its open positions, and one key and value for each of all positions."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from looplm.models.context import LoopContext
from looplm.models.rotary import Tables


@dataclass(frozen=True, kw_only=True)
class NewestKV:
    """Keys and values [layers, 1, G, length, head_dim] of each position's newest state; a call begins at `start`."""

    keys: Tensor
    values: Tensor
    start: int = 0

    def update(self, key: Tensor, value: Tensor, layer: int, loop: int) -> tuple[Tensor, Tensor]:
        """Overwrite those of the call's positions; those of all positions up to its last."""
        stop = self.start + key.shape[2]
        self.keys[layer, :, :, self.start : stop] = key
        self.values[layer, :, :, self.start : stop] = value
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]


@dataclass(frozen=True, kw_only=True)
class Places:
    """What the calls of one text share: rotary tables and keys and values of all its positions, and its start noise."""

    rotary: Tables
    store: NewestKV
    state_seed: int

    def context(self, start: int, stop: int) -> LoopContext:
        """A call on the positions from `start` to `stop`, each of which sees those before it."""
        like = self.store.keys
        mask = None
        if stop - start > 1:
            hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=like.device).triu(start + 1)
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, -torch.inf)
            mask = mask[None, None]
        cos, sin = self.rotary
        return LoopContext(
            position_ids=torch.arange(start, stop, device=like.device)[None],
            rotary=(cos[:, :, start:stop], sin[:, :, start:stop]), mask=mask,
            store=replace(self.store, start=start), past_length=start, state_seed=self.state_seed,
        )  # fmt: skip


@dataclass(kw_only=True, eq=False)
class Wave:
    """The open positions of a text, W of them from `first` on: `text` holds a token for each, the last ones drafts.

    state, fresh, inputs: [1, W, D], what loops, what `embed` gave, and the latter after momentum
    done, spent: loops of each [W] under its present token, and in all · stale: the first position to embed (anew).
    """

    text: list[int]
    first: int
    state: Tensor
    fresh: Tensor
    inputs: Tensor
    stale: int
    done: list[int] = field(default_factory=list)
    spent: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The position after the last open one."""
        return self.first + len(self.done)

    def freeze(self, count: int) -> None:
        """Close the leftmost positions."""
        self.first += count
        self.state, self.fresh, self.inputs = (part[:, count:] for part in (self.state, self.fresh, self.inputs))
        del self.done[:count], self.spent[:count]
