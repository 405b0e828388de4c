"""What one call of the model carries besides states: rotary tables, attention mask and the key/value store."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs
from transformers.masking_utils import create_causal_mask

from looplm.models.config import LoopLMConfig
from looplm.models.noise import position_noise
from looplm.models.rotary import Tables, rotary_tables

AnyCache = Cache | PagedAttentionCache
Loop = int | Tensor  # 1-based; a tensor [B] gives each row its own
# What continuous batching passes, and `seq_idx` of padding-free collators, which restarting positions already say.
_PAGED_ARGUMENTS = frozenset(PagedAttentionArgs.__annotations__) | {"seq_idx"}


def by_row(values: Tensor, ndim: int) -> Tensor:
    """One value for each row [B], as a tensor of `ndim` axes [B, 1, ...]."""
    return values.reshape(-1, *(1,) * (ndim - 1))


class KVStore(Protocol):
    """Where keys and values [B, G, S, head_dim] go, and where all of them come back from [B, G, K, head_dim].

    A store of ours may take a loop for each row; transformers' caches take one for all, since `generate` runs in step.
    """

    def update(self, key: Tensor, value: Tensor, layer: int, loop: Any) -> tuple[Tensor, Tensor]:  # noqa: D102
        ...


class NoStore:
    """Keeps nothing: attention sees the keys and values of this call only."""

    def update(self, key: Tensor, value: Tensor, layer: int, loop: int) -> tuple[Tensor, Tensor]:
        """The same keys and values."""
        return key, value


class CacheStore:
    """A transformers cache with one slot per prelude and coda layer and per (core layer, loop).

    Slots are ordered prelude, coda, then core loop by loop, so that more loops only append.
    """

    def __init__(self, cache: AnyCache, config: LoopLMConfig) -> None:
        self.cache: Any = cache
        self.config = config

    def slot(self, layer: int, loop: int) -> int:
        """The slot of physical layer `layer` (prelude, core, coda in order) at 1-based `loop`."""
        prelude, core, coda = self.config.prelude_layers, self.config.core_layers, self.config.coda_layers
        if layer < prelude:
            return layer
        if layer >= prelude + core:
            return layer - core
        return prelude + coda + (loop - 1) * core + (layer - prelude)

    def update(self, key: Tensor, value: Tensor, layer: int, loop: int) -> tuple[Tensor, Tensor]:
        """Append to the slot of (layer, loop) and read all of it."""
        return self.cache.update(key, value, self.slot(layer, loop))


class PagedStore(CacheStore):
    """The same slots in transformers' paged cache, which continuous batching drives by index tensors of its own."""

    def __init__(self, cache: PagedAttentionCache, config: LoopLMConfig, indices: dict[str, Any]) -> None:
        super().__init__(cache, config)
        self.indices = indices

    def update(self, key: Tensor, value: Tensor, layer: int, loop: int) -> tuple[Tensor, Tensor]:
        """Write this call's tokens to their pages and read every page of their requests."""
        return self.cache.update(key, value, self.slot(layer, loop), kwargs=dict(self.indices))


@dataclass(frozen=True, kw_only=True)
class LoopContext:
    """Built once a call and shared by every layer and loop: positions advance per token, never per loop.

    `position_ids` is [B, S] and `rotary` the tables made of it; `mask` is what the attention implementation takes, or
    None for plain causal attention; `past_length` counts the tokens that the store held before this call. `state_seed`
    is one for all rows, or a tensor [B].
    """

    position_ids: Tensor
    rotary: Tables
    mask: Tensor | None
    store: KVStore
    past_length: int
    state_seed: int | Tensor = 0

    def noise(self, like: Tensor, std: float, stream: Loop = 0) -> Tensor:
        """Truncated-normal noise shaped as `like` [B, S, D], fixed by the seed, the stream and each position."""
        return position_noise(self.position_ids, like.shape[-1], std, self.state_seed, stream).to(like)

    def without_store(self) -> "LoopContext":
        """The same call without keys and values of its past."""
        return replace(self, store=NoStore())

    def rows(self, index: Tensor) -> "LoopContext":
        """The call as the rows of `index` [R] alone would see it, in that order; they may repeat.

        Raises:
            ValueError: where a past or a flex mask ties the rows to the whole batch.
        """
        if self.past_length or not isinstance(self.mask, Tensor | None):
            raise ValueError(
                "rows can be taken from a call without a cached past under attn_implementation 'sdpa' or 'eager'"
            )
        cos, sin = self.rotary
        return replace(
            self,
            position_ids=self.position_ids[index],
            rotary=(_rows(cos, index), _rows(sin, index)),
            mask=None if self.mask is None else _rows(self.mask, index),
            store=NoStore(),
            state_seed=self.state_seed[index] if isinstance(self.state_seed, Tensor) else self.state_seed,
        )


