"""Depth schedules against the formulas of their papers."""

import math
from typing import Annotated

import numpy as np
import pytest
from pydantic import Field, TypeAdapter, ValidationError

from looplm.objectives import PoissonLogNormalPrior
from looplm.training.depth import (
    Depth,
    DepthSchedule,
    FixedDepth,
    Growth,
    LogNormalDepth,
    LogNormalPoissonDepth,
    PoissonDepth,
    UniformDepth,
)


def draws(schedule, count=20_000):
    return np.array([schedule.draw(0, step).loops for step in range(count)])


def draws_at(schedule, step, count=20_000):
    """Many draws of one step, as its micro-batches or sequences see them."""
    return np.array([schedule.draw(0, step, sample).loops for sample in range(count)])


def spread(share, count=20_000):
    """Four standard errors of a share that is sampled `count` times."""
    return 4 * math.sqrt(share * (1 - share) / count)


def test_huginns_sampler_has_the_papers_statistics():
    """Mean 33, median 29, mode 24, and a tail beyond 100."""
    loops = draws(LogNormalPoissonDepth())
    assert loops.mean() == pytest.approx(33, abs=0.5)
    assert np.median(loops) == pytest.approx(29, abs=1)
    smooth = np.convolve(np.bincount(loops), np.ones(5) / 5, "same")
    assert smooth.argmax() == pytest.approx(24, abs=3)
    tail = 1 - PoissonLogNormalPrior(mean=32.0, sigma=0.5).log_mass(100).exp().sum().item()
    assert 0.005 < tail < 0.02
    assert (loops > 100).mean() == pytest.approx(tail, abs=spread(tail))
    assert loops.min() >= 1
    depths = [LogNormalPoissonDepth().draw(0, step) for step in range(500)]
    assert all(depth.grad_loops == min(8, depth.loops) for depth in depths)


def test_log_normal_by_its_moments():
    loops = draws(LogNormalDepth(mu=2.0, sigma=0.7, high=100))
    assert np.median(loops) == pytest.approx(math.exp(2.0), abs=0.5)
    assert loops.mean() == pytest.approx(math.exp(2.0 + 0.7**2 / 2), rel=0.03)  # 9.4, as the STARS facts derive
    assert loops.max() <= 100
    beyond_twenty = math.erfc((math.log(20.5) - 2.0) / 0.7 / math.sqrt(2)) / 2
    assert (loops > 20).mean() == pytest.approx(beyond_twenty, abs=spread(beyond_twenty))


def test_poisson_and_uniform():
    loops = draws(PoissonDepth(mean=5.0, high=30))
    assert loops.mean() == pytest.approx(5.0, abs=0.1)  # zeros become ones, hence a little above
    beyond_nine = 1 - sum(math.exp(-5) * 5**count / math.factorial(count) for count in range(10))
    assert (loops > 9).mean() == pytest.approx(beyond_nine, abs=spread(beyond_nine))
    uniform = draws(UniformDepth(low=2, high=5))
    assert set(uniform) == {2, 3, 4, 5}
    assert np.bincount(uniform)[2:].min() > 4700


def test_fixed_and_gradient_loops():
    depth = FixedDepth(loops=6, grad_loops=2).draw(3, 9)
    assert (depth.loops, depth.grad_loops) == (6, 2)
    assert FixedDepth(loops=6).draw(3, 9).grad_loops == 6


def test_draws_are_pure_and_independent():
    schedule = LogNormalPoissonDepth()
    assert schedule.draw(1, 7) == schedule.draw(1, 7)
    columns = [
        [schedule.draw(seed, step, sample).loops for step in range(50)] for seed, sample in ((0, 0), (1, 0), (0, 1))
    ]
    assert columns[0] != columns[1] != columns[2] != columns[0]


