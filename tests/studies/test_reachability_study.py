"""The study's own parts: as many questions at every distance and answer, and a baseline that degrees do not help."""

import pytest

from looplm.studies.reachability import Degrees, _held, questions
from looplm.tasks import Reachability

TASK = Reachability(nodes=8, edges=9, farthest=3, held_out=0.5)


def test_questions_are_held_out_and_balanced():
    found = questions(TASK, 20)
    assert sorted(found) == [1, 2, 3]
    for distance, examples in found.items():
        assert [example.difficulty for example in examples] == [distance] * 20
        assert sum(example.answer == "<yes>" for example in examples) == 10
        assert all(TASK.is_held_out(*TASK.read(example)) for example in examples)


def test_degrees_alone_are_at_chance(tmp_path):
    assert Degrees(task=TASK, learnt=2000)(tmp_path).values["accuracy"] == pytest.approx(0.5, abs=0.08)


def test_how_far_accuracy_holds():
    assert _held([(1.0, 0.9), (2.0, 0.75), (3.0, 0.7), (4.0, 0.99)]) == 2
    assert _held([(1.0, 0.6)]) == 0
