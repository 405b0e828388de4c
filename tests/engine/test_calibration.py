"""Calibration: the threshold found gives the depth or loss asked for, as reading every loop afterwards shows."""

import json
import math

import pytest
import torch
from engine_models import huginn_like, ouro_like
from torch.nn import functional as F

from looplm.engine import ExitCDF, calibrate, load_calibration, save_calibration
from looplm.engine.calibration import FAMILIES


def gated(dtype: torch.dtype = torch.float32):
    model = ouro_like(seed=3, dtype=dtype)
    with torch.no_grad():
        model.model.exit_gate.weight.mul_(4)
    return model


ROWS = torch.randint(61, (10, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def read_afterwards(model, q: float) -> tuple[float, float]:
    out = model(ROWS, keep_loops="all", use_cache=False)
    exits = model.exit_loops(out, q)[:, :-1].flatten()
    logits = model.logits_at_exit(out, q)[:, :-1].flatten(0, 1)
    return exits.double().mean().item(), F.cross_entropy(logits, ROWS[:, 1:].flatten()).item()


@pytest.mark.parametrize("target", [1.0, 1.7, 2.5, 3.2, 4.0])
def test_mean_loops_are_those_of_the_exit_rule_at_the_threshold(target):
    model = gated()
    found = calibrate(model, ROWS, "exit_cdf", target_loops=target)
    mean, loss = read_afterwards(model, found.threshold)
    assert found.mean_loops == pytest.approx(mean, abs=1e-9)
    assert found.loss == pytest.approx(loss, abs=1e-5)
    assert target <= found.mean_loops <= target + 0.02  # 390 tokens: a step of the mean is 1 / 390
    assert found.policy() == ExitCDF(found.threshold)
    assert found.tokens == 390
    losses = [
        F.cross_entropy(model(ROWS, loops=loop).logits[:, :-1].flatten(0, 1), ROWS[:, 1:].flatten()).item()
        for loop in range(1, 5)
    ]
    assert found.loss_by_loop == pytest.approx(losses, abs=1e-5)


def test_a_floor_and_a_ceiling_hold():
    model = gated()
    found = calibrate(model, ROWS, "exit_cdf", target_loops=2.2, min_loops=2, max_loops=3)
    assert (found.min_loops, found.max_loops) == (2, 3)
    assert 2.2 <= found.mean_loops <= 2.25
    with pytest.raises(ValueError, match=r"tokens do from 2\.00 to"):
        calibrate(model, ROWS, "exit_cdf", target_loops=1.5, min_loops=2)
    with pytest.raises(ValueError, match=r"target_loops=3\.5 is not to be had"):
        calibrate(model, ROWS, "exit_cdf", target_loops=3.5, max_loops=3)


def test_a_target_loss_is_reached_no_later_than_needed():
    model = gated()
    between = sum(read_afterwards(model, q)[1] for q in (0.0, 1.0)) / 2
    found = calibrate(model, ROWS, "exit_cdf", target_loss=between)
    assert found.loss <= between
    earlier = max(0.0, found.threshold - 1e-3)
    assert read_afterwards(model, earlier)[1] >= found.loss - 0.02
    with pytest.raises(ValueError, match=r"target_loss=0\.001 is not to be had"):
        calibrate(model, ROWS, "exit_cdf", target_loss=0.001)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_reaches_a_mean_depth(family):
    model = gated()
    found = calibrate(model, ROWS[:4], family, target_loops=3.0)
    assert 3.0 <= found.mean_loops <= 3.15
    assert type(found.policy()) is FAMILIES[family].make


def test_models_with_a_coda_are_calibrated_by_their_states():
    found = calibrate(huginn_like(dtype=torch.float32), ROWS[:4], "state_converged", target_loops=2.5)
    assert 2.5 <= found.mean_loops <= 2.6


def test_it_is_kept_with_the_model_and_found_again(tmp_path):
    found = calibrate(gated(), ROWS, "exit_cdf", target_loops=2.0)
    save_calibration(found, tmp_path)
    assert load_calibration(tmp_path) == found
    good = json.loads((tmp_path / "depth.json").read_text())
    for damaged in (
        {"family": "exit_cdf"}, [], None, good | {"family": "nope"}, good | {"max_loops": None},
        good | {"max_loops": 2.5}, good | {"threshold": "high"}, good | {"threshold": math.nan},
        good | {"min_loops": "a"}, good | {"more": 1},
    ):  # fmt: skip
        (tmp_path / "depth.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"depth\.json is damaged") as refused:
            load_calibration(tmp_path)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"has no depth\.json"):
        load_calibration(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"family": "fixed"}, "policy 'fixed' has no threshold"),
        ({"family": "exit_cdf"}, "exactly one of target_loops and target_loss"),
        ({"family": "exit_cdf", "target_loops": 2.0, "target_loss": 1.0}, "exactly one"),
        ({"family": "exit_cdf", "target_loops": math.nan}, "target_loops=nan must be a finite number"),
        ({"family": "exit_cdf", "target_loss": math.inf}, "target_loss=inf must be a finite number"),
        ({"family": "exit_cdf", "target_loops": 0.5}, r"tokens do from 1\.00 to 4\.00"),
        ({"family": "exit_cdf", "target_loops": 9.0}, r"tokens do from 1\.00 to 4\.00"),
    ],
)
def test_refusals(ask, message):
    with pytest.raises(ValueError, match=message):
        calibrate(gated(), ROWS, **ask)


@pytest.mark.parametrize("shape", [(3, 1), (0, 5), (5,)])
def test_rows_without_a_successor_are_refused(shape):
    with pytest.raises(ValueError, match="rows has shape"):
        calibrate(gated(), torch.ones(shape, dtype=torch.int64), "exit_cdf", target_loops=2.0)


def test_a_loss_that_deeper_exits_miss_again_is_found():
    """Text that the second loop alone foretells; with a gate of 0.6 tokens leave there for q from 0.6 to 0.84."""
    model, rows = ouro_like(seed=3, dtype=torch.float32), ROWS[:4, :1]
    with torch.no_grad():
        model.model.exit_gate.weight.zero_()
        model.model.exit_gate.bias.fill_(math.log(0.6 / 0.4))
        for _ in range(20):
            rows = torch.cat([rows, model(rows, loops=2).logits[:, -1:].argmax(-1)], dim=1)
    by_loop = calibrate(model, rows, "exit_cdf", target_loops=1.0).loss_by_loop
    target = (by_loop[1] + min(by_loop[0], *by_loop[2:])) / 2
    found = calibrate(model, rows, "exit_cdf", target_loss=target)
    assert (found.mean_loops, found.loss) == (2.0, pytest.approx(by_loop[1]))
    assert found.threshold == pytest.approx(0.6, abs=1e-5)


def test_a_gate_is_needed_for_a_gates_threshold():
    with pytest.raises(ValueError, match="exit gate"):
        calibrate(huginn_like(dtype=torch.float32), ROWS[:2], "exit_cdf", target_loops=2.0)
