"""The parallel sampler: a token is drafted at every step while those before it are still refined (lossy).

After Geiping et al., *Efficient Parallel Samplers for Recurrent-Depth Models*, arXiv 2510.14961. Open positions, at
most `wavefront` of them, stand at different depths and go through the core together; the leftmost freeze once settled:

    text      prompt ─ frozen ─ frozen │ open ─ open ─ open     a step: `inner_loops` loops of all that is open,
    loops       8        8        8    │   6      4      2      read all, redraft, freeze from the left, open one more

A position holds one key and one value a layer, those of its newest state, so tokens are not those of plain decoding;
`ParallelSampler.plain_choices` says which differ. Theirs freezes all that precedes a settled position; here all of it
must have settled, under the tokens that stay.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from looplm.engine.intake import mixed
from looplm.engine.policies import FixedLoops
from looplm.engine.requests import Choice, Completion, FinishReason, Request, Row
from looplm.engine.sampling import Asked, SamplingParams, best_alternatives, choose
from looplm.engine.text import TextBuilder
from looplm.engine.wave import NewestKV, Places, Wave
from looplm.models import LoopLMConfig, LoopLMForCausalLM
from looplm.models.backbone import LoopLMModel, check_loops
from looplm.models.context import LoopContext
from looplm.models.noise import position_noise
from looplm.models.rotary import rotary_tables
from looplm.models.tokens import end_token_ids

_MIXING = -3  # the noise stream of the first step's mixing; each later step has the next one below


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How far the sampler goes ahead, and when it lets a position be.

    inner_loops: applications of the core to each open position between readings · wavefront: open positions at most
    threshold: a position has settled if its state changed by less than this share of its norm in a step; 0 is never
    momentum: the share of a position's inputs that stays from step to step (theirs 0.1) · noise: the share of fresh
        start noise that is mixed into a state before a step, divided by 1 + the loops that its position has done
    loops: those after which a position has settled in any case, counted from when its token last changed; of the
        prompt, too, and the model's own by default.
    """

    inner_loops: int = 4
    wavefront: int = 128
    threshold: float = 0.03
    momentum: float = 0.0
    noise: float = 0.0
    loops: int | None = None

    def __post_init__(self) -> None:
        for name in ("inner_loops", "wavefront"):
            check_loops(getattr(self, name), name)
        if self.loops is not None:
            check_loops(self.loops)
        if math.isnan(self.threshold) or self.threshold < 0:
            raise ValueError(f"threshold={self.threshold} must be a number of at least 0, which freezes by loops alone")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} must be at least 0, which is off, and below 1")
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise={self.noise} must be from 0, which is off, to 1")


@dataclass(kw_only=True)
class ParallelStats:
    """Counts since the sampler began, prompts left out.

    steps: readings · ticks: calls of the core, one after the other · core_steps: applications of it to one position
    tokens: those of completions · redrafted: open positions whose token was replaced.
    """

    steps: int = 0
    ticks: int = 0
    core_steps: int = 0
    tokens: int = 0
    redrafted: int = 0


