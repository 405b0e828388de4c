"""Environments: what they ask, how they mark, and which mistakes they name."""

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Annotated

import pytest
import reasoning_gym
from pydantic import Field, TypeAdapter, ValidationError

from looplm.rl import Environment, FunctionEnvironment, GymEnvironment, MathEnvironment, TaskEnvironment
from looplm.tasks import Chain, Compose, RunningSum
from looplm.tasks.answers import BOX_INSTRUCTION

RECIPE = TypeAdapter(Annotated[Environment, Field(discriminator="kind")])
SEEDS = range(40)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def problems(tmp_path):
    records = [{"problem": f"What is {n} + {n}?", "answer": n + n} for n in range(40)]
    return write(tmp_path / "problems.jsonl", records)


@pytest.fixture
def prompts(tmp_path):
    records = [{"prompt": f"Say {n}.", "bound": n} for n in range(12)]
    return write(tmp_path / "prompts.jsonl", [*records, {"prompt": [{"role": "user", "content": "Speak."}]}])


@pytest.fixture
def mathematics(problems):
    environment = MathEnvironment(path=problems, held_out=0.25, workers=1)
    yield environment
    environment.close()


@pytest.mark.parametrize("task", [RunningSum(terms=4), Compose(), Chain()])
def test_a_task_asks_its_splits_and_gives_its_grades(task):
    environment = TaskEnvironment(task=task)
    for split in ("train", "test"):
        examples = [replace(task, split=split).example(seed) for seed in SEEDS]
        questions = [environment.question(seed, split) for seed in SEEDS]
        assert [question.prompt for question in questions] == [example.prompt for example in examples]
        answers = [example.answer for example in examples]
        assert environment.reward(questions, answers, [[]] * 40) == [1.0] * 40
        assert environment.reward(questions, ["?"] * 40, [[]] * 40) == [0.0] * 40


