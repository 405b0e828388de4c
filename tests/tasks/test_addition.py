"""Addition: the answer is the reversed sum, splits do not meet, grading is exact."""

import pytest

from looplm.data.tokenizer import train_tokenizer
from looplm.tasks import Addition

TASK = Addition(held_out=0.2)


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_reversed_sums(split):
    task = Addition(held_out=0.2, split=split)
    for seed in range(200):
        example = task.example(seed)
        a, b = (int(part) for part in example.prompt.rstrip("=").split("+"))
        assert 1000 <= a <= 9999
        assert 1000 <= b <= 9999
        assert int(example.answer.strip().removesuffix("<end>")[::-1]) == a + b
        assert task.is_held_out(a, b) == (split == "test")
        assert task.grade(example, example.answer) == 1
        assert task.grade(example, example.answer + " and more") == 1
        assert task.grade(example, f" {str(a + b + 1)[::-1]}<end>") == 0
        assert task.grade(example, "") == 0


@pytest.mark.parametrize("stride", [1, 32, 1024])
def test_the_training_split_is_a_fixed_set_of_which_all_is_asked(stride):
    task = Addition(samples=50)
    asked = [task.example(stride * i).prompt for i in range(1000)]
    assert len(set(asked)) == 50
    assert asked == [task.example(stride * i).prompt for i in range(1000)]
    assert asked[:50] != asked[50:100]


@pytest.mark.parametrize(("a", "b", "carries"), [(1111, 2222, 0), (1115, 2225, 1), (9999, 1001, 4), (1950, 1050, 2)])
def test_difficulty_is_the_longest_carry(a, b, carries):
    assert TASK.question(a, b).difficulty == carries


def test_every_character_is_one_token():
    tokenizer = train_tokenizer(["12 34 1234 5678 1234+5678= "] * 50, 400, TASK.words())
    example = TASK.question(1234, 5678)
    ids = tokenizer(example.prompt + example.answer, add_special_tokens=False)["input_ids"]
    assert len(ids) == 10 + 6  # "1234+5678=" and " 2196<end>"
    assert tokenizer.decode(ids) == example.prompt + example.answer


@pytest.mark.parametrize("values", [{"digits": 0}, {"samples": 0}, {"held_out": 0.0}, {"held_out": 1.0}])
def test_settings_that_make_no_sense_are_refused(values):
    with pytest.raises(ValueError, match="addition needs"):
        Addition(**values)
