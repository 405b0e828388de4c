"""Learning-rate schedules against values worked out by hand."""

import math

import pytest
from pydantic import TypeAdapter

from looplm.training.schedules import Constant, Cosine, LearningRate, WarmupStableDecay


def factors(schedule, num_steps):
    return [schedule.factor(step, num_steps) for step in range(num_steps)]


def test_constant_warms_up_and_stays():
    assert factors(Constant(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(Constant(warmup_steps=0), 2) == [1.0, 1.0]


def test_warmup_stable_decay_by_hand():
    schedule = WarmupStableDecay(warmup_steps=2, decay=0.3, final=0.2)
    wanted = [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]  # 0.2 would be one step past the end
    assert factors(schedule, 10) == pytest.approx(wanted)


def test_each_shape_of_the_decay_by_hand():
    """Three steps down from 1: a quarter, a half and three quarters of the way."""
    sqrt = [1 - 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]
    cosine = [(1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    for shape, wanted in (("linear", [0.75, 0.5, 0.25]), ("sqrt", sqrt), ("cosine", cosine)):
        schedule = WarmupStableDecay(warmup_steps=0, decay=0.75, decay_shape=shape)
        assert factors(schedule, 4) == pytest.approx([1.0, *wanted])
        lifted = WarmupStableDecay(warmup_steps=0, decay=0.75, decay_shape=shape, final=0.5)
        assert factors(lifted, 4) == pytest.approx([1.0, *(0.5 + 0.5 * value for value in wanted)])


def test_cosine_by_hand():
    """Two steps up, then three down with the angle at 45, 90 and 135 degrees, between 1 and a tenth."""
    low, high = (1 - math.sqrt(0.5)) / 2, (1 + math.sqrt(0.5)) / 2
    wanted = [0.5, 1.0, 0.1 + 0.9 * high, 0.55, 0.1 + 0.9 * low]
    assert factors(Cosine(warmup_steps=2, final=0.1), 5) == pytest.approx(wanted)


def test_cosine_reaches_an_absolute_final_rate():
    """Ouro names final rates; as a share of the peak, 3e-5 of 3e-4 is 0.1."""
    schedule = Cosine(warmup_steps=10, final=3e-5 / 3e-4)
    assert 3e-4 * schedule.factor(9999, 10_000) == pytest.approx(3e-5, rel=1e-6)
    assert 3e-4 * max(factors(schedule, 10_000)) == pytest.approx(3e-4)


@pytest.mark.parametrize(
    "schedule", [Cosine(warmup_steps=8), Constant(warmup_steps=8), WarmupStableDecay(warmup_steps=8)]
)
def test_a_run_shorter_than_its_warmup_only_warms_up(schedule):
    assert factors(schedule, 2)[0] == 1 / 8


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (Cosine, {"final": 1.5}, "final=1.5"),
        (Cosine, {"warmup_steps": -1}, "warmup_steps=-1"),
        (Constant, {"warmup_steps": -1}, "warmup_steps=-1"),
        (WarmupStableDecay, {"decay": 2.0}, "decay=2.0"),
        (WarmupStableDecay, {"final": -0.1}, "final=-0.1"),
        (WarmupStableDecay, {"decay_shape": "steps"}, "decay_shape='steps'"),
    ],
)
def test_nonsense_is_named(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind(**changes)


def test_recipes_choose_by_kind():
    adapter = TypeAdapter(LearningRate)
    assert adapter.validate_python({"kind": "cosine", "warmup_steps": 5}) == Cosine(warmup_steps=5)
    assert adapter.validate_python({"kind": "constant"}) == Constant()
    assert adapter.validate_python({"kind": "wsd", "decay_shape": "sqrt"}) == WarmupStableDecay(decay_shape="sqrt")
