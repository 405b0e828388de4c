"""The three-hop study's verdicts on accuracies that are made up."""

import pytest

from looplm.studies.multi_hop import FRACTIONS, SHAPES, MultiHopStudy
from looplm.studies.study import Outcome

PAIRS = {0.1: 2000, 0.25: 5000, 0.5: 10000}


def known(accuracy, fraction):
    values = {"accuracy": accuracy}
    return Outcome(
        values=values, series={"steps": [(1.0, 0.0), (2.0, accuracy)]}, facts={"unique pairs": PAIRS[fraction]}
    )


def results(rows):
    return {
        f"{shape}, {100 * fraction:.4g} %": [known(value, fraction)] * (3 if fraction == 0.25 else 1)
        for shape, row in rows.items()
        for fraction, value in zip(FRACTIONS, row, strict=True)
    }


def test_loops_that_need_fewer_pairs():
    found = results({"2x1": [0.1, 0.2, 0.3], "2x2": [0.1, 0.4, 1.0], "2x4": [0.2, 0.995, 1.0], "8x1": [0.2, 0.6, 1.0]})
    *accuracies, pairs = MultiHopStudy().verdicts(found)
    assert [verdict.holds for verdict in accuracies] == [True, True, True]
    assert [verdict.effect for verdict in accuracies] == pytest.approx([0.2, 0.595, 0.395])
    assert [verdict.seeds for verdict in accuracies] == [3, 3, 3]
    assert pairs.holds
    assert "2x4 (5,000 pairs) than for 2x1 (no fraction here)" in pairs.claim
    assert pairs.effect == 2
    figures = MultiHopStudy().figures(found)
    assert [len(figure.axes[0].lines) for figure, _ in figures.values()] == [len(SHAPES), len(SHAPES)]


def test_loops_that_do_not():
    found = results({"2x1": [0.1, 1.0, 1.0], "2x2": [0.1, 0.4, 1.0], "2x4": [0.2, 0.98, 1.0], "8x1": [0.2, 0.6, 1.0]})
    first, second, deep, pairs = MultiHopStudy().verdicts(found)
    assert [first.holds, second.holds, deep.holds, pairs.holds] == [False, True, True, False]
    assert pairs.effect == -1
    assert not MultiHopStudy().verdicts(results({shape: [0.1] * 3 for shape in SHAPES}))[-1].holds


def test_a_run_is_measured_at_its_checkpoints(tmp_path):
    (job,) = MultiHopStudy().jobs("smoke", 1)["2x1, 25 %"]
    outcome = job(tmp_path)
    assert [step for step, _ in outcome.series["steps"]] == [2, 4]
    assert outcome.series["steps"][-1][1] == outcome.values["accuracy"]
    assert set(outcome.values) == {"accuracy", "trained pairs", "facts"}
    assert all(0 <= value <= 1 for value in outcome.values.values())
    assert outcome.facts["unique pairs"] == 5000
