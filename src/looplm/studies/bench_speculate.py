"""Benchmark: self-speculation against plain decoding, on one request, with the ceiling that acceptance and cost set."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from looplm.engine import Engine, SamplingParams, Speculation
from looplm.engine.batches import LaneBatch
from looplm.engine.pages import SCRATCH
from looplm.engine.store import PAGE
from looplm.models import LoopLMForCausalLM
from looplm.studies.against import Generate
from looplm.studies.timing import seconds_in_turn

_ROUNDS = 15


@dataclass(frozen=True, kw_only=True)
class SpeculationRow:
    """One way to speculate.

    acceptance: share of first proposals that were right · ticks: core steps a token · speedup: over plain decoding, by
        the medians of seconds · ceiling: what acceptance and the bare costs of step and readout allow; `of_ceiling` is
        the share attained · differing: tokens that are not plain decoding's.
    """

    way: str
    seconds: float
    ticks: float
    acceptance: float
    speedup: float
    ceiling: float
    of_ceiling: float
    differing: int


def bench_speculate(
    model: LoopLMForCausalLM, prompts: Sequence[list[int]], params: SamplingParams, repeats: int, deterministic: bool,
    against: Generate | None = None,
) -> list[SpeculationRow]:  # fmt: skip
    """Each entry loop with and without rereading, and the adaptive choice; prompts one after the other.

    `against` is one more way, at full depth, of which only seconds and tokens are known.
    """
    loops = model.config.loops
    ways: dict[str, Speculation | None] = {"plain": None, "adaptive": Speculation()}
    for entry in range(1, loops):
        ways[f"entry {entry}"] = Speculation(entry=entry)
        ways[f"entry {entry}, read once"] = Speculation(entry=entry, reread=False)
    engines = {
        name: Engine(
            model, max_rows=1, max_length=max(map(len, prompts)) + params.max_tokens, speculate=speculate,
            deterministic=deterministic,
        )
        for name, speculate in ways.items()
    }  # fmt: skip
    made: dict[str, list[list[int]]] = {}

    def work(name: str) -> None:
        made[name] = [engines[name].generate([prompt], params)[0].token_ids for prompt in prompts]

    def other(generate: Generate) -> None:
        made["other"] = [generate([prompt], params.max_tokens)[0] for prompt in prompts]

    work_of: dict[str, Callable[[], None]] = {name: partial(work, name) for name in ways}
    if against is not None:
        work_of["other"] = partial(other, against)
    seconds = seconds_in_turn(work_of, repeats)
    costs = {name: _costs(engine) for name, engine in engines.items()}
    plain = statistics.median(seconds["plain"])
    rows = [
        _row(name, speculate, engines[name], statistics.median(seconds[name]), plain, costs[name], costs["plain"],
             _differing(made[name], made["plain"]))
        for name, speculate in ways.items()
    ]  # fmt: skip
    if against is not None:
        speedup = plain / statistics.median(seconds["other"])
        rows.append(
            SpeculationRow(
                way="other", seconds=statistics.median(seconds["other"]), ticks=loops, acceptance=0.0, speedup=speedup,
                ceiling=1.0, of_ceiling=speedup, differing=_differing(made["other"], made["plain"]),
            )
        )  # fmt: skip
    return rows


Cost = Callable[[int], float]


def _row(
    name: str, speculate: Speculation | None, engine: Engine, seconds: float, plain: float, cost: tuple[Cost, Cost],
    plain_cost: tuple[Cost, Cost], differing: int,
) -> SpeculationRow:  # fmt: skip
    stats, loops = engine.stats, engine.memory.loops
    right = stats.agreed / stats.proposed if stats.proposed else 0.0
    entry = loops if speculate is None else speculate.entry or 1
    step, read = plain_cost
    without = loops * step(1) + read(1)
    # A tick has T / entry tokens in the loop; each is read at the loops from `entry` on, or there and at its exit.
    readings = (loops - entry + 1 if speculate is None or speculate.reread else 2) / entry
    at_once = -(-readings // 1)
    a_tick = cost[0](-(-loops // entry)) + cost[1](int(at_once)) * readings / at_once
    ceiling = 1.0 if speculate is None else without / ((entry * right + loops * (1 - right)) * a_tick)
    return SpeculationRow(
        way=name, seconds=seconds, ticks=stats.ticks / max(stats.tokens, 1), acceptance=right,
        speedup=plain / seconds, ceiling=ceiling, of_ceiling=plain / seconds / ceiling, differing=differing,
    )  # fmt: skip


def _costs(engine: Engine) -> tuple[Cost, Cost]:
    """Seconds of a bare core step and of a bare readout of so many lanes of one row, no engine around them."""

    @torch.inference_mode()
    def cost(work: Callable[[LaneBatch], object], lanes: int) -> float:
        batch = _diagonal(engine, lanes)
        times = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            work(batch)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return (lambda lanes: cost(engine.runner.step, lanes)), (lambda lanes: cost(engine.runner.read, lanes))


def _diagonal(engine: Engine, lanes: int) -> LaneBatch:
    """Lanes of an idle engine that follow one another in a text of half the greatest length, each a loop behind."""
    memory = engine.memory
    position = memory.max_blocks * PAGE // 2
    blocks = position // PAGE + 1
    pages = np.arange(lanes * blocks).reshape(lanes, blocks)
    boundary = np.arange(blocks)[None].repeat(lanes, 0) if memory.has_boundary else np.zeros((lanes, 0))
    numbers = np.zeros((5, lanes), dtype=np.int64)
    numbers[0], numbers[2], numbers[3] = np.arange(lanes), position, memory.loops - np.arange(lanes)
    return LaneBatch(
        numbers=numbers,
        core=SCRATCH + 1 + pages % memory.core_pages.num_pages,
        boundary=SCRATCH + 1 + boundary.astype(np.int64) % max(memory.boundary_pages.num_pages, 1),
    )  # fmt: skip


def _differing(made: Sequence[list[int]], wanted: Sequence[list[int]]) -> int:
    pairs = zip(made, wanted, strict=True)
    return sum(one != other for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True))
