"""Benchmark: the engine at replayed depths, at fixed depth, transformers' generate, and any other callable."""

import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.nn import functional as F

from looplm.engine import DepthPolicy, Engine, ExitCDF, FixedLoops, SamplingParams
from looplm.models import LoopLMConfig, LoopLMForCausalLM, save
from looplm.models.accounting import flops_by_part
from looplm.studies.timing import seconds_in_turn

Generate = Callable[[list[list[int]], int], list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class EngineProblem:
    """Sizes: `requests` prompts of about `prompt` tokens, `tokens` more each, at most `rows` at once.

    Prompts are `prompt` / 2 to 3 `prompt` / 2 tokens long where there are several. Replayed depths are drawn uniformly
    from 1 to `loops`.
    """

    width: int = 512
    layers: int = 6
    loops: int = 4
    vocab: int = 2048
    rows: int = 16
    requests: int = 32
    prompt: int = 16
    tokens: int = 48
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

    def depths(self) -> list[list[int]]:
        """The loops of every token of every request."""
        choice = random.Random(1)
        return [[choice.randint(1, self.loops) for _ in range(self.tokens)] for _ in range(self.requests)]


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One way to make the tokens: median seconds, and what a user sees of them.

    p50_ms, p95_ms: of the time from one token of a request to its next (empty for what gives all tokens at once)
    gflops: that these tokens need, prompts included · streamed: weights read a second, as a share of what reading them
    alone attains in the same run (meaningful with one row).
    """

    way: str
    seconds: float
    tokens_per_second: float
    mean_loops: float
    gflops: float
    p50_ms: float | None
    p95_ms: float | None
    streamed: float


@dataclass
class _Way:
    work: Callable[[], list[float]]
    mean_loops: float
    gaps: list[list[float]] = field(default_factory=list)  # of each round, the one that warms up included

    def run(self) -> None:
        self.gaps.append(self.work())


def measure_engine(problem: EngineProblem, repeats: int, against: str | None = None) -> list[EngineRow]:
    """All ways in turn, `repeats` times after a warm-up; `against` names another one, as in `load_callable`."""
    model = problem.model()
    with TemporaryDirectory() as folder:
        if against is None:
            return _measure(problem, repeats, model, None)
        save(model, folder, layout="ouro")
        return _measure(problem, repeats, model, load_callable(against)(Path(folder)))


def _measure(
    problem: EngineProblem, repeats: int, model: LoopLMForCausalLM, against: Generate | None
) -> list[EngineRow]:  # fmt: skip
    ways = _ways(problem, model, against)
    seconds = seconds_in_turn({name: way.run for name, way in ways.items()}, repeats)
    limit = streaming_limit(model)
    return [_row(problem, model, name, way, statistics.median(seconds[name]), limit) for name, way in ways.items()]


def flop_bound(problem: EngineProblem) -> float:
    """(F0 + r_max Fr) / (F0 + d Fr), prompts at full depth included: what replaying depths can gain at best."""
    mean = statistics.mean(depth for depths in problem.depths() for depth in depths)
    config = problem.config()
    return _gflops(problem, config, problem.loops) / _gflops(problem, config, mean)


def load_callable(place: str) -> Callable[[Path], Generate]:
    """`factory` of "file.py:factory": called with a model folder it gives generate(prompts, max_new_tokens) -> tokens.

    Raises:
        ValueError: if there is no such file or function.
    """
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("against", path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"'{place}' is not file.py:function")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function '{name}'")
    return getattr(module, name)


@torch.no_grad()
def streaming_limit(model: LoopLMForCausalLM, rounds: int = 5) -> float:
    """Bytes a second at which the core's matrices can be read: the best of two ways to multiply each by one vector."""
    weights = [module.weight for module in model.model.core.modules() if isinstance(module, nn.Linear)]
    ones = {weight.shape[1]: torch.ones(1, weight.shape[1], dtype=weight.dtype) for weight in weights}
    ways = (lambda weight, x: F.linear(x, weight), lambda weight, x: torch.mv(weight, x[0]))
    best = 0.0
    for way in ways:
        for _ in range(rounds):
            began = time.perf_counter()
            for weight in weights:
                way(weight, ones[weight.shape[1]])
            read = sum(weight.numel() * weight.element_size() for weight in weights)
            best = max(best, read / (time.perf_counter() - began))
    return best


def _ways(problem: EngineProblem, model: LoopLMForCausalLM, against: Generate | None) -> dict[str, _Way]:
    prompts, depths = problem.prompts(), problem.depths()
    mean = statistics.mean(depth for own in depths for depth in own)
    full = float(problem.loops)
    ways = {
        "fixed depth": _Way(lambda: _run(problem, model, prompts, FixedLoops(problem.loops), None), full),
        "gate asked, never leaving": _Way(lambda: _run(problem, model, prompts, ExitCDF(1.0), None), full),
        "replayed depths": _Way(lambda: _run(problem, model, prompts, FixedLoops(problem.loops), depths), mean),
        "transformers generate": _Way(lambda: _generate(problem, model, prompts), full),
    }
    if against is not None:
        ways["other"] = _Way(lambda: _other(against, problem, prompts), full)
    return ways


def _run(
    problem: EngineProblem, model: LoopLMForCausalLM, prompts: Sequence[list[int]], depth: DepthPolicy,
    replay: Sequence[list[int]] | None,
) -> list[float]:  # fmt: skip
    """The seconds between the tokens of each request."""
    engine = Engine(model, depth=depth, max_rows=problem.rows, max_length=2 * problem.prompt + problem.tokens)
    params = SamplingParams(max_tokens=problem.tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, params, replay=() if replay is None else replay[number])
    last: dict[int, float] = {}
    gaps = []
    while engine.busy:
        events = engine.tick()
        now = time.perf_counter()
        for event in events:
            if event.token is not None:
                if event.number in last:
                    gaps.append(now - last[event.number])
                last[event.number] = now
    return gaps


@torch.no_grad()
def _generate(problem: EngineProblem, model: LoopLMForCausalLM, prompts: Sequence[list[int]]) -> list[float]:
    """Left-padded batches of `rows`, one after the other: how transformers is used."""
    for first in range(0, len(prompts), problem.rows):
        batch = prompts[first : first + problem.rows]
        length = max(map(len, batch))
        ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in batch])
        model.generate(
            ids, attention_mask=mask, max_new_tokens=problem.tokens, min_new_tokens=problem.tokens, do_sample=False
        )
    return []


