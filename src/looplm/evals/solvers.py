"""Who answers: looplm's engine at any depth, each completion readable at every shorter budget."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from looplm.engine import Completion, DepthPolicy, Engine, FixedLoops, SamplingParams
from looplm.evals.asking import asked_ids, turn_ends
from looplm.evals.progress import Advance, each_of, unheard
from looplm.evals.prompts import Prompt
from looplm.evals.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One completion: its tokens, the loops of each, and whether it ended by itself, before the limit."""

    token_ids: Sequence[int]
    loops: Sequence[int]
    finished: bool

    def within(self, budget: int) -> "Attempt":
        """What a limit of `budget` tokens would have left of it.

        Greedy and seeded sampling choose each token from what lies before it alone, so this is what a run at that limit
        generates (on CPU with `deterministic` to the bit, else but for near-ties).
        """
        if len(self.token_ids) <= budget:
            return self
        return Attempt(token_ids=self.token_ids[:budget], loops=self.loops[:budget], finished=False)


class Solver(Protocol):
    """Who completes prompts; a test's stub, or `EngineSolver`."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides its answers, for the result's settings."""
        ...

    def complete(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], depth: DepthPolicy, limit: int
    ) -> list[list[Attempt]]:  # fmt: skip
        """An attempt of at most `limit` tokens for every seed of every prompt."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """What tokens say to who marks them."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSolver:
    """Completes by `engine`, which must have the loops that depths ask for and room for prompt and budget.

    sampling: temperature, filters and stop strings; its limit, seed and `n` are set by what is asked. 0 is greedy, the
    papers sample at 0.2 (repeated runs) and 0.6 (pass@k) · advance: hears how many answers there are.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams = field(default_factory=SamplingParams)
    advance: Advance = unheard

    @property
    def settings(self) -> Mapping[str, Any]:
        """The sampling that holds for every request."""
        asked = asdict(
            replace(self.sampling, stop=list(self.sampling.stops), logit_bias=dict(self.sampling.logit_bias))
        )
        set_elsewhere = ("max_tokens", "seed", "n", "logprobs", "logprobs_mode")
        return {name: value for name, value in asked.items() if name not in set_elsewhere}

    def complete(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], depth: DepthPolicy, limit: int
    ) -> list[list[Attempt]]:  # fmt: skip
        """Everything in one batch, each sample by its own seed.

        Raises:
            ValueError: for several samples of a greedy choice, a prompt that has no room, or a model that fails.
        """
        if self.sampling.temperature == 0 and any(len(each) > 1 for each in seeds):
            raise ValueError("greedy answers are the same for every seed; set a temperature, or take one sample")
        asked = [
            (tokens, replace(self.sampling, max_tokens=limit, seed=seed, n=1))
            for tokens, each in zip([asked_ids(self.tokenizer, prompt) for prompt in prompts], seeds, strict=True)
            for seed in each
        ]
        tokens, params = zip(*asked, strict=True)
        where = f"loops={depth.loops}" if isinstance(depth, FixedLoops) else str(depth)
        told = each_of(len(asked), f"answers at {where}", self.advance)
        done = iter(self.engine.generate(tokens, params, told=told, depth=depth))
        return [[_attempt(next(done)) for _ in each] for each in seeds]

    def text(self, token_ids: Sequence[int]) -> str:
        """The decoded tokens, up to the stop string that ends first."""
        text = str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self.sampling.stops if stop in text]
        return text[: min(found)[1]] if found else text


def engine_solver(
    subject: Subject, prompts: Sequence[Prompt], sampling: SamplingParams, limit: int, *, rows: int = 8,
    advance: Advance = unheard,
) -> EngineSolver:  # fmt: skip
    """One that has room for these prompts with `limit` new tokens each, `rows` at once, at the subject's depths.

    Answers to turns also end where the chat template closes them.

    Raises:
        ValueError: for turns without a chat template, or what the engine cannot do.
    """
    tokenizer = subject.tokenizer
    ends = turn_ends(tokenizer) if any(not isinstance(prompt, str) for prompt in prompts) else []
    engine = Engine(
        subject.model, tokenizer, kv=subject.kv, loops=subject.loops, max_rows=rows, kv_bytes=2**40,
        max_length=limit + max(len(asked_ids(tokenizer, prompt)) for prompt in prompts),
    )  # fmt: skip
    sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends))
    return EngineSolver(engine=engine, tokenizer=tokenizer, sampling=sampling, advance=advance)


def _attempt(done: Completion) -> Attempt:
    if done.finish_reason == "error":
        raise ValueError(f"an answer failed: {done.error}; look at the model's weights and dtype")
    return Attempt(token_ids=done.token_ids, loops=done.loops, finished=done.finish_reason == "stop")
