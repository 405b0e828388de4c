"""Multi-hop questions: exact counts, splits, and a reader who knows the one-hop facts alone."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from looplm.tasks import MultiHop

TASK = MultiHop(entities=20, relations=3, held_out=30)
ALL_FACTS = 4 * 4 * 3


def everything(task):
    """All questions of all hops by their prompts, from the definition: layer by layer, relation by relation."""
    size = task.entities // 5
    paths = [[(relation,) for relation in range(task.relations)]]
    while len(paths) < 4:
        paths.append([(*path, relation) for path in paths[-1] for relation in range(task.relations)])
    return {
        hops: [task.question(start, path) for start in range(size * (5 - hops)) for path in paths[hops - 1]]
        for hops in range(1, 5)
    }


def drawn(task, count):
    return [task.example(seed) for seed in range(0, count * 1024, 1024)]


@pytest.mark.parametrize(("entities", "relations"), [(20, 3), (50, 10), (100, 5)])
def test_every_start_layer_has_a_fifth_of_the_entities_times_relations_to_the_hops(entities, relations):
    task = MultiHop(entities=entities, relations=relations, fraction=0.1, held_out=10)
    assert task.questions == 2 * entities // 5 * relations**3
    assert replace(task, hops=2).questions == 3 * entities // 5 * relations**2
    if task.questions < 3000:
        prompts = {example.prompt for example in everything(task)[3]}
        assert len(prompts) == task.questions
        ends = [int(example.answer[2:-1]) // (entities // 5) for example in everything(task)[3]]
        assert Counter(ends) == {3: task.questions // 2, 4: task.questions // 2}


def test_the_papers_world_has_800_000_questions_a_start_layer():
    assert MultiHop(entities=500, relations=20, fraction=0.075, held_out=3000).questions == 2 * 800_000
    assert MultiHop(entities=500, relations=20, fraction=0.075, held_out=3000).trained == 120_000


def test_a_reader_of_the_facts_answers_every_question():
    documents = drawn(replace(TASK, facts=0.9), 2000)
    facts = {}
    for example in documents:
        if example.difficulty == 1:
            start, relation = re.fullmatch(r"(<e\d+>)(<r\d+>)<ans>", example.prompt).groups()
            facts[start, relation] = example.answer
    assert len(facts) == ALL_FACTS
    test = replace(TASK, split="test")
    questions = [*(test.example(seed) for seed in range(30)), *documents]
    for example in questions:
        end, *relations = re.findall(r"<[er]\d+>", example.prompt)
        for relation in relations:
            end = facts[end, relation]
        assert TASK.grade(example, end) == 1
    assert TASK.grade(questions[0], "<e19>" if questions[0].answer != "<e19>" else "<e18>") == 0
    assert TASK.grade(questions[0], "") == 0


def test_training_has_exactly_its_fraction_and_the_test_its_own():
    small, large = (replace(TASK, fraction=fraction) for fraction in (0.25, 0.5))
    seen = {
        task.fraction: {example.prompt for example in drawn(task, 6000) if example.difficulty == 3}
        for task in (small, large)
    }
    assert len(seen[0.25]) == small.trained == 54  # of 216
    assert len(seen[0.5]) == large.trained == 108
    assert seen[0.25] < seen[0.5]
    tests = [
        {replace(task, split="test").example(seed).prompt for seed in range(10**9, 10**9 + 30)}
        for task in (small, large)
    ]
    assert tests[0] == tests[1]
    assert len(tests[0]) == 30
    assert not tests[0] & seen[0.5]


def test_documents_are_uniform_and_a_quarter_of_them_facts():
    counts = Counter(example.prompt for example in drawn(TASK, 8000))
    facts = [count for prompt, count in counts.items() if prompt.count("<r") == 1]
    pairs = [count for prompt, count in counts.items() if prompt.count("<r") == 3]
    assert (len(facts), len(pairs)) == (ALL_FACTS, 54)
    assert abs(sum(facts) - 2000) < 160
    assert all(abs(count - 2000 / ALL_FACTS) < 35 for count in facts)
    assert all(abs(count - 6000 / 54) < 50 for count in pairs)


def test_targets_are_uniform_over_the_next_layer():
    task = MultiHop(entities=50, relations=200, fraction=1e-4, held_out=1)
    ends = Counter(
        int(task.question(start, (relation,)).answer[2:-1]) for start in range(10) for relation in range(200)
    )
    assert set(ends) == set(range(10, 20))
    assert all(abs(count - 200) < 60 for count in ends.values())


def test_every_token_is_a_word():
    words = TASK.words()
    assert len(words) == len(set(words)) == 20 + 3 + 1
    for example in drawn(TASK, 50):
        assert set(re.findall(r"<[^>]+>", example.prompt + example.answer)) <= set(words)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"entities": 21}, "equal layers"),
        ({"hops": 5}, "hops"),
        ({"facts": 0.0}, "facts"),
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 0.95}, "5000 questions"),
    ],
)
def test_settings_without_sense_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        MultiHop(**settings)