def test_problems_are_asked_once_in_every_epoch(mathematics):
    asked = {
        split: [mathematics.question(seed, split).prompt[0]["content"] for seed in range(120)]
        for split in ("train", "test")
    }
    sizes = {split: len(set(texts)) for split, texts in asked.items()}
    assert sizes["train"] + sizes["test"] == 40
    assert 3 <= sizes["test"] <= 20
    assert not set(asked["train"]) & set(asked["test"])
    epochs = [asked["train"][first : first + sizes["train"]] for first in (0, sizes["train"])]
    assert all(Counter(epoch) == Counter(set(asked["train"])) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_problems_do_not_depend_on_what_was_asked_before(mathematics, problems):
    other = MathEnvironment(path=problems, held_out=0.25)
    assert other.question(1000, "train") == mathematics.question(1000, "train")
    reseeded = MathEnvironment(path=problems, held_out=0.25, seed=1)
    orders = [[each.question(seed, "train").prompt[0]["content"] for seed in range(120)] for each in (other, reseeded)]
    assert set(orders[0]) == set(orders[1])
    assert orders[0] != orders[1]


def test_the_last_box_is_marked_and_counted(mathematics):
    question = mathematics.question(0, "train")
    sum_ = question.columns["answer"]
    texts = [f"\\boxed{{{sum_}}}", f"\\boxed{{1}} no, \\boxed{{{sum_}.0}}", f"\\boxed{{{sum_}}} \\boxed{{-1}}", sum_]
    assert mathematics.reward([question] * 4, texts, [[]] * 4) == [1.0, 1.0, 0.0, 0.0]
    counts = {name: count for name, count in mathematics.drain_counts().items() if count}
    assert counts == {"right": 2, "wrong": 1, "unanswered": 1}


def test_problems_as_a_chat_or_as_text(problems):
    chat, text = (MathEnvironment(path=problems, chat=chat).question(3, "train") for chat in (True, False))
    (turn,) = chat.prompt
    assert turn["role"] == "user"
    assert turn["content"].startswith(f"{BOX_INSTRUCTION}\n\nWhat is ")
    assert text.prompt == turn["content"] + "\n\n"
    assert text.columns == chat.columns


def test_the_answer_of_a_solution_is_its_last_box(tmp_path):
    solutions = [r"\boxed{1}, so \boxed{\frac{1}{2}}.", "No box.", r"\boxed{", r"\boxed{}"]
    path = write(tmp_path / "m.jsonl", [{"problem": "?", "solution": solution} for solution in solutions])
    environment = MathEnvironment(path=path, answer=None, solution="solution")
    assert {environment.question(seed, "train").columns["answer"] for seed in range(4)} == {r"\frac{1}{2}"}
    assert environment.drain_counts() == {"left_out": 3}
    assert environment.drain_counts() == {"left_out": 0}


def test_an_unreadable_answer_is_never_rewarded(tmp_path):
    path = write(tmp_path / "m.jsonl", [{"problem": "?", "answer": "???"}])
    environment = MathEnvironment(path=path, workers=1)
    question = environment.question(0, "train")
    assert environment.reward([question] * 2, [r"\boxed{???}", "no box"], [[], []]) == [None, None]
    assert environment.drain_counts()["unreadable"] == 2
    environment.close()


@pytest.mark.parametrize(
    ("answer", "wrapped"), [("box", r"so \boxed{%s}"), ("tag", "<answer> %s </answer>"), ("text", "%s ")]
)
def test_gym_answers_are_scored_by_their_data_set(answer, wrapped):
    environment = GymEnvironment(
        dataset="chain_sum", config={"max_terms": 3}, seed=7, size=200, held_out=50, answer=answer
    )
    reference = reasoning_gym.create_dataset("chain_sum", max_terms=3, seed=7, size=200)
    questions = [environment.question(seed, "train") for seed in SEEDS]
    entries = [reference[50 + seed] for seed in SEEDS]
    assert all(
        entry["question"] in question.prompt[0]["content"] for entry, question in zip(entries, questions, strict=True)
    )
    for said in ({"+1": 1}, None):
        answers = [entry["answer"] if said is None else str(int(entry["answer"]) + 1) for entry in entries]
        scores = [reference.score_answer(told, entry) for told, entry in zip(answers, entries, strict=True)]
        assert environment.reward(questions, [wrapped % told for told in answers], [[]] * 40) == scores
    assert scores == [1.0] * 40


def test_gym_splits_share_no_number_and_texts_without_an_answer_are_counted():
    environment = GymEnvironment(dataset="chain_sum", size=20, held_out=5)
    numbers = {
        split: [environment.question(seed, split).columns["number"] for seed in SEEDS] for split in ("train", "test")
    }
    assert numbers == {"train": [5 + seed % 15 for seed in SEEDS], "test": [seed % 5 for seed in SEEDS]}
    question = environment.question(0, "train")
    assert environment.reward([question], ["no box"], [[]]) == [0.0]
    assert environment.drain_counts() == {"errors": 0, "unanswered": 1}


def test_a_gym_score_that_fails_is_0_and_counted(monkeypatch):
    environment = GymEnvironment(dataset="chain_sum")
    question = environment.question(0, "train")
    monkeypatch.setattr(type(environment._dataset), "score_answer", lambda self, answer, entry: 1 / 0)
    assert environment.reward([question], [r"\boxed{1}"], [[]]) == [0.0]
    assert environment.drain_counts() == {"errors": 1, "unanswered": 0}


def test_functions_are_summed_by_weight_where_they_apply(prompts):
    names = ("sample_rewards:share_of_a", "sample_rewards:longer_than")
    environment = FunctionEnvironment(path=prompts, functions=names, weights=(2.0, 0.5))
    questions = [environment.question(seed, "train") for seed in range(13)]
    assert sorted(str(question.columns["bound"]) for question in questions) == sorted([*map(str, range(12)), "None"])
    ids = [[1] * 6] * 13
    for question, reward in zip(questions, environment.reward(questions, ["abab"] * 13, ids), strict=True):
        bound = question.columns["bound"]
        assert reward == 2 * 0.5 + (0.5 if bound is not None and bound < 6 else 0.0)
    alone = FunctionEnvironment(path=prompts, functions=names[1:])
    expected = [None if each.columns["bound"] is None else float(each.columns["bound"] < 6) for each in questions]
    assert alone.reward(questions, ["abab"] * 13, ids) == expected


def test_recipes_fill_every_kind_and_refuse_what_they_do_not_know(problems):
    filled = RECIPE.validate_python({"kind": "task", "task": {"kind": "running_sum", "terms": 5}})
    assert filled == TaskEnvironment(task=RunningSum(terms=5))
    assert RECIPE.validate_python({"kind": "math", "path": problems}) == MathEnvironment(path=problems)
    gym = RECIPE.validate_python({"kind": "reasoning_gym", "dataset": "chain_sum", "config": {"max_terms": 3}})
    assert gym == GymEnvironment(dataset="chain_sum", config={"max_terms": 3})
    functions = RECIPE.validate_python({"kind": "functions", "path": problems, "functions": ["a:b"]})
    assert functions == FunctionEnvironment(path=problems, functions=("a:b",))
    for wrong in (
        {"kind": "maths"},
        {"kind": "task", "tusk": {}},
        {"kind": "math", "path": problems, "limit": float("inf")},
    ):
        with pytest.raises(ValidationError):
            RECIPE.validate_python(wrong)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (MathEnvironment, {"solution": "solution"}, "name one of answer and solution"),
        (MathEnvironment, {"answer": None}, "name one of answer and solution"),
        (MathEnvironment, {"held_out": 1.0}, "held_out"),
        (MathEnvironment, {"seed": -1}, "seed"),
        (MathEnvironment, {"workers": 0}, "workers"),
        (FunctionEnvironment, {"functions": ()}, "at least one"),
        (FunctionEnvironment, {"functions": ("a:b",), "weights": (1.0, 2.0)}, "as many weights"),
        (FunctionEnvironment, {"functions": ("a:b",), "held_out": -0.1}, "held_out"),
    ],
)
def test_settings_without_sense_are_refused(kind, settings, named):
    with pytest.raises(ValueError, match=named):
        kind(path="x", **settings)


