"""The benchmark of depth sweeps: both ways tell the same, and the products that each needs."""

import json

import pytest
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from looplm.cli.main import app
from looplm.studies import bench_sweep as bench
from looplm.studies.bench_sweep import SweepProblem, bench_sweep

TINY = SweepProblem(width=16, layers=1, loops=3, vocab=32, length=8, rows=5, continuation=2)


def test_both_ways_tell_the_same_to_the_digit():
    apart, together = bench_sweep(TINY, repeats=1, batch_size=2)
    assert (apart.way, apart.speedup, apart.nats_apart) == ("a run for each", 1.0, 0.0)
    assert (together.way, together.nats_apart) == ("one forward", 0.0)
    assert together.seconds > 0


def test_one_forward_needs_a_fraction_of_the_products():
    """8 loops in place of 1 + ... + 8 = 36, and as many readings of the head."""
    problem = SweepProblem(rows=4)
    model, pairs = problem.model().eval(), problem.pairs()
    counts = []
    for way in (bench._apart, bench._together):
        with FlopCounterMode(display=False) as counter:
            way(model, pairs, range(1, 9), 4)
        counts.append(counter.get_total_flops())
    assert counts[0] > 3.5 * counts[1]


def test_the_verb_prints_json_and_names_mistakes():
    small = ["--width", "16", "--layers", "1", "--loops", "2", "--vocab", "32", "--length", "8", "--rows", "2"]
    done = CliRunner().invoke(app, ["bench", "sweep", *small, "--continuation", "2", "--repeats", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert [row["way"] for row in json.loads(done.output)["rows"]] == ["a run for each", "one forward"]
    bad = CliRunner().invoke(app, ["bench", "sweep", *small, "--continuation", "8"])
    assert bad.exit_code == 1
    assert "--continuation 8 must be at least 1 and below --length 8" in bad.output
    with pytest.raises(ValueError, match="multiple of 64"):
        SweepProblem(width=100)
