"""Measures of trajectories on systems of known end: fixed points, spirals, orbits, sliders, noise."""

import math

import pytest
import torch

from looplm.analysis.trajectories import (
    KINDS,
    Criteria,
    classify,
    distance_to_last,
    fixed_point_residual,
    principal_plane,
    relative_steps,
    shares,
    spread_of_starts,
    step_norms,
)

LOOPS, WIDTH = 64, 24
TIMES = torch.arange(LOOPS, dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(0)
FRAME = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=GENERATOR))[0]
CENTRE = 5 * FRAME[5]


def noise(scale, *shape):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


def circle(period, rate=1.0, centre=CENTRE):
    """[T, D]: a turn in a plane of its own every `period` loops, its radius times `rate` a loop."""
    angle, radius = 2 * math.pi * TIMES / period, rate**TIMES
    return centre + (radius * angle.cos())[:, None] * FRAME[0] + (radius * angle.sin())[:, None] * FRAME[1]


def kind(states):
    return KINDS[int(classify(states))]


@pytest.mark.parametrize("rate", [0.0, 0.5, -0.9, 0.95])
def test_a_contraction_ends_in_a_fixed_point(rate):
    assert kind(CENTRE + (rate**TIMES)[:, None] * FRAME[0]) == "fixed point"


@pytest.mark.parametrize("period", [2, 5, 7.3, 40])
def test_a_spiral_inwards_ends_in_a_fixed_point(period):
    assert kind(circle(period, rate=0.9)) == "fixed point"


def test_a_fixed_point_under_small_noise_is_one_still():
    assert kind(CENTRE + noise(1e-4, LOOPS, WIDTH)) == "fixed point"


@pytest.mark.parametrize("period", [2, 3, 4, 5.5, 7.3, 10, 16])
@pytest.mark.parametrize("centre", [CENTRE, 0 * CENTRE])
def test_turning_is_an_orbit_of_any_period_that_was_seen(period, centre):
    assert kind(circle(period, centre=centre)) == "orbit"
    assert kind(circle(period, centre=centre) + noise(0.01, LOOPS, WIDTH)) == "orbit"
    assert kind(circle(period, rate=0.995, centre=centre)) == "orbit"
    assert kind(circle(period, rate=1.005, centre=centre)) == "orbit"


@pytest.mark.parametrize("speed", [0.02, 1.0, 50.0])
def test_going_on_is_a_slider_at_any_speed(speed):
    line = CENTRE + speed * TIMES[:, None] * FRAME[2]
    assert kind(line) == "slider"
    assert kind(line + noise(0.05 * speed, LOOPS, WIDTH)) == "slider"


def test_going_on_ever_slower_is_a_slider_until_it_rests():
    path = (1 + TIMES).sqrt()[:, None] * FRAME[2]
    assert [kind(CENTRE + speed * path) for speed in (50.0, 1.0, 0.02)] == ["slider", "slider", "fixed point"]


def test_steps_that_fall_as_one_over_t_go_on_and_faster_ones_end():
    assert kind(CENTRE + (1 + TIMES).log()[:, None] * FRAME[2]) == "slider"
    assert kind(CENTRE + (1 + TIMES).pow(-2)[:, None] * FRAME[2]) == "fixed point"


def test_noise_a_random_walk_and_a_long_period_are_none_of_them():
    """A period of 48 shows two thirds of a turn in the second half: neither straight nor back."""
    assert kind(CENTRE + noise(1.0, LOOPS, WIDTH)) == "other"
    assert kind(noise(1.0, LOOPS, WIDTH).cumsum(0)) == "other"
    assert kind(circle(48)) == "other"
    assert kind(CENTRE * math.nan * TIMES[:, None]) == "other"
    assert kind(circle(80)) == "slider"  # under 0.44 of a turn, as the criteria say


def test_an_orbit_that_drifts_far_is_a_slider_and_one_that_drifts_little_an_orbit():
    assert kind(circle(8) + 5.0 * TIMES[:, None] * FRAME[2]) == "slider"
    assert kind(circle(8) + 0.02 * TIMES[:, None] * FRAME[2]) == "orbit"


def test_many_trajectories_at_once_are_each_judged_alone():
    together = torch.stack([circle(5), circle(5, rate=0.8), CENTRE + TIMES[:, None] * FRAME[2], circle(3)], dim=1)
    kinds = classify(together.reshape(LOOPS, 2, 2, WIDTH))
    assert [KINDS[index] for index in kinds.flatten().tolist()] == ["orbit", "fixed point", "slider", "orbit"]
    assert shares(kinds) == {"fixed point": 0.25, "orbit": 0.5, "slider": 0.25, "other": 0.0}
    with pytest.raises(ValueError, match=r"15 states are too few"):
        classify(together[:15])
    with pytest.raises(ValueError, match=r"straight=1\.5 must lie between 0 and 1"):
        Criteria(straight=1.5)


def test_the_plane_of_an_ellipse_is_found_with_its_shares():
    angle = 2 * math.pi * TIMES / 16  # whole turns: the variances are 9 / 2 and 1 / 2
    states = CENTRE + 3 * angle.cos()[:, None] * FRAME[0] + angle.sin()[:, None] * FRAME[1]
    plane = principal_plane(states)
    torch.testing.assert_close(plane.shares, torch.tensor([0.9, 0.1], dtype=torch.float64))
    torch.testing.assert_close(plane.centre, CENTRE)
    torch.testing.assert_close(plane.project(states).abs(), torch.stack([3 * angle.cos(), angle.sin()], -1).abs())
    torch.testing.assert_close(principal_plane(states.reshape(4, 16, WIDTH)).shares, plane.shares)
    with pytest.raises(ValueError, match="span no plane"):
        principal_plane(states[:2])


def test_steps_distances_and_residuals_by_hand():
    states = torch.tensor([[3.0, 4.0], [0.0, 4.0], [0.0, 1.0]])
    assert step_norms(states).tolist() == [3.0, 3.0]
    assert relative_steps(states).tolist() == [0.75, 3.0]
    assert distance_to_last(states).tolist() == [pytest.approx(18**0.5), 3.0, 0.0]
    assert fixed_point_residual(lambda state: 0.5 * state + 1, states[0]).item() == pytest.approx(1.25**0.5 / 5)
    assert fixed_point_residual(lambda state: 0.5 * state + 1, torch.tensor([2.0, 2.0])).item() == 0.0


def test_the_spread_of_starts_is_that_of_all_pairs_and_closes_where_paths_meet():
    starts = noise(1.0, 5, 3, WIDTH)
    states = torch.stack([CENTRE + 0.5**loop * starts for loop in range(40)], dim=1)  # [K, T, tokens, D]
    found = spread_of_starts(states)
    assert found.shape == (40, 3)
    pairs = [(states[i] - states[j]).square().sum(-1) for i in range(5) for j in range(5) if i != j]
    torch.testing.assert_close(found, (sum(pairs) / 20 / states.square().sum(-1).mean(0)).sqrt())
    assert found[-1].max() < 1e-10
    unrelated = spread_of_starts(noise(1.0, 4, 1, 10_000))
    assert unrelated.item() == pytest.approx(2**0.5, rel=0.02)
    with pytest.raises(ValueError, match="give 2 or more"):
        spread_of_starts(states[:1])
