"""A request's tokens and loops are its own: whatever runs beside it, comes before it, or takes its pages away."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from engine_models import huginn_like, ouro_like

from looplm.engine import (
    AdjacentKV,
    ArgmaxStable,
    Completion,
    DepthPolicy,
    Engine,
    EntropyBelow,
    ExitCDF,
    FixedLoops,
    LogitsKL,
    LookAhead,
    RingKV,
    SamplingParams,
    SecondDifference,
    Speculation,
    StateConverged,
)

DEPTHS: list[DepthPolicy] = [
    FixedLoops(4), FixedLoops(2), StateConverged(0.3), SecondDifference(0.3, min_loops=2), LogitsKL(0.05),
    EntropyBelow(1.5), ArgmaxStable(2),
]  # fmt: skip
GATED: list[DepthPolicy] = [ExitCDF(0.5), ExitCDF(0.9, min_loops=2), LookAhead(ExitCDF(0.3))]


@dataclass(frozen=True)
class Asked:
    """One request of the fuzz, to be made again alone."""

    prompt: tuple[int, ...]
    params: SamplingParams
    depth: DepthPolicy
    state_seed: int


def a_request(choice: random.Random, depths: list[DepthPolicy]) -> Asked:
    shift = choice.randrange(2)
    stem = [(7 * place + shift) % 61 for place in range(choice.choice([0, 0, 16, 33]))]
    prompt = [*stem, *(choice.randrange(61) for _ in range(choice.randint(1, 20)))]
    params = SamplingParams(
        max_tokens=choice.randint(1, 12), temperature=choice.choice([0.0, 0.0, 0.8, 1.3]), seed=choice.randrange(100),
        top_p=choice.choice([1.0, 0.7]), top_k=choice.choice([0, 5]), min_p=choice.choice([0.0, 0.1]),
        repetition_penalty=choice.choice([1.0, 1.2]), presence_penalty=choice.choice([0.0, 0.5]),
        stop_token_ids=(choice.randrange(61),), logprobs=choice.choice([0, 2]),
    )  # fmt: skip
    return Asked(tuple(prompt), params, choice.choice(depths), choice.randrange(2))


def alone(engine: Engine, asked: Asked) -> Completion:
    """What a request gets with an engine to itself."""
    engine.forget_prefixes()
    return engine.generate([asked.prompt], asked.params, depth=asked.depth, state_seed=asked.state_seed)[0]


def check_pages(engine: Engine) -> None:
    """Every page is free, or has as many users as hold it: rows, and prompts that may come again."""
    memory = engine.memory
    held = Counter(page for row in engine.scheduler.rows for block in row.blocks for page in block.core)
    edges = Counter(page for row in engine.scheduler.rows for block in row.blocks for page in block.boundary)
    if memory.prefixes is not None:
        for entry in memory.prefixes._entries.values():
            held.update(entry.block.core)
            edges.update(entry.block.boundary)
    for pages, users in ((memory.core_pages, held), (memory.boundary_pages, edges)):
        assert {page: count for page, count in enumerate(pages.users) if count and page > 1} == dict(users)
        assert sorted(pages._free) == [page for page, count in enumerate(pages.users) if count == 0]
    lanes = [lane.number for row in engine.scheduler.rows for lane in {*row.lanes, *row.behind}]
    assert sorted([*lanes, *engine.scheduler._lanes]) == list(range(engine.runner._nobody))
    slots = [block.slot for block in engine.scheduler.filling] + engine.scheduler._slots
    assert sorted(slots) == list(range(len(slots)))
    assert {block.row for block in engine.scheduler.filling} <= set(engine.scheduler.rows)


@pytest.mark.parametrize(
    ("family", "kv", "speculate", "kv_bytes", "steps"),
    [
        (ouro_like, "full", None, 2**16, 2000),
        (ouro_like, "full", Speculation(entry=1), 2**16, 1500),
        (ouro_like, "full", Speculation(entry=2, reread=False), 2**16, 1000),
        (ouro_like, RingKV(2), None, 20 * 2**12, 1000),
        (ouro_like, "averaged", None, 30 * 2**11, 1000),
        (ouro_like, "recomputed", None, 2**16, 1000),
        (huginn_like, "full", None, 9 * 7 * 2**11, 1000),
        (huginn_like, "full", Speculation(entry=1), 9 * 7 * 2**11, 1000),
        (huginn_like, AdjacentKV(2), None, 20 * 5 * 2**11, 1000),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_random_traffic_changes_nothing(family, kv, speculate, kv_bytes: int, steps: int) -> None:
    """Admission, refills, cancellation, preemption, prefix reuse: bit for bit what each request gets alone."""
    model = family(dtype=torch.float32, core_layers=1)
    depths = DEPTHS + (GATED if model.config.exit_gate else [])
    if speculate is not None and model.config.coda_layers:
        depths = [depth for depth in depths if not depth.needs_logits]
    choice = random.Random(f"{family.__name__} {kv} {speculate}")
    engine = Engine(
        model, kv=kv, max_rows=5, max_length=80, prefill_tokens=choice.choice([16, 32, 64]), deterministic=True,
        speculate=speculate, kv_bytes=kv_bytes, min_readout=choice.choice([1, 2]),
    )  # fmt: skip
    asked: dict[int, Asked] = {}
    done: dict[int, Completion] = {}
    for step in range(steps):
        act = choice.random()
        if act < 0.15 and len(engine.scheduler.waiting) < 8:
            request = a_request(choice, depths)
            (number,) = engine.submit(
                request.prompt, request.params, depth=request.depth, state_seed=request.state_seed
            )  # fmt: skip
            asked[number] = request
        elif act < 0.16 and asked:
            engine.cancel(choice.choice(list(asked)))
        elif act < 0.17 and engine.scheduler.rows:
            engine.scheduler._preempt(choice.choice(engine.scheduler.rows))
        else:
            done |= {event.number: event.completion for event in engine.tick() if event.completion is not None}
        if step % 10 == 0:
            check_pages(engine)
    while engine.busy:
        done |= {event.number: event.completion for event in engine.tick() if event.completion is not None}
    check_pages(engine)
    assert not engine.scheduler.rows
    assert set(done) == set(asked)
    assert engine.scheduler.preemptions > 0
    assert engine.stats.reused_tokens > 0 or kv == "averaged"
    finished = [number for number, completion in done.items() if completion.finish_reason != "cancelled"]
    assert len(finished) > steps / 40
    apart = Engine(model, kv=kv, max_rows=1, max_length=80, deterministic=True)
    for number in finished:
        expected = alone(apart, asked[number])
        got = done[number]
        assert (got.token_ids, got.loops, got.finish_reason) == (
            expected.token_ids, expected.loops, expected.finish_reason,
        ), asked[number]  # fmt: skip
        assert got.logprobs == expected.logprobs
        assert got.top_logprobs == expected.top_logprobs
