"""Capo against counts of its own fields: entropies, names, draws and splits."""

import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from looplm.tasks import Capo

FIELDS = ["first", "middle", "last", "month", "day", "year", "city", "university", "major", "company", "gender"]
TASK = Capo(people=3000)


def values_of(example):
    found = re.findall(r"<([a-z]+)(\d+)>", example.answer)
    assert [field for field, _ in found] == FIELDS
    assert "".join(f"<{field}{value}>" for field, value in found) == example.answer
    return [int(value) for _, value in found]


def test_entropies_are_the_recipes():
    paper = Capo(first=400, middle=400, last=1000, year=200, city=200, university=300, major=100, company=263)
    assert round(paper.name_bits, 2) == 27.25
    assert round(paper.attribute_bits, 2) == 47.59
    assert paper.name_bits == pytest.approx(math.log2(1.6e8))
    assert paper.attribute_bits == pytest.approx(math.log2(2 * (12 * 28 * 200) * 200 * 300 * 100 * 263))
    assert (round(TASK.name_bits, 1), round(TASK.attribute_bits, 1)) == (17.9, 36.6)
    assert TASK.name_bits + TASK.attribute_bits == pytest.approx(54.5, abs=0.05)


def test_names_are_unique_and_every_field_is_uniform():
    people = [values_of(TASK.person(number)) for number in range(TASK.people)]
    assert len({tuple(person[:3]) for person in people}) == TASK.people
    for column, field in enumerate(FIELDS):
        size = getattr(TASK, field)
        counts = Counter(person[column] for person in people)
        assert set(counts) == set(range(size))
        expected = TASK.people / size
        chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
        assert abs(chi_squared - (size - 1)) < 4 * math.sqrt(2 * size)


def test_a_world_of_every_name_has_each_once():
    task = Capo(people=24, first=2, middle=3, last=4)
    assert len({tuple(values_of(task.person(number))[:3]) for number in range(24)}) == 24


def test_training_draws_everyone_alike_and_test_asks_them_in_order():
    task = Capo(people=20)
    everyone = [task.person(number) for number in range(20)]
    assert len(set(everyone)) == 20
    drawn = Counter(task.example(seed).answer for seed in range(0, 4000 * 1024, 1024))  # a row's stride
    assert set(drawn) == {person.answer for person in everyone}
    assert all(abs(count - 200) < 70 for count in drawn.values())
    test = replace(task, split="test")
    assert [test.example(seed) for seed in range(10**9, 10**9 + 20)] == everyone
    assert replace(task, world_seed=1).person(0) != task.person(0)


def test_every_token_is_a_word_and_grading_is_exact():
    words = TASK.words()
    assert len(words) == len(set(words)) == 50 + 50 + 100 + 12 + 28 + 50 + 50 + 50 + 25 + 50 + 2 + 1
    example, other = TASK.person(0), TASK.person(1)
    assert example.prompt in words
    assert set(re.findall(r"<[^>]+>", example.answer)) <= set(words)
    assert TASK.grade(example, example.answer + "<bos>") == 1
    assert TASK.grade(example, other.answer) == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"people": 0}, "people"), ({"major": 0}, "major"), ({"people": 9, "first": 2, "middle": 2, "last": 2}, "8 full")],
)
def test_settings_without_sense_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        Capo(**settings)
