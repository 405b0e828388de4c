"""Benchmark: the parallel sampler against plain decoding of the same model, its speed beside what it changes."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from looplm.engine import Completion, Engine, ParallelSampler, ParallelSettings, SamplingParams, Speculation
from looplm.models import LoopLMForCausalLM
from looplm.studies.timing import seconds_in_turn

Prompts = Sequence[list[int]]


@dataclass(frozen=True, kw_only=True)
class ParallelRow:
    """One way to decode.

    speedup: tokens/s over the engine's plain decoding · ticks: calls of the core, one after the other, a token
    core_steps: applications of the core to one position, a token · disagreeing: share of tokens that plain decoding
        would not have chosen after the very text before them · differing: share of tokens that are not plain decoding's
        at the same place, where one early difference counts for all that follows.
    """

    way: str
    tokens_per_second: float
    speedup: float
    ticks: float
    core_steps: float
    disagreeing: float
    differing: float


def bench_parallel(
    model: LoopLMForCausalLM, prompts: Prompts, tokens: int, settings: Sequence[ParallelSettings], repeats: int
) -> list[ParallelRow]:  # fmt: skip
    """Plain decoding, lossless speculation, one position at a time with one slot, and each of `settings`; greedy."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    longest = max(map(len, prompts)) + tokens
    alone = ParallelSettings(wavefront=1, inner_loops=model.config.loops, threshold=0.0)
    samplers = {_name(one): ParallelSampler(model, settings=one) for one in settings}
    samplers = {"one at a time, one slot": ParallelSampler(model, settings=alone)} | samplers
    engines = {
        name: Engine(model, max_rows=1, max_length=longest, speculate=speculate)
        for name, speculate in (("plain", None), ("speculation, lossless", Speculation()))
    }
    made: dict[str, list[Completion]] = {}

    def work(name: str, generate: Callable[[Prompts, SamplingParams], list[Completion]]) -> None:
        made[name] = [done for prompt in prompts for done in generate([prompt], params)]

    ways = engines | samplers
    seconds = seconds_in_turn({name: partial(work, name, way.generate) for name, way in ways.items()}, repeats)
    count, judge = tokens * len(prompts), ParallelSampler(model)
    plain = [token for done in made["plain"] for token in done.token_ids]
    return [
        ParallelRow(
            way=name,
            tokens_per_second=count / statistics.median(seconds[name]),
            speedup=statistics.median(seconds["plain"]) / statistics.median(seconds[name]),
            ticks=way.stats.ticks / way.stats.tokens,
            core_steps=way.stats.core_steps / way.stats.tokens,
            disagreeing=sum(_disagreeing(judge, done, params) for done in made[name]) / count,
            differing=_unequal([token for done in made[name] for token in done.token_ids], plain) / count,
        )
        for name, way in ways.items()
    ]


def _name(one: ParallelSettings) -> str:
    return f"{one.inner_loops} inner loops, threshold {one.threshold:g}"


def _disagreeing(judge: ParallelSampler, done: Completion, params: SamplingParams) -> int:
    return _unequal(done.token_ids, judge.plain_choices(done, params))


def _unequal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return sum(one != other for one, other in zip(ours, theirs, strict=True))