def test_a_drawn_number_of_gradient_loops_is_uniform_and_apart_from_the_loops():
    fixed, drawn = LogNormalPoissonDepth(low=10), LogNormalPoissonDepth(low=10, grad_low=3)
    depths = [drawn.draw(0, step) for step in range(20_000)]
    assert [depth.loops for depth in depths[:200]] == [fixed.draw(0, step).loops for step in range(200)]
    counts = np.bincount([depth.grad_loops for depth in depths])
    assert set(np.flatnonzero(counts)) == {3, 4, 5, 6, 7, 8}
    assert counts[3:] / 20_000 == pytest.approx([1 / 6] * 6, abs=spread(1 / 6))
    twins = [UniformDepth(low=8, high=13, grad_low=3, grad_loops=8).draw(0, step) for step in range(20_000)]
    together = np.corrcoef([depth.loops for depth in twins], [depth.grad_loops for depth in twins])[0, 1]
    assert abs(together) < 4 / math.sqrt(20_000)


def test_gradient_loops_never_exceed_the_loops():
    schedule = UniformDepth(high=4, grad_loops=8, grad_low=2)
    assert all(depth.grad_loops <= depth.loops for depth in (schedule.draw(0, step) for step in range(200)))


def test_scaled_schedules_have_the_scaled_statistics():
    assert FixedDepth(loops=5).scaled(0.5).draw(0, 0) == Depth(loops=3, grad_loops=3)
    assert FixedDepth(loops=4, high=4).scaled(2).draw(0, 0) == Depth(loops=8, grad_loops=8)
    assert set(draws(UniformDepth(low=2, high=10).scaled(0.5), 500)) == {2, 3, 4, 5}
    assert draws(PoissonDepth(mean=20.0).scaled(0.5)).mean() == pytest.approx(10, abs=0.1)
    assert np.median(draws(LogNormalDepth(mu=3.0).scaled(0.5))) == pytest.approx(math.exp(3.0) / 2, abs=0.5)
    assert draws(LogNormalPoissonDepth(mean=32.0).scaled(0.25)).mean() == pytest.approx(9, abs=0.15)


@pytest.mark.parametrize(
    "schedule",
    [
        FixedDepth(loops=9, low=3),
        UniformDepth(high=9, low=3),
        PoissonDepth(low=3),
        LogNormalDepth(low=3),
        LogNormalPoissonDepth(low=3),
    ],
)
def test_a_scaled_schedule_stays_at_or_above_low(schedule):
    assert draws(schedule.scaled(1e-6), 50).tolist() == [3] * 50


def test_growth_by_hand():
    linear = Growth(start=0.1, steps=4)
    root = Growth(shape="one_minus_sqrt", start=0.1, steps=4)
    assert [linear.share(step) for step in (0, 1, 2, 3, 4, 9)] == pytest.approx([0.1, 0.325, 0.55, 0.775, 1, 1])
    wanted = [0.1, 0.1 + 0.9 * (1 - math.sqrt(0.75)), 0.1 + 0.9 * (1 - math.sqrt(0.5)), 0.55, 1, 1]
    assert [root.share(step) for step in (0, 1, 2, 3, 4, 9)] == pytest.approx(wanted)
    assert [FixedDepth(loops=10, growth=linear).draw(0, step).loops for step in range(6)] == [1, 4, 6, 8, 10, 10]
    assert [FixedDepth(loops=10, growth=root).draw(0, step).loops for step in range(6)] == [1, 3, 4, 6, 10, 10]


def test_a_curriculum_reaches_huginns_sampler():
    schedule = LogNormalPoissonDepth(growth=Growth(start=0.25, steps=100))
    for step, mean in ((0, 8), (50, 20), (100, 32)):
        assert draws_at(schedule, step).mean() == pytest.approx(mean + 1, rel=0.02)
    assert [schedule.draw(0, step) for step in range(100, 150)] == [
        LogNormalPoissonDepth().draw(0, step) for step in range(100, 150)
    ]


def test_gradient_loops_grow_only_where_the_curriculum_says_so():
    plain, grown = (
        FixedDepth(loops=20, grad_loops=8, growth=Growth(start=0.5, steps=4, grad=grad)) for grad in (False, True)
    )
    assert [plain.draw(0, step).grad_loops for step in range(5)] == [8] * 5
    assert [grown.draw(0, step).grad_loops for step in range(5)] == [4, 5, 6, 7, 8]
    drawn = FixedDepth(loops=20, grad_loops=8, grad_low=6, growth=Growth(start=0.5, steps=4, grad=True))
    assert {drawn.draw(0, 0, sample).grad_loops for sample in range(50)} == {4}
    assert {drawn.draw(0, 4, sample).grad_loops for sample in range(50)} == {6, 7, 8}


