"""Running sums, against adding up in another way."""

import re
from collections import Counter

import pytest

from looplm.data.tokenizer import encode, word_tokenizer
from looplm.tasks import RunningSum

TASK = RunningSum()


@pytest.mark.parametrize("modulus", [10, 7, 2])
@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_the_totals_term_by_term(split, modulus):
    task = RunningSum(terms=6, modulus=modulus, split=split)
    for seed in range(200):
        example = task.example(seed)
        digits = [int(digit) for digit in re.fullmatch(r"([0-9]{2,6})\.*=", example.prompt)[1]]
        assert len(example.prompt) == 7
        totals = [sum(digits[:end]) % modulus for end in range(1, len(digits) + 1)]
        assert example.answer == "".join(str(total) for total in totals) + f"#{totals[-1]}<end>"
        assert example.difficulty == len(digits)


def test_alternating_sums_subtract_every_second_digit():
    example = RunningSum(alternating=True).question([3, 8, 5, 9])
    assert (example.prompt, example.answer) == ("3859....~", "3501#1<end>")  # 3, -5, 0, -9


def test_scarce_samples_come_again_and_leave_the_test_split_alone():
    few = RunningSum(samples=7)
    assert [few.example(seed) for seed in range(7)] == [TASK.example(seed) for seed in range(7)]
    assert [few.example(seed) for seed in range(7, 14)] == [few.example(seed) for seed in range(7)]
    assert len({RunningSum(samples=7, split="test").example(seed).prompt for seed in range(40)}) > 7
    with pytest.raises(ValueError, match="samples of at least 1"):
        RunningSum(samples=0)


def test_the_grade_depends_on_what_follows_the_last_mark_alone():
    example = TASK.question([3, 8, 5, 9])
    assert (example.prompt, example.answer) == ("3859....=", "3165#5<end>")
    for text in ("3165#5<end>", "#5<end>", "#5", "9#5<end>", "#4#5<end>", "#5<end>3"):
        assert TASK.grade(example, text) == 1, text
    for text in (
        "",
        "5",
        "5<end>",
        "3165#",
        "3165#4<end>",
        "#55<end>",
        "#5#<end>",
        "#5#4<end>",
        "#5.<end>",
    ):
        assert TASK.grade(example, text) == 0, text
    assert RunningSum(written=False).question([3, 8, 5, 9]).answer == "#5<end>"


def test_every_character_and_the_end_mark_is_a_token():
    tokenizer = word_tokenizer(TASK.words())
    for seed in range(50):
        example = TASK.example(seed)
        pieces = re.findall("<[^>]+>|.", example.prompt + example.answer)
        (ids,) = encode(tokenizer, ["".join(pieces)])
        assert [tokenizer.decode([token]) for token in ids] == pieces


@pytest.mark.parametrize("split", ["train", "test"])
def test_numbers_of_terms_are_uniform(split):
    terms = Counter(RunningSum(fewest=3, terms=6, split=split).example(seed).difficulty for seed in range(2000))
    assert sorted(terms) == [3, 4, 5, 6]
    assert all(abs(count - 500) < 90 for count in terms.values())


def test_the_splits_share_no_question_whatever_the_other_settings():
    train = {RunningSum(terms=3).example(seed).prompt.strip(".=") for seed in range(8000)}
    test = {
        RunningSum(terms=2, modulus=7, written=False, split="test").example(seed).prompt.strip(".=")
        for seed in range(500)
    }
    assert not train & test
    pairs = {prompt for prompt in train if len(prompt) == 2}
    assert len(pairs | test) == 100  # every sum of two digits is in one split
    assert 3 <= len(test) <= 20


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"terms": 1}, "terms"), ({"fewest": 1}, "fewest"), ({"fewest": 9}, "fewest"),
     ({"modulus": 1}, "modulus"), ({"modulus": 11}, "modulus"),
     ({"held_out": 0.0}, "held_out"), ({"held_out": 1.0}, "held_out")],
)  # fmt: skip
def test_settings_without_sense_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        RunningSum(**settings)
