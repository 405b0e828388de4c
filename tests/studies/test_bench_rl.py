"""The benchmark of RLTT's step: its price counted in products, and what it prints."""

import json

import pytest
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from looplm.cli.main import app
from looplm.studies.bench_rl import WEIGHTS, RLProblem, bench_rl, training_step

TINY = RLProblem(width=8, layers=1, loops=3, vocab=32, length=8, rows=2)


def flops(name, problem):
    step = training_step(problem, WEIGHTS[name])
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def test_every_loop_costs_one_head_more_and_no_block():
    """On 6 of 8 tokens a row, two products of the head a loop; a third, in place, the counter does not see."""
    tokens = TINY.rows * 6
    more = flops("RLTT, uniform", TINY) - flops("GRPO", TINY)
    assert more == (TINY.loops - 1) * 2 * 2 * tokens * TINY.width * TINY.vocab


def test_the_bar_is_within_reach_at_its_sizes():
    problem = RLProblem(length=16, rows=1)
    assert flops("RLTT, exit distribution", problem) < 1.06 * flops("GRPO", problem)


def test_every_weighting_is_timed_and_named():
    rows = bench_rl(TINY, repeats=1)
    assert [row.weights for row in rows] == list(WEIGHTS)
    assert (rows[0].time_ratio, rows[0].memory_ratio) == (1.0, 1.0)
    assert all(row.seconds > 0 and row.peak_bytes > 0 for row in rows)


def test_the_verb_prints_json_and_refuses_nonsense():
    sizes = ["--width", "8", "--layers", "1", "--vocab", "32", "--length", "8", "--rows", "1", "--repeats", "1"]
    done = CliRunner().invoke(app, ["bench", "rl", *sizes, "--json"])
    assert done.exit_code == 0, done.output
    assert [row["weights"] for row in json.loads(done.stdout[done.stdout.index("{") :])["rows"]] == list(WEIGHTS)
    with pytest.raises(ValueError, match="must be a multiple of 64"):
        RLProblem(width=100)
