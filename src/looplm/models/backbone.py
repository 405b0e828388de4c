"""The looped backbone: five verbs (embed, init_state, step, readout, gate), composed by `unroll`."""

import operator
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import capture_outputs

from looplm.models.block import Block
from looplm.models.conditioning import LoopEmbedding, NoLoopEmbedding
from looplm.models.config import LoopLMConfig
from looplm.models.context import (
    AnyCache,
    Loop,
    LoopContext,
    build_context,
    by_row,
    check_cache,
    check_paged,
    is_packed,
)
from looplm.models.exits import exit_loops
from looplm.models.injection import build_injection
from looplm.models.norm import build_norm
from looplm.models.outputs import LoopModelOutput, Trace
from looplm.models.precision import at_least_float32
from looplm.models.pretrained import LoopLMPreTrainedModel

KeepLoops = Literal["last", "all"] | Iterable[int]


class ExitGate(nn.Linear):
    """A linear map computed in float32 (float64 stays), whatever its own dtype, its input's or autocast's."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., D] -> [..., 1]."""
        wide = at_least_float32(input)
        with torch.autocast(wide.device.type, enabled=False):
            return F.linear(wide, self.weight.to(wide.dtype), self.bias.to(wide.dtype))


class LoopLMModel(LoopLMPreTrainedModel):
    """Prelude, a core applied `loops` times, coda: everything but the language-model head."""

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.rope == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        bounds = (0, config.prelude_layers, config.prelude_layers + config.core_layers)
        sizes = (config.prelude_layers, config.core_layers, config.coda_layers)
        self.prelude, self.core, self.coda = (
            nn.ModuleList(Block(config, layer) for layer in range(start, start + size))
            for start, size in zip(bounds, sizes, strict=True)
        )
        self.injection = build_injection(config)
        self.loop_embedding = LoopEmbedding(config) if config.step_conditioning else NoLoopEmbedding()
        self.norm = build_norm(config)
        self.exit_gate = ExitGate(config.hidden_size, 1) if config.exit_gate else None
        self.gradient_checkpointing = self.loop_checkpointing = False
        self.post_init()

    # The verbs ------------------------------------------------------------------------------------------------

    def embed(self, embeds: Tensor, context: LoopContext) -> Tensor:
        """Token embeddings [B, S, D], scaled and placed, through the prelude: the inputs of the loop."""
        if self.config.embed_scale != 1.0:
            embeds = embeds * self.config.embed_scale
        if self.embed_positions is not None:
            embeds = embeds + self.embed_positions(context.position_ids)
        embeds = self.dropout(embeds)
        for block in self.prelude:
            embeds = block(embeds, 0, context)
        return embeds

    def init_state(self, inputs: Tensor, context: LoopContext, given: Tensor | None = None) -> Tensor:
        """The state [B, S, D] before the first loop: `given`, or what `config.state_init` says."""
        if given is not None:
            if given.shape != inputs.shape:
                raise ValueError(f"init_state has shape {list(given.shape)}; expected {list(inputs.shape)}")
            return given.to(inputs)
        if self.config.state_init == "embedding":
            return inputs
        if self.config.state_init == "zero":
            return torch.zeros_like(inputs)
        return context.noise(inputs, self.config.state_std)

    def step(self, state: Tensor, inputs: Tensor, loop: Loop, context: LoopContext) -> Tensor:
        """One application of the core: the state after 1-based loop `loop`, which the next loop receives.

        `loop` is a tensor [B] where rows stand at different depths and the context's store can tell them apart.
        """
        if self.config.state_noise:
            state = state + context.noise(state, self.config.state_noise, stream=loop)
        state = self._injected(self.loop_embedding(state, loop), inputs, loop)
        for block in self.core:
            state = block(state, loop, context)
        return self.norm(state) if self.config.norm_in_loop else state

    def readout(self, state: Tensor, context: LoopContext) -> Tensor:
        """A state made ready for the head: normed, and through the coda and the norm again where there is a coda."""
        hidden = self._normed(state)
        if not self.coda:
            return hidden
        for block in self.coda:
            hidden = block(hidden, 0, context)
        return self.norm(hidden)

    def gate(self, state: Tensor) -> Tensor:
        """Exit logit [B, S] of a state, in float32 whatever the model's dtype."""
        if self.exit_gate is None:
            raise ValueError("this model has no exit gate; set exit_gate=True in its config")
        return self.exit_gate(self._normed(state)).squeeze(-1)

    def unroll(
        self,
        inputs: Tensor,
        context: LoopContext,
        loops: int,
        keep: set[int],
        init_state: Tensor | None = None,
        grad_loops: int | None = None,
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Run `loops` loops on what `embed` gave; the states of those in `keep`, the gate logits [B, S, loops] of all.

        Only the last `grad_loops` carry gradient (Huginn, arXiv 2502.05171, section 3.3); inputs injected in them still
        train the prelude.
        """
        without_gradient = loops - (loops if grad_loops is None else grad_loops)
        state = self.init_state(inputs, context, init_state)
        states, gates = {}, []
        for loop in range(1, loops + 1):
            with torch.set_grad_enabled(torch.is_grad_enabled() and loop > without_gradient):
                if self.loop_checkpointing and self.training and torch.is_grad_enabled():
                    state, *gate = checkpoint(self._advance, state, inputs, loop, context, use_reentrant=False)
                else:
                    state, *gate = self._advance(state, inputs, loop, context)
            gates += gate
            if loop in keep:
                states[loop] = state
        return states, torch.stack(gates, dim=-1) if gates else None

    def checkpoint_loops(self, enable: bool = True) -> None:
        """In training, keep the state of every loop and run its inside again in the backward pass.

        Memory is `loops` states and the activations of one loop, at the price of a second forward. It replaces
        transformers' checkpointing of every block, and goes with it (each block of the one loop is then kept alone).
        """
        self.loop_checkpointing = enable

    def _advance(self, state: Tensor, inputs: Tensor, loop: int, context: LoopContext) -> tuple[Tensor, ...]:
        """The state after `loop`, and its gate logit [B, S] where there is a gate."""
        state = self.step(state, inputs, loop, context)
        return (state,) if self.exit_gate is None else (state, self.gate(state))

    # transformers' doorway -----------------------------------------------------------------------------------

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: AnyCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        loops: int | None = None,
        keep_loops: KeepLoops = "last",
        init_state: Tensor | None = None,
        state_seed: int | Tensor = 0,
        grad_loops: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **paged: Any,
    ) -> LoopModelOutput:
        """Run the loop on `input_ids` [B, S] (or `inputs_embeds` [B, S, D]).

        Args:
            attention_mask: [B, past + S], 0 at padding on either side.
            position_ids: [B, S]; ids that restart mark packed documents.
            cache: keys and values of earlier tokens, bound to one loop count.
            loops: how often the core runs; the config's count by default, and any count may be asked for.
            keep_loops: whose states to keep: "last", "all" or a list of 1-based loops.
            init_state: [B, S, D], the state before the first loop.
            state_seed: seed of the random start state and of state noise, where the config has them; they depend on it
                and on each token's position alone. A tensor [B] seeds each row.
            paged: the index tensors that continuous batching passes; any other keyword is a TypeError.
            grad_loops: how many of the last loops carry gradient; all by default. Early loops then cost no memory.
            output_hidden_states, output_attentions: record every visit of every layer (transformers' recorder does).
        """
        check_paged(paged)
        loops = check_loops(self.config.loops if loops is None else loops)
        if grad_loops is not None:
            grad_loops = check_loops(grad_loops, "grad_loops")
        embeds = self._embeddings(input_ids, inputs_embeds)
        packed = not isinstance(cache, PagedAttentionCache) and is_packed(position_ids, attention_mask)
        cache = self._cache_for(cache, use_cache, loops, packed)
        _check_mask(attention_mask, embeds, cache)
        seed = check_seed(state_seed, len(embeds))
        context = build_context(self.config, embeds, attention_mask, position_ids, cache, seed, paged)
        keep = loops_to_keep(keep_loops, loops)
        inputs = self.embed(embeds, context)
        states, gate_logits = self.unroll(inputs, context, loops, keep | {loops}, init_state, grad_loops)
        hidden = self.readout(states[loops], context)
        return LoopModelOutput(
            last_hidden_state=hidden,
            cache=cache,
            gate_logits=gate_logits,
            states={loop: state for loop, state in states.items() if loop in keep},
            context=context,
            inputs=inputs,
        )

    def hidden_at(self, out: Trace, loop: int) -> Tensor:
        """[B, S, D] of a kept 1-based loop of `out`, ready for the head."""
        if loop not in out.states:
            raise ValueError(f"loop {loop} was not kept; ask for it with keep_loops (kept: {sorted(out.states)})")
        if self.coda and out.context.past_length:
            raise ValueError("a coda cannot re-read an earlier loop of a cached call; run the whole text without cache")
        return self.readout(out.states[loop], out.context.without_store())

    def exit_loops(self, out: Trace, q: float, min_loops: int = 1) -> Tensor:
        """The loop [B, S] at which each token leaves under the rule CDF >= q, 1-based; q >= 1 is the last loop.

        No token leaves before `min_loops`.
        """
        if out.gate_logits is None:
            raise ValueError("this model has no exit gate, so no exit rule by q; set exit_gate=True in its config")
        return exit_loops(out.gate_logits, q, min_loops)

    def hidden_at_exit(self, out: Trace, q: float, min_loops: int = 1) -> Tensor:
        """[B, S, D]: each token's hidden at its own exit loop; `out` must keep all loops."""
        chosen = self.exit_loops(out, q, min_loops)
        assert out.gate_logits is not None
        last = out.gate_logits.shape[-1]
        if len(out.states) < last:
            raise ValueError(
                f"exits read any of {last} loops, but only {sorted(out.states)} were kept; keep_loops='all'"
            )
        hidden = self.hidden_at(out, last)
        for loop in range(1, last):
            hidden = torch.where((chosen == loop)[..., None], self.hidden_at(out, loop), hidden)
        return hidden

    # Parts of the doorway ------------------------------------------------------------------------------------

    def _injected(self, state: Tensor, inputs: Tensor, loop: Loop) -> Tensor:
        if not self.config.inject_once:
            return self.injection(state, inputs)
        if isinstance(loop, Tensor):
            return torch.where(by_row(loop == 1, state.ndim), self.injection(state, inputs), state)
        return self.injection(state, inputs) if loop == 1 else state

    def _normed(self, state: Tensor) -> Tensor:
        return state if self.config.norm_in_loop else self.norm(state)

    def _embeddings(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        given = input_ids if input_ids is not None else inputs_embeds
        assert given is not None
        if given.ndim < 2 or given.shape[1] == 0:
            raise ValueError(f"the input has shape {list(given.shape)}; expected [batch, tokens], at least one token")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def _cache_for(self, cache: AnyCache | None, use_cache: bool | None, loops: int, packed: bool) -> AnyCache | None:
        if packed and (cache is not None or use_cache):
            raise ValueError(
                "packed documents (position_ids that restart) share no cache; call with use_cache=False and no cache"
            )
        checkpointed = (self.gradient_checkpointing or self.loop_checkpointing) and self.training
        if checkpointed and torch.is_grad_enabled() and (cache is not None or use_cache):
            raise ValueError("use_cache=True does not go with gradient checkpointing, which runs each block twice")
        if cache is not None:
            check_cache(cache, self.config, loops)
            return cache
        # A training step never reads its keys again, and loops x layers slots would be the larger waste.
        wanted = self.config.use_cache and not self.training and not packed if use_cache is None else use_cache
        return DynamicCache() if wanted else None  # it grows to loops x layers slots


def check_loops(loops: int, name: str = "loops") -> int:
    """`loops` as an int, if it is a count of at least one (numpy's and torch's integers are fine)."""
    try:
        count = 0 if isinstance(loops, bool) else operator.index(loops)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"{name}={loops!r} must be a whole number of at least 1")
    return count


def check_seed(seed: int | Tensor, rows: int) -> int | Tensor:
    """`seed` as an int if it is a whole number, or itself if it is a tensor of them for every row."""
    if isinstance(seed, Tensor) and seed.ndim:
        if seed.shape != (rows,) or seed.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"state_seed has shape {list(seed.shape)} of {seed.dtype}; expected [{rows}] of torch.int64"
            )
        return seed
    try:
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"state_seed={seed!r} must be a whole number") from None


def loops_to_keep(keep_loops: KeepLoops, loops: int) -> set[int]:
    """The set of 1-based loops that `keep_loops` names in a call of `loops` loops."""
    if isinstance(keep_loops, str):
        named = {"last": {loops}, "all": set(range(1, loops + 1))}
        if keep_loops not in named:
            raise ValueError(f"keep_loops={keep_loops!r} must be 'last', 'all' or a list of loops")
        return named[keep_loops]
    if not isinstance(keep_loops, Iterable):
        raise ValueError(f"keep_loops={keep_loops!r} must be 'last', 'all' or a list of loops")
    keep = set(keep_loops)
    outside = sorted(loop for loop in keep if loop not in range(1, loops + 1))
    if outside:
        raise ValueError(f"keep_loops names loop {outside[0]}, but this call runs loops 1 to {loops}")
    return keep


def _check_mask(attention_mask: Tensor | None, embeds: Tensor, cache: AnyCache | None) -> None:
    if attention_mask is None or attention_mask.ndim == 4:
        return
    expected = [embeds.shape[0], embeds.shape[1] + (int(cache.get_seq_length()) if isinstance(cache, Cache) else 0)]
    if list(attention_mask.shape) != expected:
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; expected {expected}")
