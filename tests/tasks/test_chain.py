"""Chains written out, against walking the world one fact at a time."""

from collections import Counter

import pytest

from looplm.tasks import Chain, Compose

TASK = Chain()


def words_of(text):
    return [f"{word}>" for word in text.split(">")[:-1]]


def facts(task):
    """Every single hop, asked of the world itself."""
    world = Compose(entities=task.entities, relations=task.relations, world_seed=task.world_seed)
    return {
        (f"<e{entity}>", f"<r{relation}>"): world.question(entity, (relation,)).answer
        for entity in range(task.entities)
        for relation in range(task.relations)
    }


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_those_of_walking_fact_by_fact(split):
    task = Chain(stride=3, steps=2, split=split)
    hops = facts(task)
    for seed in range(200):
        example = task.example(seed)
        at, *relations, ask = words_of(example.prompt)
        assert ask == "<ask>"
        walked = []
        for relation in relations:
            at = hops[at, relation]
            walked.append(at)
        assert example.answer == "".join(walked[2::3])
        assert example.difficulty == len(words_of(example.answer)) == len(relations) // 3
        assert task.grade(example, example.answer + "<e0>") == 1
        assert task.grade(example, example.answer[:-1]) == 0
        assert set(words_of(example.prompt + example.answer)) <= set(task.words())


def test_lengths_are_uniform_in_training_and_the_longest_in_test():
    lengths = Counter(TASK.example(seed).difficulty for seed in range(2000))
    assert sorted(lengths) == [1, 2, 3, 4]
    assert all(abs(count - 500) < 90 for count in lengths.values())
    assert {Chain(split="test").example(seed).difficulty for seed in range(50)} == {4}


def test_the_splits_share_no_question_in_a_world_that_can_be_counted():
    small = {"entities": 3, "relations": 2, "stride": 2, "steps": 2}
    asked = {
        split: {Chain(**small, split=split).example(seed).prompt for seed in range(3000)} for split in ("train", "test")
    }
    assert not asked["train"] & asked["test"]
    # every start with every path of two hops, and of four: each is in one split
    assert len(asked["train"] | asked["test"]) == 3 * 2**2 + 3 * 2**4
    assert all(prompt.count("<r") == 4 for prompt in asked["test"])


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"stride": 0}, "stride"), ({"steps": 0}, "steps"), ({"held_out": 0.0}, "held_out"), ({"entities": 0}, "entities"),
     ({"stride": 1, "steps": 2}, "stride x steps")],
)  # fmt: skip
def test_settings_without_sense_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        Chain(**settings)


def test_a_world_too_small_for_a_split_says_so():
    with pytest.raises(ValueError, match="chain finds no question of 2 answers in the test split"):
        Chain(entities=1, relations=1, steps=2, held_out=1e-9, split="test").example(0)
