"""The study of exits: thresholds come from one half, what is shown from the other, and oracles know the answers."""

import itertools

import pytest
import torch

from conftest import random_ids, tiny_model
from looplm.analysis.exit_curve import oracle_exits
from looplm.engine import ExitCDF, FixedLoops
from looplm.studies import exits
from looplm.studies.bench_policies import FIXED, HeldOut, PoliciesProblem, read_text
from looplm.studies.exits import POLICIES, Reached, halves_of, over_fixed


@pytest.mark.parametrize("stays", [False, True])
def test_oracle_exits_are_those_of_a_search(stays):
    patterns = list(itertools.product([False, True], repeat=4))
    for pattern, found in zip(patterns, oracle_exits(torch.tensor(patterns), stays).tolist(), strict=True):
        good = [loop for loop in range(1, 5) if (all(pattern[loop - 1 :]) if stays else pattern[loop - 1])]
        assert found == min(good, default=1)


def held_out(count):
    by_loop = torch.arange(2.0 * count).view(count, 2)
    return HeldOut(
        measure="accuracy", by_loop=by_loop, weights=torch.full((count,), 1 / count).double(),
        exits=lambda policy: torch.full((count,), policy.loops), prompts=[[0]], replayed=True,
    )  # fmt: skip


def test_halves_share_nothing_and_weigh_every_group_alike():
    validation, test = halves_of(held_out(14), [4, 10])
    groups = []
    for half in (validation, test):
        rows = (half.by_loop[:, 0] / 2).long().tolist()
        groups.append(rows)
        assert (sum(row < 4 for row in rows), len(rows)) == (2, 7)
        assert half.weights.sum() == pytest.approx(1)
        assert sum(w for row, w in zip(rows, half.weights.tolist(), strict=True) if row < 4) == pytest.approx(0.5)
        wanted = sum(w * (2 * row + 1) for row, w in zip(rows, half.weights.tolist(), strict=True))
        assert half.outcome(FixedLoops(2)) == pytest.approx((2.0, wanted))
    assert sorted(groups[0] + groups[1]) == list(range(14))


def point(loops, measured):
    return Reached(target=loops, loops=loops, measured=measured, speed=1.0)


def test_height_over_the_fixed_depths():
    fixed = [point(1, 0.2), point(2, 0.6), point(3, 0.7)]
    assert over_fixed(point(1.5, 0.5), fixed) == pytest.approx(0.1)
    assert over_fixed(point(2.5, 0.6), fixed) == pytest.approx(-0.05)
    assert over_fixed(fixed[1], fixed) == 0


def test_thresholds_are_chosen_on_validation_and_shown_on_test():
    models = [tiny_model() for _ in range(4)]
    problem = PoliciesProblem(requests=2, tokens=2, rows=2, points=2)
    validation, test = random_ids(4, 40, seed=1), random_ids(4, 40, seed=2)
    halves = [(read_text(model, validation, 2), read_text(model, test, 2)) for model in models]
    found = exits._reach(models, halves, problem)
    assert list(found) == [FIXED, *POLICIES]
    for loops, one in enumerate(found[FIXED], start=1):
        assert (one.loops, one.measured) == pytest.approx(halves[0][1].outcome(FixedLoops(loops)))
    assert found[FIXED][-1].speed == 1
    stage, family = POLICIES["Stage II gate"]
    assert family.make is ExitCDF
    for one in found["Stage II gate"]:
        threshold = family.nearest(lambda p, one=one: halves[stage - 1][0].outcome(p)[0] >= one.target)
        assert (one.loops, one.measured) == halves[stage - 1][1].outcome(ExitCDF(threshold))