def build_context(
    config: LoopLMConfig, embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None,
    cache: AnyCache | None,
    state_seed: int | Tensor = 0,
    paged: dict[str, Any] | None = None,
) -> LoopContext:  # fmt: skip
    """The context of a call on `embeds` [B, S, D].

    `attention_mask` is 2-D [B, past + S] with 0 at padding on either side (or a prepared 4-D mask). Positions
    default to counting real tokens. Position ids that restart mark packed documents, which do not see each other.
    """
    past_length = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
    packed = position_ids is not None and cache is None
    if position_ids is None:
        position_ids = _count_positions(embeds, attention_mask, past_length)
    position_ids = position_ids.expand(embeds.shape[0], -1)
    learned = config.rope == "learned" and not torch.compiler.is_compiling()
    if learned and int(position_ids.max()) >= config.max_position_embeddings:
        raise ValueError(
            f"position {int(position_ids.max())} lies past max_position_embeddings={config.max_position_embeddings}, "
            "and learned positions do not extend"
        )
    mask_positions, mask = position_ids, attention_mask
    if packed and attention_mask is not None and attention_mask.ndim == 2:
        # transformers looks for packed documents only without a mask, so padding becomes documents of its own.
        mask_positions, mask = _isolate_padding(position_ids, attention_mask), None
    return LoopContext(
        position_ids=position_ids,
        rotary=rotary_tables(position_ids, config.head_dim, config.rope_theta, config.rope, embeds.dtype),
        mask=create_causal_mask(
            config=config, inputs_embeds=embeds, attention_mask=mask, cache=cache, position_ids=mask_positions
        ),
        store=_store(cache, config, paged or {}),
        past_length=past_length,
        state_seed=state_seed,
    )


def check_cache(cache: AnyCache, config: LoopLMConfig, loops: int) -> None:
    """Refuse a cache whose slots belong to another loop count; an empty growing cache fits any."""
    held = len(cache) if isinstance(cache, Cache) else len(cache.layer_to_allocator)
    needed = config.slots(loops)
    if held in (0, needed):
        return
    bound, rest = divmod(held - config.prelude_layers - config.coda_layers, config.core_layers)
    belongs = f"loops={bound}" if rest == 0 and bound > 0 else "another model"
    raise ValueError(
        f"the cache has {held} slots ({belongs}) but loops={loops} needs {needed}; "
        "start a new cache or call with the cache's own loops"
    )


def is_packed(position_ids: Tensor | None, attention_mask: Tensor | None) -> bool:
    """Whether positions [B, S] restart between two real tokens, which marks packed documents."""
    if position_ids is None or position_ids.shape[-1] < 2 or (attention_mask is not None and attention_mask.ndim != 2):
        return False
    restarts = position_ids.diff(dim=-1) != 1
    if attention_mask is None:
        return bool(restarts.any())
    real = attention_mask[:, -position_ids.shape[-1] :].bool()
    return bool((restarts & real[:, 1:] & real[:, :-1]).any())


def real_tokens(position_ids: Tensor) -> Tensor:
    """Which tokens of rows with these positions [B, S] are text: all that have another of their document beside.

    Padding restarts or stands still at every token. So does a document of one token, which predicts nothing and which
    nothing predicts.
    """
    follows = F.pad(position_ids.diff(dim=-1) == 1, (1, 1))
    return follows[..., :-1] | follows[..., 1:]


def check_paged(arguments: dict[str, Any]) -> None:
    """Refuse keywords that are not continuous batching's own: a misspelt argument is never swallowed."""
    unknown = sorted(set(arguments) - _PAGED_ARGUMENTS)
    if unknown:
        raise TypeError(f"forward() got an unexpected keyword argument '{unknown[0]}'")


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows `index` of [B, ...]; a single row is every row's."""
    return tensor if len(tensor) == 1 else tensor[index]


def _store(cache: AnyCache | None, config: LoopLMConfig, paged: dict[str, Any]) -> KVStore:
    if cache is None:
        return NoStore()
    return CacheStore(cache, config) if isinstance(cache, Cache) else PagedStore(cache, config, paged)


def _count_positions(embeds: Tensor, attention_mask: Tensor | None, past_length: int) -> Tensor:
    length = embeds.shape[1]
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return torch.arange(past_length, past_length + length, device=embeds.device)[None]


def _isolate_padding(position_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Positions under which each padding token is a document of its own (no neighbour is one step away)."""
    isolated = -2 * torch.arange(1, position_ids.shape[1] + 1, device=position_ids.device) - 2
    return torch.where(attention_mask.bool(), position_ids, isolated.expand_as(position_ids))
