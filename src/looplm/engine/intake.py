"""From what users give to checked requests."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from transformers import PreTrainedTokenizerBase

from looplm.engine.memory import Memory
from looplm.engine.policies import DepthPolicy, check_policy, is_whole
from looplm.engine.requests import Request, Row
from looplm.engine.sampling import SamplingParams
from looplm.engine.text import TextBuilder
from looplm.models import LoopLMConfig

Prompt = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How one request's depth is chosen.

    depth: a policy of its own instead of the engine's · min_loops, max_loops: bounds on top of it; `max_loops` is the
        depth of its prefill, too · replay: the loops of each token, instead of any policy
    state_seed: of the random start state · warm_start: tokens start from the state their predecessor left with.
    """

    depth: DepthPolicy | None = None
    min_loops: int = 1
    max_loops: int | None = None
    replay: Sequence[int] = ()
    state_seed: int = 0
    warm_start: bool = False

    def __post_init__(self) -> None:
        if self.depth is not None:
            check_policy(self.depth)
        most = 2**63  # seeds are int64
        for name, good, what in (
            ("min_loops", is_whole(self.min_loops), "a whole number of at least 1"),
            ("max_loops", self.max_loops is None or is_whole(self.max_loops), "a whole number of at least 1, or None"),
            ("state_seed", is_whole(self.state_seed, -most) and self.state_seed < most, "a whole number of 64 bits"),
            ("warm_start", isinstance(self.warm_start, bool), "True or False"),
        ):
            if not good:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {what}")


@dataclass(kw_only=True)
class Intake:
    """Numbers, checks and seeds requests for one engine."""

    config: LoopLMConfig
    tokenizer: PreTrainedTokenizerBase | None
    memory: Memory
    depth: DepthPolicy
    loops: int
    max_length: int
    seed: int
    ends: frozenset[int]
    speculates: bool

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    def rows(self, prompt: Prompt, params: SamplingParams | None, options: Options) -> list[Row]:
        """A row for each of the `n` completions of `prompt`; without `params` the defaults hold.

        Raises:
            ValueError: for what cannot be done, named.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling={params!r} must be SamplingParams(...), or None")
        depth = self.depth if options.depth is None else options.depth
        most = self.loops if options.max_loops is None else options.max_loops
        if most > self.loops:
            raise ValueError(f"max_loops={most}, but this engine has 1 to {self.loops} loops; give it loops={most}")
        loops, replay = depth.deepest(most), _whole("replay must be a list of whole numbers", options.replay)
        self._check(depth, loops, options, params)
        odd = next((count for count in replay if not 1 <= count <= loops), None)
        if odd is not None:
            raise ValueError(f"replay asks for {odd} loops of a token; the request has 1 to {loops}")
        tokens = self._tokens(prompt)
        self._check_length(len(tokens), params.max_tokens, loops)
        own = frozenset(params.stop_token_ids)
        ends = own if params.ignore_eos else own | self.ends
        rows = []
        for sample in range(params.n):
            number = next(self._numbers)
            seed = mixed(self.seed, number) if params.seed is None else mixed(params.seed, sample)
            request = Request(
                number=number, prompt=tokens, params=params, depth=depth, loops=loops, seed=seed, ends=ends,
                min_loops=options.min_loops, replay=replay, state_seed=options.state_seed,
                warm_start=options.warm_start,
            )  # fmt: skip
            text = None if self.tokenizer is None else TextBuilder(self.tokenizer, params.stops)
            rows.append(Row(request=request, text=text))
        return rows

    def check_depth(self, depth: DepthPolicy) -> None:
        """Refuse a policy that this engine cannot follow."""
        depth.check_model(self.config, self.loops)
        if self.speculates and self.config.coda_layers and depth.needs_logits:
            raise ValueError(
                f"{depth} reads predictions, which a coda makes of all earlier tokens, and under speculation these are "
                "not final; choose a depth policy that reads the state or the gate, or run without speculation"
            )

    def _check(self, depth: DepthPolicy, loops: int, options: Options, params: SamplingParams) -> None:
        self.check_depth(depth)
        if not 1 <= options.min_loops <= loops:
            raise ValueError(f"min_loops={options.min_loops} must be between 1 and the request's loops, {loops}")
        if options.warm_start and self.config.state_init == "embedding":
            raise ValueError("warm_start needs a model with a start state of its own, which injects its inputs")
        if options.warm_start and self.speculates:
            raise ValueError("warm_start waits for each token's last state; run it without speculation")
        self._check_stops(params.stops)
        for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            odd = next((token for token in tokens if token >= self.config.vocab_size), None)
            if odd is not None:
                raise ValueError(f"{name} names token {odd}, outside the vocabulary of {self.config.vocab_size}")

    def _check_stops(self, stops: Sequence[str]) -> None:
        if not stops:
            return
        if self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; give the engine one, or use stop_token_ids")
        for special, stop in itertools.product(self.tokenizer.all_special_tokens, stops):
            if special in stop:
                raise ValueError(
                    f"stop={stop!r} has the special token '{special}', which never is in a completion's text; "
                    f"use stop_token_ids=[{self.tokenizer.convert_tokens_to_ids(special)}]"
                )

    def _check_length(self, prompt: int, more: int, loops: int) -> None:
        if prompt + more > self.max_length:
            raise ValueError(
                f"the prompt has {prompt} tokens and max_tokens is {more}, together more than max_length="
                f"{self.max_length}; shorten one or raise it"
            )
        self.memory.check_fits(prompt, prompt + more, loops)

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a prompt given as text needs a tokenizer; give the engine one, or token ids")
            prompt.encode()  # a ValueError that says where it is no proper text, which tokenizers refuse in other words
            tokens = tuple(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        else:
            tokens = _whole("the prompt must be text, or a list of token ids", prompt)
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        odd = next((token for token in tokens if not 0 <= token < self.config.vocab_size), None)
        if odd is not None:
            raise ValueError(f"the prompt's token {odd} is outside the vocabulary of {self.config.vocab_size}")
        return tokens


def _whole(demand: str, given: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Whole numbers as Python's own, whether they come from numpy or torch."""
    try:
        return tuple(operator.index(number) for number in given)
    except TypeError:
        raise ValueError(f"{demand}, not {' '.join(repr(given).split())[:60]}") from None


def mixed(seed: int, number: int) -> int:
    """A seed of its own for a numbered part of what `seed` covers (splitmix64's finaliser)."""
    value = (int(seed) + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return (value ^ (value >> 31)) >> 1