@pytest.mark.parametrize(
    ("settings", "named"), [({"held_out": 0}, "held_out"), ({"seed": -1}, "seed"), ({"config": {"size": 5}}, "size")]
)
def test_gym_settings_without_sense_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        GymEnvironment(dataset="chain_sum", **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dataset": "no_such"}, "no_such"),
        ({"config": {"max_turms": 3}}, "max_turms"),
        ({"config": {"min_terms": 0}}, "min_terms"),
    ],
)
def test_what_reasoning_gym_refuses_is_named(settings, named):
    with pytest.raises(ValueError, match=f"refuses.*{named}"):
        GymEnvironment(**({"dataset": "chain_sum"} | settings)).question(0, "train")


@pytest.mark.parametrize(
    ("records", "named"),
    [
        ([{"problem": "?"}], "no question that can be marked; its records need 'problem' and 'answer'"),
        ([{"answer": "1"}], "line 1 has no field 'problem'"),
        ([{"problem": "?", "answer": [1]}], "'answer' is a list"),
        ([{"problem": "?", "answer": " "}], "no question that can be marked"),
        ([], "no question that can be marked"),
        ([{"problem": "\ud800", "answer": "1"}], "half a character"),
    ],
)
def test_problems_that_cannot_be_asked_are_named(tmp_path, records, named):
    environment = MathEnvironment(path=write(tmp_path / "m.jsonl", records))
    with pytest.raises(ValueError, match=named):
        environment.question(0, "train")


def test_a_split_without_questions_is_named(problems):
    with pytest.raises(ValueError, match=r"no question of the test split; raise environment.held_out"):
        MathEnvironment(path=problems).question(0, "test")


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"prompt": 5}, "neither text nor a list of turns"),
        ({"prompt": ""}, "line 1: 'prompt' is empty"),
        ({"prompt": []}, "neither text nor a list of turns"),
        ({"prompt": [{"role": "user"}]}, "neither text nor a list of turns"),
        ({"prompt": "?", "completions": "x"}, "must not be called 'completions'"),
        ({"text": "?"}, "no field 'prompt'"),
    ],
)
def test_prompts_that_cannot_be_asked_are_named(tmp_path, record, named):
    environment = FunctionEnvironment(path=write(tmp_path / "p.jsonl", [record]), functions=("a:b",))
    with pytest.raises(ValueError, match=named):
        environment.question(0, "train")


