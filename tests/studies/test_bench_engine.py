"""The engine's benchmark: what it asks for is made, only that counts, and its FLOPs are the model's own."""

import json

import pytest
from torch import nn
from typer.testing import CliRunner

from looplm.cli.main import app
from looplm.studies.bench_engine import (
    EngineProblem,
    Percentiles,
    _in_batches,
    _Waits,
    _ways,
    flop_rate,
    measure_engine,
    needed_flops,
    streaming_limit,
)
from looplm.studies.timing import Clock, seconds_by_turns

TINY = EngineProblem(width=64, layers=2, loops=3, vocab=97, rows=2, requests=5, prompt=6, tokens=8, mixed=True)
SIZES = ["--width", "64", "--layers", "1", "--loops", "2", "--vocab", "32", "--rows", "2", "--requests", "3"]
SIZES += ["--prompt", "4", "--tokens", "4", "--repeats", "1"]


def test_mixed_lengths_are_drawn_from_a_quarter_to_seven_quarters():
    problem = EngineProblem(tokens=20, requests=400, mixed=True)
    lengths = problem.lengths()
    assert (min(lengths), max(lengths)) == (5, 35)
    assert sum(lengths) / 400 == pytest.approx(20, abs=1.5)
    assert [len(depths) for depths in problem.depths()] == lengths
    same = EngineProblem(tokens=20, requests=400)
    assert same.lengths() == [20] * 400
    assert same.prompts() == problem.prompts()


def test_needed_flops_are_those_of_the_weights_that_each_token_meets():
    model = TINY.model()
    core = sum(part.weight.numel() for part in model.model.core.modules() if isinstance(part, nn.Linear))
    loop, head = 2 * (core + model.model.exit_gate.weight.numel()), 2 * model.lm_head.weight.numel()
    wanted = 0
    for prompt, own in zip(TINY.prompts(), TINY.depths(), strict=True):
        for position in range(len(prompt)):
            wanted += TINY.loops * (loop + 4 * (position + 1) * 64 * TINY.layers)
        for place, loops in enumerate(own[1:]):
            wanted += loops * (loop + 4 * (len(prompt) + place + 1) * 64 * TINY.layers)
        wanted += len(own) * head
    assert needed_flops(TINY, TINY.depths()) == wanted


def test_the_engine_makes_what_was_asked_for_at_the_depths_replayed():
    ways = _ways(TINY, TINY.model(), None)
    for name, depths in (("fixed depth", TINY.full_depths()), ("replayed depths", TINY.depths())):
        engine = ways[name].work.args[1]
        tokens, loops = engine.stats.tokens, engine.stats.loops
        waits = _Waits()
        list(ways[name].work(waits, _running()))
        assert engine.stats.tokens - tokens == sum(TINY.lengths())
        assert engine.stats.loops - loops == sum(map(sum, depths))
        assert len(waits.first) == len(waits.request) == TINY.requests
        assert len(waits.between) == sum(TINY.lengths()) - TINY.requests
        assert sum(waits.request) == pytest.approx(sum(waits.first) + sum(waits.between))


def test_batches_run_to_their_longest_completion_and_wait_for_it():
    asked = []

    def generate(prompts, tokens):
        asked.append((prompts, tokens))
        return [[0] * tokens for _ in prompts]

    waits = _Waits()
    list(_in_batches(TINY, generate, TINY.rows, waits, _running()))
    prompts, lengths = TINY.prompts(), TINY.lengths()
    assert [batch for batch, _ in asked] == [prompts[0:2], prompts[2:4], prompts[4:5]]
    assert [tokens for _, tokens in asked] == [max(lengths[0:2]), max(lengths[2:4]), lengths[4]]
    assert waits.first == waits.request
    assert waits.request == sorted(waits.request)
    assert len(set(waits.request)) == 3
    assert waits.between == []
    with pytest.raises(ValueError, match=r"the other way made \[1, 1\] tokens, not"):
        next(_in_batches(TINY, lambda prompts, tokens: [[0]] * len(prompts), TINY.rows, _Waits(), _running()))


def test_ways_take_turns_and_each_ones_clock_stands_still_for_the_others(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr("looplm.studies.timing.time.perf_counter", lambda: now[0])

    def way(name, pieces):
        def run(clock):
            for piece in pieces:
                now[0] += piece
                order.append((name, clock.seconds))
                yield

        return run

    found = seconds_by_turns({"a": way("a", [1, 2]), "b": way("b", [10, 20, 30])}, repeats=1)
    assert found == {"a": [3.0], "b": [60.0]}
    assert order[:5] == [("a", 1.0), ("b", 10.0), ("a", 3.0), ("b", 30.0), ("b", 60.0)]
    assert len(order) == 10  # the round that warms up is not counted


def _running():
    clock = Clock()
    clock.begin()
    return clock


def test_rows_say_the_same_thing_in_several_ways():
    rows = measure_engine(TINY, repeats=2)
    assert [row.way for row in rows] == [
        "fixed depth", "gate asked, never leaving", "replayed depths", "transformers generate",
    ]  # fmt: skip
    fixed, _, replayed, transformers = rows
    for row in rows:
        assert row.tokens_per_second == pytest.approx(sum(TINY.lengths()) / row.seconds)
        assert row.of_flop_bound * row.flop_bound == pytest.approx(fixed.seconds / row.seconds)
        assert row.of_flop_rate / fixed.of_flop_rate == pytest.approx(row.of_flop_bound)
        assert 0 < row.first_token.p50 <= row.request.p50 <= row.request.p95
    assert (fixed.mean_loops, fixed.flop_bound) == (3, 1)
    assert replayed.mean_loops == pytest.approx(sum(map(sum, TINY.depths())) / sum(TINY.lengths()))
    assert replayed.flop_bound == needed_flops(TINY, TINY.full_depths()) / needed_flops(TINY, TINY.depths()) > 1
    assert transformers.gflops == fixed.gflops
    assert transformers.between_tokens is None
    assert isinstance(fixed.between_tokens, Percentiles)


def test_the_limits_are_rates_of_the_same_products(monkeypatch):
    model = TINY.model()
    core = sum(part.weight.numel() for part in model.model.core.modules() if isinstance(part, nn.Linear))
    monkeypatch.setattr("looplm.studies.bench_engine._fastest", lambda weights, rows: 2.0)
    assert streaming_limit(model) == 4 * core / 2
    assert flop_rate(model, 5) == 2 * 5 * (3 * core + model.lm_head.weight.numel()) / 2


def test_the_verb_prints_json_and_tables(tmp_path):
    other = tmp_path / "other.py"
    other.write_text("def factory(folder):\n    return lambda prompts, tokens: [[0] * tokens for _ in prompts]\n")
    arguments = ["bench", "engine", *SIZES, "--mixed", "--against", f"{other}:factory"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert found["problem"]["mixed"] is True
    assert [row["way"] for row in found["rows"][-2:]] == ["other", "other, one at a time"]
    assert set(found["rows"][0]["request"]) == {"p50", "p95"}
    assert found["ratio"]["fixed depth / fixed depth"] == 1
    printed = CliRunner().invoke(app, ["bench", "engine", *SIZES]).output
    assert "mixed=False" in printed
    assert "of the FLOP bound" in printed
    refused = CliRunner().invoke(app, ["bench", "engine", *SIZES, "--against", f"{other}:nothing"])
    assert refused.exit_code == 1
    assert refused.output == f"looplm: {other} has no function 'nothing'\n"
