"""The verdicts of the comparison of rewards, on marks that are chosen."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from looplm.studies.rltt import GRPO, RLTTStudy
from looplm.studies.study import Outcome

NAMES = ("RLTT, exit", "RLTT, uniform", "RLTT, progressive")


def outcomes(*right_by_seed, questions=40):
    """An outcome a seed, of which the first so many questions are answered right."""
    found = []
    for right in right_by_seed:
        marks = [(float(number), float(number < right)) for number in range(questions)]
        series = dict.fromkeys(("items", "items, 1 loop", "items, short"), marks)
        found.append(Outcome(values={"length": 10.0 - right / 10}, series=series))
    return found


def verdict(ours, theirs):
    results = {GRPO: outcomes(*theirs)} | {name: outcomes(*ours) for name in NAMES}
    return RLTTStudy().verdicts(results)[0]


def test_an_effect_in_every_seed_holds_with_the_interval_of_a_paired_test():
    found = verdict((30, 28, 32), (20, 21, 22))
    differences = np.repeat([1.0, 0.0], [27, 93])
    interval = ttest_1samp(differences, 0).confidence_interval()
    assert found.holds
    assert found.effect == pytest.approx(27 / 120)
    assert f"{interval.low:+.3f} to {interval.high:+.3f}" in found.claim
    assert "paired over 120 answers; by seed +0.250, +0.175, +0.250" in found.claim


def test_an_effect_that_one_seed_contradicts_does_not_hold():
    found = verdict((38, 38, 20), (20, 20, 21))
    assert found.effect == pytest.approx(35 / 120)
    assert not found.holds
    assert "by seed +0.450, +0.450, -0.025" in found.claim


def test_equal_answers_are_no_effect():
    found = verdict((20, 21), (20, 21))
    assert (found.holds, found.effect, found.seeds) == (False, 0.0, 2)


def test_shorter_is_shorter_in_every_seed():
    results = {GRPO: outcomes(20, 20)} | {name: outcomes(30, 30) for name in NAMES}
    shorter = RLTTStudy().verdicts(results)[-1]
    assert shorter.holds
    assert shorter.effect == pytest.approx(-1.0)