class ParallelSampler:
    """Continues texts by drafting ahead, on models that inject their inputs at every loop.

    Args:
        tokenizer: makes completions' text, and is needed for stop strings.
        seed: of requests that bring none.

    Raises:
        ValueError: for a model whose states would not follow a token that changes, or whose loops are not all alike.
    """

    def __init__(
        self, model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase | None = None, *,
        settings: ParallelSettings | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        _check_model(model.config)
        self.model, self.tokenizer, self.seed = model, tokenizer, seed
        self.settings = settings or ParallelSettings()
        self.loops = self.settings.loops or model.config.loops
        self.ends = frozenset(end_token_ids(model, None if tokenizer is None else tokenizer.eos_token_id))
        self.stats = ParallelStats()
        self._numbers = itertools.count()

    @property
    def backbone(self) -> LoopLMModel:
        """Whose verbs are called."""
        return self.model.model

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None, state_seed: int = 0
    ) -> list[Completion]:  # fmt: skip
        """Complete every prompt of token ids, `n` times each, one after the other.

        A completion's `loops` are the applications of the core that each token cost, the prompt's own for the first.
        """
        params = sampling or SamplingParams()
        self._check(prompts, params)
        return [
            self._complete(self._request(next(self._numbers), prompt, params, sample, state_seed))
            for prompt in prompts
            for sample in range(params.n)
        ]

    @torch.no_grad()
    def plain_choices(
        self, completion: Completion, sampling: SamplingParams | None = None, sample: int = 0, state_seed: int = 0
    ) -> list[int]:  # fmt: skip
        """What plain decoding would choose in place of each token of a completion, after the same text before it.

        Plain: all `loops`, a key and a value for each. Where it differs from the completion's tokens, the sampler lost.
        Arguments as they were in `generate`; `sample` is which of the prompt's `n` it was.
        """
        prompt, params = completion.prompt_token_ids, sampling or SamplingParams()
        request = self._request(completion.number, prompt, params, sample, state_seed)
        text = [*prompt, *completion.token_ids[:-1]]
        out = self.model(
            torch.tensor([text], device=self.model.device), use_cache=False, loops=self.loops, state_seed=state_seed,
            logits_to_keep=len(completion.token_ids),
        )  # fmt: skip
        return [choice.token for choice in _choices(out.logits[0], request, text)]

    def _request(
        self, number: int, prompt: Sequence[int], params: SamplingParams, sample: int, state_seed: int
    ) -> Request:  # fmt: skip
        own = frozenset(params.stop_token_ids)
        return Request(
            number=number, prompt=tuple(prompt), params=params, depth=FixedLoops(self.loops), loops=self.loops,
            seed=mixed(self.seed, number) if params.seed is None else mixed(params.seed, sample),
            ends=own if params.ignore_eos else own | self.ends, state_seed=state_seed,
        )  # fmt: skip

    # One text -------------------------------------------------------------------------------------------------

    def _complete(self, request: Request) -> Completion:
        text = None if self.tokenizer is None else TextBuilder(self.tokenizer, request.params.stops)
        row, places = Row(request=request, text=text), self._places(request)
        wave, choices = self._prefill(row, places)
        reason = _no_number(choices) or self._commit(row, choices[0], self.loops)
        while reason is None:
            self._open(wave, row, places)
            context = places.context(wave.first, wave.stop)
            change = self._refine(wave, context)
            choices = self._read(wave, row, context)
            reason = _no_number(choices) or self._freeze(wave, row, choices, change)
        row.end_text()
        error = "the state is not finite" if reason == "error" else None
        return row.completion(reason, error)

    def _prefill(self, row: Row, places: Places) -> tuple[Wave, list[Choice]]:
        """The prompt at full depth, and the token after it; no position is open yet."""
        tokens = list(row.request.prompt)
        context = places.context(0, len(tokens))
        inputs = self.backbone.embed(self._embedded(tokens), context)
        state = self.backbone.init_state(inputs, context)
        for _ in range(self.loops):
            state = self.backbone.step(state, inputs, 1, context)
        logits = self.model.lm_head(self.backbone.readout(state, context)[0, -1:])
        choices = _choices(logits, row.request, tokens)
        nothing, end = inputs[:, :0], len(tokens)
        wave = Wave(text=tokens, first=end, state=nothing, fresh=nothing, inputs=nothing, stale=end)
        wave.text.append(choices[0].token)
        return wave, choices

    def _open(self, wave: Wave, row: Row, places: Places) -> None:
        """Let the newest draft in where there is room, and embed what is new or has changed."""
        request, known = row.request, len(wave.done)
        wanted = wave.stop < request.longest - 1 and wave.text[-1] not in request.ends
        opens = wanted and known < self.settings.wavefront
        stop = wave.stop + opens
        del wave.text[stop:]
        if wave.stale < stop:
            new = self.backbone.embed(self._embedded(wave.text[wave.stale :]), places.context(wave.stale, stop))
            wave.fresh = torch.cat([wave.fresh[:, : wave.stale - wave.first], new], dim=1)
        wave.inputs = torch.cat(
            [wave.fresh[:, :known].lerp(wave.inputs, self.settings.momentum), wave.fresh[:, known:]], dim=1
        )
        if opens:
            start = self.backbone.init_state(wave.fresh[:, known:], places.context(stop - 1, stop))
            wave.state = torch.cat([wave.state, start], dim=1)
            wave.done.append(0)
            wave.spent.append(0)

    def _refine(self, wave: Wave, context: LoopContext) -> list[float]:
        """`inner_loops` loops of all that is open; by what share of its norm each state has changed [W]."""
        before, inner = wave.state, self.settings.inner_loops
        state = self._noised(wave, context)
        for _ in range(inner):
            state = self.backbone.step(state, wave.inputs, 1, context)  # all loops are alike: see `_check_model`
        wave.state = state
        wave.done, wave.spent = ([loops + inner for loops in counts] for counts in (wave.done, wave.spent))
        self.stats.steps += 1
        self.stats.ticks += inner
        self.stats.core_steps += inner * len(wave.done)
        return ((state - before).norm(dim=-1) / state.norm(dim=-1))[0].tolist()

    def _noised(self, wave: Wave, context: LoopContext) -> Tensor:
        if self.settings.noise == 0:
            return wave.state
        spent = torch.tensor(wave.spent, device=wave.state.device)
        share = (self.settings.noise / (1 + spent)).to(wave.state.dtype)[:, None]
        config = self.model.config
        # By loops, not by steps of the sampler: what a position gets does not depend on when its text began.
        drawn = position_noise(
            context.position_ids.view(-1, 1), config.hidden_size, config.state_std, context.state_seed, _MIXING - spent
        )
        return wave.state.lerp(drawn[:, 0].to(wave.state)[None], share)

    def _read(self, wave: Wave, row: Row, context: LoopContext) -> list[Choice]:
        """The token after each open position, by its present state."""
        return _choices(self.model.lm_head(self.backbone.readout(wave.state, context)[0]), row.request, wave.text)

    def _freeze(self, wave: Wave, row: Row, choices: list[Choice], change: list[float]) -> FinishReason | None:
        """Replace drafts that are read otherwise now, and freeze what has settled; why the text ends, if it does."""
        settled = [
            moved < self.settings.threshold or done >= self.loops for moved, done in zip(change, wave.done, strict=True)
        ]
        wave.stale = wave.stop
        for place in reversed(range(1, len(wave.done))):
            if wave.text[wave.first + place] != choices[place - 1].token:
                wave.stale, wave.done[place] = wave.first + place, 0
                settled[place] = False
                self.stats.redrafted += 1
        wave.text[wave.first + 1 :] = [choice.token for choice in choices]
        frozen = list(itertools.takewhile(lambda place: settled[place], range(len(settled))))
        for place in frozen:
            reason = self._commit(row, choices[place], wave.spent[place])
            if reason is not None:
                return reason
        wave.freeze(len(frozen))
        return None

    def _commit(self, row: Row, choice: Choice, loops: int) -> FinishReason | None:
        """Make a token part of the completion; why it ends with it, if it does."""
        row.add(choice, loops)
        self.stats.tokens += 1
        may_end = len(row.made) > row.request.params.min_tokens
        _, stopped = row.add_text(choice.token, may_end)
        if stopped or (may_end and choice.token in row.request.ends):
            return "stop"
        return "length" if len(row.made) == row.request.params.max_tokens else None

    # Parts ----------------------------------------------------------------------------------------------------

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        return self.backbone.embed_tokens(torch.tensor([tokens], device=self.model.device))

    def _places(self, request: Request) -> Places:
        config, length = self.model.config, request.longest
        like = self.model.lm_head.weight
        shape = (config.slots(1), 1, config.num_key_value_heads, length, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        places = torch.arange(length, device=like.device)[None]
        return Places(
            rotary=rotary_tables(places, config.head_dim, config.rope_theta, config.rope, like.dtype),
            store=NewestKV(keys=keys, values=values), state_seed=request.state_seed,
        )  # fmt: skip

    def _check(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        config = self.model.config
        if params.stops and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; give the sampler one, or use stop_token_ids")
        for prompt in prompts:
            if isinstance(prompt, str):
                raise ValueError(f"prompts are lists of token ids; encode the text {prompt!r} first")
            if not prompt:
                raise ValueError("the prompt is empty; give at least one token")
            odd = next((token for token in (*prompt, *params.logit_bias) if not 0 <= token < config.vocab_size), None)
            if odd is not None:
                raise ValueError(
                    f"token {odd} of the prompt or logit_bias is outside the vocabulary of {config.vocab_size}"
                )
            longest = len(prompt) + params.max_tokens
            if config.rope == "learned" and longest > config.max_position_embeddings:
                raise ValueError(
                    f"prompt and max_tokens are {longest} tokens, more than max_position_embeddings="
                    f"{config.max_position_embeddings}, and learned positions do not extend"
                )


def _check_model(config: LoopLMConfig) -> None:
    if config.injection == "none" or config.inject_once:
        raise ValueError(
            "the parallel sampler needs a model that injects its inputs at every loop, else a state would not follow "
            f"a token that changes; this one has injection='{config.injection}', inject_once={config.inject_once}"
        )
    for name in ("step_conditioning", "state_noise"):
        if getattr(config, name):
            raise ValueError(
                f"the parallel sampler needs loops that are all alike, since open positions stand at different ones; "
                f"this model has {name}={getattr(config, name)}"
            )


def _no_number(choices: Sequence[Choice]) -> Literal["error"] | None:
    """Whether a state has stopped being finite, by what was read of it."""
    return "error" if any(math.isnan(choice.logprob) for choice in choices) else None


def _choices(logits: Tensor, request: Request, text: Sequence[int]) -> list[Choice]:
    """The token after each of the last R tokens of `text`, by `logits` [R, V]."""
    prompt = len(request.prompt)
    asked = [
        Asked(
            params=request.params, seed=request.seed, index=end - prompt, prompt=request.prompt,
            made=text[prompt:end], ends=request.ends,
        )
        for end in range(len(text) - len(logits) + 1, len(text) + 1)
    ]  # fmt: skip
    chosen, wanted = choose(logits, asked), request.params.logprobs
    return [
        Choice(
            token=token, logprob=logprob, lead=lead,
            alternatives=best_alternatives(row, wanted) if wanted else [],
        )
        for token, logprob, lead, row in zip(chosen.tokens, chosen.logprobs, chosen.leads, logits, strict=True)
    ]  # fmt: skip
