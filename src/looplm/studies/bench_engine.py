"""Benchmark: the engine at replayed depths, at fixed depth, transformers' generate, and any other callable."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from looplm.engine import DepthPolicy, Engine, ExitCDF, FixedLoops, SamplingParams
from looplm.models import LoopLMConfig, LoopLMForCausalLM
from looplm.models.accounting import flops_per_token
from looplm.studies.against import Generate, given_to
from looplm.studies.timing import Clock, seconds_by_turns


@dataclass(frozen=True, kw_only=True)
class EngineProblem:
    """Sizes: `requests` prompts of about `prompt` tokens, `tokens` more each, at most `rows` at once.

    Prompts are `prompt` / 2 to 3 `prompt` / 2 tokens long where there are several. Replayed depths are drawn uniformly
    from 1 to `loops`.
    mixed: completions are of `tokens` / 4 to 7 `tokens` / 4 tokens, drawn uniformly, instead of `tokens` each
    min_readout: the engine's: tokens that wait for one another before the head reads them, which pays where it is wide.
    """

    width: int = 512
    layers: int = 6
    loops: int = 4
    vocab: int = 2048
    rows: int = 16
    requests: int = 96
    prompt: int = 16
    tokens: int = 48
    mixed: bool = False
    min_readout: int = 1
    head_dim: int = 64

    def config(self) -> LoopLMConfig:
        """An Ouro-like model of these sizes."""
        return LoopLMConfig(
            vocab_size=self.vocab, hidden_size=self.width, intermediate_size=8 * self.width // 3 // 8 * 8,
            core_layers=self.layers, loops=self.loops, num_attention_heads=self.width // self.head_dim, rope_theta=1e4,
            max_position_embeddings=4096,
        )  # fmt: skip

    def model(self) -> LoopLMForCausalLM:
        """The same, with random weights."""
        torch.manual_seed(0)
        return LoopLMForCausalLM(self.config()).eval()

    def prompts(self) -> list[list[int]]:
        """The requests' prompts, always the same."""
        choice = random.Random(0)
        half = self.prompt // 2 if self.requests > 1 else 0
        lengths = [choice.randint(self.prompt - half, self.prompt + half) for _ in range(self.requests)]
        return [[choice.randrange(self.vocab) for _ in range(length)] for length in lengths]

    def lengths(self) -> list[int]:
        """How many tokens each request asks for."""
        if not self.mixed:
            return [self.tokens] * self.requests
        choice = random.Random(2)
        return [choice.randint(max(1, self.tokens // 4), 7 * self.tokens // 4) for _ in range(self.requests)]

    def depths(self) -> list[list[int]]:
        """The loops of every token of every request."""
        choice = random.Random(1)
        return [[choice.randint(1, self.loops) for _ in range(length)] for length in self.lengths()]

    def full_depths(self) -> list[list[int]]:
        """All loops for every token of every request."""
        return [[self.loops] * length for length in self.lengths()]


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Milliseconds that half and 95 % of the cases stay within."""

    p50: float
    p95: float


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One way to make the tokens that were asked for: median seconds, and what a user sees of them.

    gflops: that these tokens need, prompts at full depth included
    flop_bound: the speed over fixed depth that they allow · of_flop_bound: the share of it attained
    of_flop_rate: FLOPs a second, as a share of those of bare matrix products of the same shapes with `rows` rows
    streamed: weights read a second between two tokens, as a share of what reading them alone attains (meaningful with
        one row).
    first_token, request: from the submission of all requests to a request's first token, and to its last
    between_tokens: from one token of a request to its next; None for what gives all tokens at once.
    """

    way: str
    seconds: float
    tokens_per_second: float
    mean_loops: float
    gflops: float
    flop_bound: float
    of_flop_bound: float
    of_flop_rate: float
    streamed: float
    first_token: Percentiles
    request: Percentiles
    between_tokens: Percentiles | None


@dataclass
class _Waits:
    """Seconds that users waited in one round."""

    first: list[float] = field(default_factory=list)
    request: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@dataclass
class _Way:
    work: Callable[[_Waits, Clock], Iterator[None]]
    depths: list[list[int]]
    rows: int
    rounds: list[_Waits] = field(default_factory=list)  # the one that warms up included

    def run(self, clock: Clock) -> Iterator[None]:
        waits = _Waits()
        yield from self.work(waits, clock)
        self.rounds.append(waits)

    def waits(self, of: Callable[[_Waits], list[float]]) -> list[float]:
        return [seconds for timed in self.rounds[1:] for seconds in of(timed)]


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """What the machine gives in this run: bytes and FLOPs a second of the model's bare matrix products."""

    bytes_per_second: float
    flops_per_second: float


def measure_engine(problem: EngineProblem, repeats: int, against: str | None = None) -> list[EngineRow]:
    """All ways, `repeats` times after a warm-up; `against` names another one, as in `load_callable`.

    They take turns tick by tick, or batch by batch, each on a clock of its own, so that a machine whose speed swings
    swings for all of them. The engine refills; transformers and the other way run every batch to its longest
    completion, of which only the tokens asked for count.
    """
    model = problem.model()
    with given_to(against, model) as other:
        return _measure(problem, repeats, model, other)


def _measure(
    problem: EngineProblem, repeats: int, model: LoopLMForCausalLM, against: Generate | None
) -> list[EngineRow]:  # fmt: skip
    ways = _ways(problem, model, against)
    seconds = seconds_by_turns({name: way.run for name, way in ways.items()}, repeats)
    medians = {name: statistics.median(seconds[name]) for name in ways}
    limits = _Limits(bytes_per_second=streaming_limit(model), flops_per_second=flop_rate(model, problem.rows))
    return [_row(problem, model, name, ways, medians, limits) for name in ways]


def needed_flops(problem: EngineProblem, depths: Sequence[Sequence[int]]) -> int:
    """Of all prompts at full depth and of tokens that do so many loops; each sees the text before it.

    A completion's first token is read from its prompt's last, so it costs its reading alone.
    """
    config, total = problem.config(), 0
    head = 2 * config.hidden_size * config.vocab_size
    for prompt, own in zip(problem.prompts(), depths, strict=True):
        visits = [problem.loops] * len(prompt) + list(own[1:])
        total += sum(flops_per_token(config, loops, position) for position, loops in enumerate(visits, start=1))
        total -= (len(visits) - len(own)) * head
    return total


def streaming_limit(model: LoopLMForCausalLM) -> float:
    """Bytes a second at which the core's matrices can be read: each multiplied by one vector."""
    weights = _matrices(model.model.core)
    return sum(weight.numel() * weight.element_size() for weight in weights) / _fastest(weights, rows=1)


def flop_rate(model: LoopLMForCausalLM, rows: int) -> float:
    """FLOPs a second of a token's matrix products at full depth, head included, for `rows` tokens at once."""
    weights = [*_matrices(model.model.core) * model.config.loops, model.lm_head.weight]
    return 2 * rows * sum(weight.numel() for weight in weights) / _fastest(weights, rows)


def _matrices(module: nn.Module) -> list[Tensor]:
    return [part.weight for part in module.modules() if isinstance(part, nn.Linear)]


@torch.no_grad()
def _fastest(weights: Sequence[Tensor], rows: int, rounds: int = 5) -> float:
    """Seconds to multiply each matrix with so many vectors, by the better of two ways."""
    ones = {weight.shape[1]: torch.ones(rows, weight.shape[1], dtype=weight.dtype) for weight in weights}
    ways = (lambda weight, x: F.linear(x, weight), lambda weight, x: weight @ (x[0] if rows == 1 else x.T))
    best = math.inf
    for way in ways:
        for _ in range(rounds):
            began = time.perf_counter()
            for weight in weights:
                way(weight, ones[weight.shape[1]])
            best = min(best, time.perf_counter() - began)
    return best


def _ways(problem: EngineProblem, model: LoopLMForCausalLM, against: Generate | None) -> dict[str, _Way]:
    longest = max(map(len, problem.prompts())) + max(problem.lengths())
    rows, full, drawn = problem.rows, problem.full_depths(), problem.depths()
    fixed, nothing = FixedLoops(problem.loops), [()] * problem.requests

    def engine(depth: DepthPolicy, replay: Sequence[Sequence[int]]) -> Callable[[_Waits, Clock], Iterator[None]]:
        own = Engine(model, max_rows=problem.rows, max_length=longest, min_readout=problem.min_readout)
        return partial(_run, problem, own, depth, replay)

    ways = {
        "fixed depth": _Way(engine(fixed, nothing), full, rows),
        "gate asked, never leaving": _Way(engine(ExitCDF(1.0), nothing), full, rows),
        "replayed depths": _Way(engine(fixed, drawn), drawn, rows),
        "transformers generate": _Way(partial(_in_batches, problem, partial(_transformers, model), rows), full, rows),
    }
    if against is not None:
        ways["other"] = _Way(partial(_in_batches, problem, against, rows), full, rows)
        if rows > 1:
            ways["other, one at a time"] = _Way(partial(_in_batches, problem, against, 1), full, 1)
    return ways


def _run(
    problem: EngineProblem, engine: Engine, depth: DepthPolicy, replay: Sequence[Sequence[int]],
    waits: _Waits, clock: Clock,
) -> Iterator[None]:  # fmt: skip
    """A tick at a time."""
    engine.forget_prefixes()
    last = dict[int, float]()
    for prompt, length, loops in zip(problem.prompts(), problem.lengths(), replay, strict=True):
        engine.submit(prompt, SamplingParams(max_tokens=length, ignore_eos=True), depth=depth, replay=loops)
    while engine.busy:
        events = engine.tick()
        now = clock.seconds
        for event in events:
            if event.completion is not None:
                assert event.completion.error is None, event.completion.error
                waits.request.append(now)
            elif event.number in last:
                waits.between.append(now - last[event.number])
            else:
                waits.first.append(now)
            last[event.number] = now
        yield


def _in_batches(problem: EngineProblem, generate: Generate, rows: int, waits: _Waits, clock: Clock) -> Iterator[None]:
    """Batches of `rows` requests in order, one after the other, each to its longest completion."""
    prompts, lengths = problem.prompts(), problem.lengths()
    for first in range(0, problem.requests, rows):
        batch, longest = prompts[first : first + rows], max(lengths[first : first + rows])
        made = generate(batch, longest)
        if [len(tokens) for tokens in made] != [longest] * len(batch):
            raise ValueError(f"the other way made {[len(tokens) for tokens in made]} tokens, not {longest} each")
        waits.request += [clock.seconds] * len(batch)
        yield
    waits.first = waits.request


@torch.no_grad()
def _transformers(model: LoopLMForCausalLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """A left-padded batch: how transformers is used."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return made[:, length:].tolist()


def _row(
    problem: EngineProblem, model: LoopLMForCausalLM, name: str, ways: dict[str, _Way], medians: dict[str, float],
    limits: _Limits,
) -> EngineRow:  # fmt: skip
    way, seconds, asked = ways[name], medians[name], sum(problem.lengths())
    flops = needed_flops(problem, way.depths)
    bound = needed_flops(problem, problem.full_depths()) / flops
    mean_loops = sum(map(sum, way.depths)) / asked
    core = _bytes(model.model.core.parameters())
    read = mean_loops * core + _bytes([model.lm_head.weight])
    between = way.waits(lambda waits: waits.between)
    step = statistics.median(between) if between else seconds / asked * way.rows
    return EngineRow(
        way=name, seconds=seconds, tokens_per_second=asked / seconds, mean_loops=mean_loops, gflops=flops / 1e9,
        flop_bound=bound, of_flop_bound=medians["fixed depth"] / seconds / bound,
        of_flop_rate=flops / seconds / limits.flops_per_second, streamed=read / step / limits.bytes_per_second,
        first_token=_percentiles(way.waits(lambda waits: waits.first)),
        request=_percentiles(way.waits(lambda waits: waits.request)),
        between_tokens=_percentiles(between) if between else None,
    )  # fmt: skip


def _percentiles(waits: Sequence[float]) -> Percentiles:
    ordered = sorted(1e3 * seconds for seconds in waits)
    return Percentiles(p50=ordered[len(ordered) // 2], p95=ordered[int(0.95 * len(ordered))])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