def _other(against: Generate, problem: EngineProblem, prompts: Sequence[list[int]]) -> list[float]:
    for first in range(0, len(prompts), problem.rows):
        batch = list(prompts[first : first + problem.rows])
        made = against(batch, problem.tokens)
        if [len(tokens) for tokens in made] != [problem.tokens] * len(batch):
            raise ValueError(f"the other way made {[len(tokens) for tokens in made]} tokens, not {problem.tokens} each")
    return []


def _row(
    problem: EngineProblem, model: LoopLMForCausalLM, name: str, way: _Way, seconds: float, limit: float
) -> EngineRow:  # fmt: skip
    made = problem.requests * problem.tokens
    gaps = sorted(gap for timed in way.gaps[1:] for gap in timed)
    core = sum(p.numel() * p.element_size() for p in model.model.core.parameters())
    head = model.lm_head.weight.numel() * model.lm_head.weight.element_size()
    read = made * (way.mean_loops * core + head) / problem.rows
    return EngineRow(
        way=name, seconds=seconds, tokens_per_second=made / seconds, mean_loops=way.mean_loops,
        gflops=_gflops(problem, model.config, way.mean_loops),
        p50_ms=1e3 * gaps[len(gaps) // 2] if gaps else None,
        p95_ms=1e3 * gaps[int(0.95 * len(gaps))] if gaps else None, streamed=read / seconds / limit,
    )  # fmt: skip


def _gflops(problem: EngineProblem, config: LoopLMConfig, mean_loops: float) -> float:
    """Of all prompts at full depth and all tokens at a mean depth; each token sees half of the longest text."""
    part = flops_by_part(config, context_length=problem.prompt + problem.tokens // 2)
    once = part["prelude"] + part["coda"] + part["head"]
    loop = part["core"] + part["gate"] + part["injection"]
    prompt = problem.requests * problem.prompt * (once - part["head"] + problem.loops * loop)
    return (prompt + problem.requests * problem.tokens * (once + mean_loops * loop)) / 1e9