@pytest.mark.parametrize(
    ("name", "named"),
    [("sample_rewards", "package.module:function"), (":x", "package.module:function"), ("no_such:x", "no_such"),
     ("sample_rewards:none", "none"), ("sample_rewards:later", "no plain function"), (".rewards:x", "write package."),
     ("sample_rewards:one_too_few", "returned 0 rewards for 1"), ("sample_rewards:endless", "returned inf; keep"),
     ("sample_rewards:enormous", r"returned -1e\+200; keep rewards within 1e\+100"),
     ("sample_rewards:nothing", "returned no list of numbers: TypeError"),
     ("sample_rewards:words", "returned no list of numbers: TypeError"),
     ("sample_rewards:by_number", "returned no list of numbers: TypeError: a dict is in no order"),
     ("sample_rewards:narrow", "failed: TypeError: .*unexpected keyword argument 'prompts'$"),
     ("sample_rewards:stumbling", r"failed: KeyError: 'gold' \(.*sample_rewards.py:\d+\)$")],
)  # fmt: skip
def test_functions_that_are_none_are_named(prompts, name, named):
    environment = FunctionEnvironment(path=prompts, functions=(name,))
    with pytest.raises(ValueError, match=f"{name.split(':')[0]}.*{named}"):
        environment.reward([environment.question(0, "train")], ["a"], [[1]])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def one(**_:", r"cannot be imported: SyntaxError: .*mine_1.py, line 1"),
        ("x = 1\ny = z", r"cannot be imported: NameError: name 'z' is not defined \(.*mine_2.py:2\)$"),
        ("import no_such_module", r"cannot be imported: ModuleNotFoundError: .*'no_such_module' \(.*mine_3.py:1\)$"),
        ("def one(prompts, **_): return [1] * len(prompts)", None),
    ],
    ids=["1", "2", "3", "4"],
)
def test_functions_of_the_current_folder_are_found_and_its_mistakes_named(
    prompts, tmp_path, monkeypatch, request, text, named
):
    """However looplm was started; what is imported from there leaves no trace in the path."""
    name = f"mine_{request.node.callspec.id}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert str(tmp_path) not in before
    environment = FunctionEnvironment(path=prompts, functions=(f"{name}:one",))
    if named is None:
        assert environment.reward([environment.question(0, "train")] * 2, ["a", "b"], [[1]] * 2) == [1.0, 1.0]
    else:
        with pytest.raises(ValueError, match=f"^the reward function '{name}:one' {named}"):
            environment.reward([], [], [])  # which imports what it is to call, and calls nothing
    assert sys.path == before


def test_records_without_an_answer_are_left_out_and_counted(tmp_path):
    records = [{"problem": "1+1=", "answer": 2}, {"problem": "?", "answer": None}, {"problem": "?"}]
    environment = MathEnvironment(path=write(tmp_path / "m.jsonl", records))
    assert {environment.question(seed, "train").columns["answer"] for seed in range(6)} == {"2"}
    assert environment.num_questions("train") == 1
    assert environment.drain_counts()["left_out"] == 2


def test_splits_know_how_many_questions_they_have(mathematics):
    test, train = (mathematics.num_questions(split) for split in ("test", "train"))
    assert test + train == 40
    assert len({mathematics.question(seed, "test").prompt[0]["content"] for seed in range(test)}) == test
    gym = GymEnvironment(dataset="chain_sum", size=20, held_out=5)
    assert (gym.num_questions("test"), gym.num_questions("train")) == (5, 15)
    assert TaskEnvironment(task=RunningSum()).num_questions("test") is None


def test_a_fingerprint_is_that_of_questions_columns_and_order(tmp_path):
    records = [{"prompt": f"Say {n}.", "bound": n} for n in range(4)]
    others = [records[::-1], records[:3], [*records[:3], records[3] | {"bound": 5}], records + records[:1]]

    def fingerprint(these, **settings):
        path = write(tmp_path / "p.jsonl", these)
        return FunctionEnvironment(path=path, functions=("a:b",), **settings).fingerprint()

    assert fingerprint(records) == fingerprint(records)
    assert len({fingerprint(these) for these in (records, *others)}) == 5
    assert fingerprint(records, held_out=0.5) != fingerprint(records)
    assert TaskEnvironment(task=RunningSum()).fingerprint() == ""
