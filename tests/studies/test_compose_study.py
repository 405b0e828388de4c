"""The study of permutation hops: its curriculum, and its readings of curves whose shape is known."""

import math
from pathlib import Path

import pytest

from looplm.studies.compose import DEEP, FIXED, RANDOM, SHALLOW, ComposeStudy, fewest_loops, kept_to
from looplm.studies.study import Outcome
from looplm.studies.trained import Stage, Trained


def test_where_thinking_on_begins_to_cost():
    rises_then_falls = [(1.0, 0.2), (2.0, 0.9), (4.0, 0.86), (8.0, 0.84), (16.0, 0.9)]
    assert kept_to(rises_then_falls) == 4
    assert kept_to([(1.0, 0.1), (2.0, 0.5), (64.0, 0.5)]) == 64


def test_the_fewest_loops_that_answer_half():
    assert fewest_loops([(1.0, 0.2), (2.0, 0.5), (3.0, 0.4)]) == 2
    assert fewest_loops([(1.0, 0.2)]) == math.inf


def recipes(cell, scale="cpu"):
    return ComposeStudy().jobs(scale, 1)[cell][0].recipes(Path("nowhere"))


@pytest.mark.parametrize("scale", ["paper", "cpu", "smoke"])
def test_every_stage_adds_a_hop_and_continues_the_one_before(scale):
    stages = recipes(RANDOM, scale)
    hops = [stage.data.sources["compose"].task.max_hops for stage in stages]
    assert hops == list(range(3, 21 if scale == "paper" else 6))
    assert [stage.init_from for stage in stages] == [None, *(stage.out for stage in stages[:-1])]


def test_the_cells_have_equal_parameters_or_equal_flops():
    layers = {cell: {r.model["core_layers"] for r in recipes(cell)} for cell in (RANDOM, FIXED, SHALLOW, DEEP)}
    assert layers == {RANDOM: {1}, FIXED: {1}, SHALLOW: {1}, DEEP: {4}}
    assert {r.loops for r in recipes(FIXED)} == {4}
    assert {r.loops for cell in (SHALLOW, DEEP) for r in recipes(cell)} == {1}
    depth = recipes(RANDOM)[0].depth
    draws = [depth.draw(0, step).loops for step in range(4000)]
    assert sum(draws) / len(draws) == pytest.approx(4, abs=0.2)
    assert (min(draws), max(draws)) == (2, 8)


def outcome(curves, **values):
    return Outcome(values=values, series={f"{hops} hops": curve for hops, curve in enumerate(curves, start=1)})


@pytest.mark.parametrize(
    ("curves", "holds", "slope"),
    [
        ([[(1.0, 0.9)], [(1.0, 0.1), (2.0, 0.6)], [(4.0, 0.6)], [(4.0, 0.1)]], True, 1.5),
        ([[(3.0, 0.9)], [(1.0, 0.9)], [(4.0, 0.6)]], False, 0.5),
        ([[(1.0, 0.9)], [(1.0, 0.9)]], False, 0.0),
    ],
)
def test_more_hops_need_more_loops_is_judged_by_the_fewest_loops(curves, holds, slope):
    values = dict.fromkeys(("held out", "beyond", "beyond, twice the loops", "held out, 16x the loops"), 0.5)
    results = {cell: [outcome(curves, **values)] for cell in ComposeStudy().jobs("cpu", 1)}
    first, *others = ComposeStudy().verdicts(results)
    assert (first.holds, first.effect) == (holds, pytest.approx(slope))
    assert not any(verdict.holds for verdict in others)  # equal values are no difference


def test_a_stage_may_continue_any_earlier_one():
    job = Trained(
        stages=(Stage(recipe="mini_stage1"), *(Stage(recipe="mini_stage2", after=after) for after in (1, 1, None))),
        measure=print,
    )
    first, second, third, fourth = job.recipes(Path("x"))
    assert [r.init_from for r in (first, second, third, fourth)] == [None, first.out, first.out, third.out]
    assert len({r.out for r in (first, second, third, fourth)}) == 4
