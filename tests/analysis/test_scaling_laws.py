"""Fits recover the exponents that made the data, exactly without noise and inside their intervals with it."""

import numpy as np
import pytest

from looplm.analysis.scaling_laws import ISO_DEPTH, PER_LOOP, Measured, effective_parameters, fit_law

TRUE = {"E": 1.5, "A": 0.8, "alpha": 0.45, "B": 0.6, "beta": 0.35}


def runs(phi, noise=0.0, seed=0):
    """Twelve sizes, three budgets; losses by the law itself, at one count of hundred thousands."""
    generator = np.random.default_rng(seed)
    points = []
    for width in (48, 64, 96, 128):
        for layers, loops in ((4, 1), (2, 2), (1, 4)):
            for tokens in (2e5, 4e5, 8e5):
                once, recurrent = 512.0 * width, 12.0 * layers * width**2
                size = (once + loops**phi * recurrent) / 1e5
                loss = TRUE["E"] + TRUE["A"] * size ** -TRUE["alpha"] + TRUE["B"] * (tokens / 1e5) ** -TRUE["beta"]
                loss *= np.exp(noise * generator.standard_normal())
                points.append(
                    Measured(
                        loss=float(loss), once=once, recurrent=recurrent, loops=loops, tokens=tokens, run=len(points)
                    )
                )
    return points


@pytest.mark.parametrize("phi", [-0.2, 0.0, 0.46, 1.0, 1.3])
def test_exact_losses_give_back_every_parameter(phi):
    fit = fit_law(ISO_DEPTH, runs(phi), resamples=3)
    assert fit.values == pytest.approx({**TRUE, "phi": phi}, rel=2e-3, abs=2e-3)
    assert fit.error < 1e-5
    assert fit.draws["phi"] == pytest.approx([phi] * 3, abs=5e-3)


def test_noisy_losses_leave_phi_inside_its_interval_about_as_often_as_it_says():
    inside = 0
    for seed in range(8):
        low, high = fit_law(ISO_DEPTH, runs(0.46, noise=0.004, seed=seed), resamples=40).interval("phi")
        assert 0 < high - low < 0.6
        inside += low <= 0.46 <= high
    assert inside >= 6  # of 8, where 7.6 are expected


def test_one_spoilt_run_hardly_moves_phi():
    points = runs(0.46, noise=0.002)
    spoilt = [Measured(**{**vars(point), "loss": point.loss * (1.3 if point.run == 5 else 1)}) for point in points]
    clean, robust = (fit_law(ISO_DEPTH, given, resamples=1).values["phi"] for given in (points, spoilt))
    assert abs(robust - clean) < 0.05


def test_the_law_per_loop_is_given_back_and_a_bootstrap_draws_whole_runs():
    points, truth = [], {**TRUE, "C": 0.5, "gamma": 0.8}
    for run, point in enumerate(runs(0.0)):
        size = (point.once + point.recurrent) / 1e5
        rest = truth["E"] + truth["A"] * size ** -truth["alpha"] + truth["B"] * (point.tokens / 1e5) ** -truth["beta"]
        for loop in range(1, 5):
            loss = rest + truth["C"] * loop ** -truth["gamma"]
            points.append(Measured(**{**vars(point), "loss": loss, "loops": loop, "run": run}))
    fit = fit_law(PER_LOOP, points, resamples=5)
    assert {name: fit.values[name] for name in ("alpha", "beta", "gamma", "A", "B")} == pytest.approx(
        {name: truth[name] for name in ("alpha", "beta", "gamma", "A", "B")}, rel=0.01
    )
    # One run alone, drawn over and over, is all that there is to draw.
    alone = fit_law(PER_LOOP, points[:4], resamples=3)
    assert alone.interval("gamma") == pytest.approx((alone.values["gamma"],) * 2, rel=0.01)


def test_what_a_loop_is_worth():
    once, recurrent, loops = np.array([10.0, 10.0]), np.array([100.0, 100.0]), np.array([1.0, 4.0])
    assert effective_parameters(once, recurrent, loops, 0.5).tolist() == [110, 210]
    assert effective_parameters(once, recurrent, loops, 0.0).tolist() == [110, 110]
