"""The compose task: its world, its split and its marking."""

import random
from collections import Counter

import pytest

from looplm.tasks import Compose


def follow(task, prompt):
    """Answer a prompt from the one-hop facts alone."""
    facts = {}
    for entity in range(task.entities):
        for relation in range(task.relations):
            question = task.question(entity, (relation,))
            facts[question.prompt.removesuffix("<ask>")] = question.answer
    words = [word + ">" for word in prompt.removesuffix("<ask>").split(">")[:-1]]
    here = words[0]
    for relation in words[1:]:
        here = facts[here + relation]
    return here


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_follow_from_the_facts_and_grade_one(split):
    task = Compose(split=split)
    for seed in range(200):
        example = task.example(seed)
        assert follow(task, example.prompt) == example.answer
        assert task.grade(example, example.answer) == 1.0
        assert task.grade(example, f" {example.answer}<r1> and more") == 1.0
        wrong = next(word for word in task.words() if word.startswith("<e") and word != example.answer)
        assert task.grade(example, wrong + example.answer) == 0.0
        assert task.grade(example, "nothing") == 0.0
        assert example.difficulty == example.prompt.count("<r")


def test_every_relation_is_a_permutation():
    task = Compose(entities=7, relations=4)
    for relation in range(4):
        assert len({task.question(entity, (relation,)).answer for entity in range(7)}) == 7


def test_examples_are_a_pure_function_of_the_seed():
    assert Compose().example(5) == Compose().example(5)
    assert len({Compose().example(seed).prompt for seed in range(300)}) > 150
    assert Compose(world_seed=1).question(0, (0, 1, 2)) != Compose().question(0, (0, 1, 2))


def test_the_splits_never_meet_and_hops_are_even():
    train = [Compose(held_out=0.3).example(seed) for seed in range(4000)]
    test = [Compose(held_out=0.3, split="test").example(seed) for seed in range(500)]
    assert not {e.prompt for e in train} & {e.prompt for e in test}
    assert {e.difficulty for e in test} == {3, 4}
    counts = Counter(e.difficulty for e in train)
    assert all(900 < counts[hops] < 1100 for hops in (1, 2, 3, 4))


@pytest.mark.parametrize("split", ["train", "test"])
def test_any_number_of_hops_is_asked_of_the_same_world(split):
    task = Compose(held_out=0.3, split=split)
    for hops in (3, 4, 9):
        asked = [task.example(seed, hops) for seed in range(100)]
        assert {example.difficulty for example in asked} == {hops}
        assert all(follow(task, example.prompt) == example.answer for example in asked)
        paths = [[int(word.strip("<er>")) for word in e.prompt.split("><")[:-1]] for e in asked]
        assert all(task.is_held_out(start, tuple(path)) == (split == "test") for start, *path in paths)


def test_what_is_always_trained_is_not_asked_of_the_test_split():
    assert Compose().example(0, hops=1).difficulty == 1
    with pytest.raises(ValueError, match="no test questions of hops=2"):
        Compose(split="test").example(0, hops=2)
    with pytest.raises(ValueError, match="no train questions of hops=0"):
        Compose().example(0, hops=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entities": 0}, "entities of at least 1"),
        ({"held_out": 1.0}, r"held_out in \[0, 1\)"),
        ({"split": "test", "held_out": 0.0}, "no test questions"),
        ({"split": "test", "max_hops": 2}, "no test questions"),
    ],
)
def test_worlds_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Compose(**changes)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_world_without_such_a_question_says_so(split):
    """Instead of searching for ever."""
    held_out = 0.01 if split == "test" else 0.999
    task = Compose(entities=2, relations=1, max_hops=3, held_out=held_out, split=split)
    three_hops = next(seed for seed in range(100) if _hops_drawn(task, seed) == 3)
    with pytest.raises(ValueError, match=f"no 3-hop question of the {split} split"):
        task.example(three_hops)


def _hops_drawn(task, seed):
    """The hop count of question `seed`: the first draw, which no rejection follows."""
    generator = random.Random(f"{task.world_seed}/{task.split}/{seed}")
    return generator.randint(3 if task.split == "test" else 1, task.max_hops)