def test_the_lowest_depth_is_what_a_draw_can_give():
    assert FixedDepth(loops=4).lowest == 4
    assert FixedDepth(loops=8, growth=Growth(start=0.25, steps=10)).lowest == 2
    assert UniformDepth(low=2, high=5).lowest == min(draws(UniformDepth(low=2, high=5), 100)) == 2


@pytest.mark.parametrize("high", [7, 10**6])
def test_the_widest_schedules_can_be_drawn(high):
    """The greatest mean and spread that are allowed; of a log-normal as wide, about half lies beyond the median."""
    wide = LogNormalDepth(mu=math.log(10**6), sigma=5.0, high=high)
    assert draws(wide, 2000).max() == high
    assert draws(LogNormalPoissonDepth(mean=1e6, sigma=5.0, high=high), 2000).max() == high
    assert draws(PoissonDepth(mean=1e6, high=high), 50).max() <= high
    assert draws(LogNormalDepth(mu=-1e308), 5).tolist() == [1] * 5
    if high == 10**6:
        assert (draws(wide, 2000) == high).mean() == pytest.approx(0.5, abs=spread(0.5, 2000))


def test_recipes_hold_schedules():
    adapter = TypeAdapter(Annotated[DepthSchedule, Field(discriminator="kind")])
    values = {"kind": "uniform", "high": 8, "per": "sequence", "growth": {"shape": "one_minus_sqrt", "steps": 5}}
    schedule = adapter.validate_python(values)
    assert schedule == UniformDepth(high=8, per="sequence", growth=Growth(shape="one_minus_sqrt", steps=5))
    assert adapter.validate_python(adapter.dump_python(schedule, mode="json")) == schedule
    with pytest.raises(ValidationError, match=r"growth\.stat"):
        adapter.validate_python({"kind": "uniform", "growth": {"steps": 5, "stat": 1}})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: UniformDepth(low=0), "1 <= low <= high"),
        (lambda: UniformDepth(low=5, high=4), "1 <= low <= high"),
        (lambda: FixedDepth(grad_loops=0), "grad_loops=0 must be at least 1"),
        (lambda: FixedDepth(loops=200), "loops=200 must be between low=1 and high=100"),
        (lambda: FixedDepth(grad_low=2), "grad_low=2 must be between 1 and grad_loops=None"),
        (lambda: FixedDepth(grad_low=3, grad_loops=2), "grad_low=3 must be between 1 and grad_loops=2"),
        (lambda: FixedDepth(per="token"), "per='token' is not known"),
        (lambda: PoissonDepth(mean=0.0), "mean > 0"),
        (lambda: LogNormalDepth(sigma=-1.0), "sigma >= 0"),
        (lambda: LogNormalPoissonDepth(mean=-3.0), "mean > 0"),
        (lambda: PoissonDepth(mean=1e30), "mean=1e.30, sigma=0.0 needs .* at most 1000000"),
        (lambda: LogNormalDepth(mu=1e308), r"mu=1e.308 is the log of a depth, at most that of 1000000"),
        (lambda: LogNormalDepth(mu=math.nan), r"mu=nan is the log of a depth"),
        (lambda: LogNormalPoissonDepth(sigma=1e3), "sigma=1000.0 needs .* and 5"),
        (lambda: LogNormalPoissonDepth(mean=math.nan), "mean > 0"),
        (lambda: UniformDepth(high=10**30), "high <= 1000000"),
        (lambda: FixedDepth(grad_loops=10**30), "grad_loops=10+ must be at least 1, at most 1000000"),
        (lambda: FixedDepth().scaled(0), "factor=0 of a depth must be a number above 0"),
        (lambda: Growth(steps=0), "steps=0 of a growth"),
        (lambda: Growth(start=0.0, steps=3), "start=0.0 of a growth"),
        (lambda: Growth(shape="cubic", steps=3), "shape='cubic' of a growth"),
    ],
)
def test_depths_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
