"""Depth schedules against the formulas of their papers."""

import math

import numpy as np
import pytest

from looplm.training.depth import FixedDepth, LogNormalDepth, LogNormalPoissonDepth, PoissonDepth, UniformDepth


def draws(schedule, count=20_000):
    return np.array([schedule.draw(0, step).loops for step in range(count)])


def test_huginns_sampler_has_the_papers_statistics():
    """Mean 33, median 29, mode 24, and a tail beyond 100."""
    loops = draws(LogNormalPoissonDepth())
    assert loops.mean() == pytest.approx(33, abs=0.5)
    assert np.median(loops) == pytest.approx(29, abs=1)
    smooth = np.convolve(np.bincount(loops), np.ones(5) / 5, "same")
    assert smooth.argmax() == pytest.approx(24, abs=3)
    assert 0 < (loops > 100).mean() < 0.02
    assert loops.min() >= 1
    depths = [LogNormalPoissonDepth().draw(0, step) for step in range(500)]
    assert all(depth.grad_loops == min(8, depth.loops) for depth in depths)


def test_log_normal_by_its_moments():
    loops = draws(LogNormalDepth(mu=2.0, sigma=0.7, high=100))
    assert np.median(loops) == pytest.approx(math.exp(2.0), abs=0.5)
    assert loops.mean() == pytest.approx(math.exp(2.0 + 0.7**2 / 2), rel=0.03)  # 9.4, as the STARS facts derive
    assert loops.max() <= 100


def test_poisson_and_uniform():
    loops = draws(PoissonDepth(mean=5.0, high=30))
    assert loops.mean() == pytest.approx(5.0, abs=0.1)  # zeros become ones, hence a little above
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


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: UniformDepth(low=0), "1 <= low <= high"),
        (lambda: UniformDepth(low=5, high=4), "1 <= low <= high"),
        (lambda: FixedDepth(grad_loops=0), "grad_loops=0 must be at least 1"),
    ],
)
def test_depths_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
