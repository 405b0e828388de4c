"""Mano against a recursive reading of its own notation, and its splits by counting."""

from collections import Counter
from dataclasses import replace

import pytest

from looplm.tasks import Mano

TASK = Mano(modulus=7, length=4)


def read(words, modulus):
    """The value of a prefix expression and what follows it, by plain recursion."""
    first, *rest = words
    if first not in "+-*":
        return int(first), rest
    left, rest = read(rest, modulus)
    right, rest = read(rest, modulus)
    return {"+": left + right, "-": left - right, "*": left * right}[first] % modulus, rest


def words_of(example):
    return example.prompt.removesuffix("<ans>").strip("<>").split("><")[2:]


def test_answers_are_those_of_a_recursive_reading():
    # The generator's sense, not the paper's gloss.
    assert TASK.value(["-", "*", "2", "3", "+", "4", "5"]) == (2 * 3 - (4 + 5)) % 7
    for seed in range(300):
        example = TASK.example(seed)
        value, rest = read(words_of(example), 7)
        assert rest == []
        assert example.answer == f"<{value}>"
        assert example.prompt.startswith(f"<bos><len{example.difficulty}>")
        assert len(words_of(example)) == 2 * example.difficulty + 1


def test_lengths_and_left_parts_are_uniform():
    lengths = Counter(TASK.example(seed).difficulty for seed in range(4000))
    assert sorted(lengths) == [1, 2, 3, 4]
    assert all(abs(count - 1000) < 120 for count in lengths.values())
    left = Counter()
    for seed in range(4000):
        words = words_of(replace(TASK, split="test").example(seed))
        _, rest = read(words[1:], 7)
        left[(len(words) - 2 - len(rest)) // 2 if len(rest) > 1 else 3] += 1
    assert sorted(left) == [0, 1, 2, 3]
    assert all(abs(count - 1000) < 120 for count in left.values())


def test_the_splits_share_no_expression_and_test_asks_the_longest():
    test = {replace(TASK, split="test").example(seed).prompt for seed in range(300)}
    assert all(prompt.startswith("<bos><len4>") for prompt in test)
    assert not test & {TASK.example(seed).prompt for seed in range(3000)}


def test_grading():
    example = TASK.example(0)
    assert TASK.grade(example, example.answer) == 1
    assert TASK.grade(example, f"<{(int(example.answer[1:-1]) + 1) % 7}>") == 0
    assert TASK.grade(example, "") == 0
    assert set(words_of(example)) <= {word.strip("<>") for word in TASK.words()}


@pytest.mark.parametrize(
    ("settings", "named"), [({"modulus": 1}, "modulus"), ({"length": 0}, "length"), ({"held_out": 0.0}, "held_out")]
)
def test_settings_without_sense_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        Mano(**settings)


def test_a_world_too_small_for_a_split_says_so():
    with pytest.raises(ValueError, match="mano finds no expression of 1 operations in the test split"):
        Mano(modulus=2, length=1, held_out=1e-9, split="test").example(0)
