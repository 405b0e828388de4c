"""Our tasks under lm-eval: their questions and answers, and a model that knows them."""

from itertools import product

import pytest
from lm_eval.api.model import LM

from looplm.evals.harness import Protocol, run_at
from looplm.evals.own_tasks import OWN, own_tasks, questions
from looplm.tasks import Compose


class Knows(LM):
    """Says that greedy decoding gives every second answer."""

    def loglikelihood(self, requests):
        return [(-float(len(request.args[1])), number % 2 == 0) for number, request in enumerate(requests)]

    def loglikelihood_rolling(self, requests):
        raise AssertionError

    generate_until = loglikelihood_rolling


@pytest.mark.parametrize("name", OWN)
def test_every_task_asks_its_held_out_questions(name):
    found = run_at(Knows(), own_tasks([name], 6), Protocol())
    assert found["results"][name]["acc,none"] == 0.5
    assert found["results"][name]["nats,none"] == pytest.approx(sum(len(one.answer) for one in questions(name, 6)) / 6)
    assert len(found["samples"][name]) == 6


def test_questions_and_answers_are_the_tasks_own():
    (task,) = own_tasks(["compose"], 5).values()
    task.build_all_requests()
    wanted = list(dict.fromkeys(Compose(split="test").example(number) for number in range(20)))[:5]
    assert [request.args for request in task.instances] == [(one.prompt, one.answer) for one in wanted]


@pytest.mark.parametrize("name", OWN)
def test_no_question_is_asked_twice(name):
    asked = questions(name, 100)
    assert len({(one.prompt, one.answer) for one in asked}) == len(asked) == 100


def test_a_task_of_few_questions_asks_all_of_them():
    task = Compose(split="test")
    paths = [path for hops in (3, 4) for path in product(range(task.relations), repeat=hops)]
    every = [
        task.question(start, path)
        for start in range(task.entities) for path in paths if task.is_held_out(start, path)
    ]  # fmt: skip
    assert len(every) < 512
    assert set(questions("compose")) == set(every)


def test_an_unlikely_answer_has_a_loss_all_the_same():
    class Despairs(Knows):
        def loglikelihood(self, requests):
            return [(-1e4, False) for _ in requests]

    found = run_at(Despairs(), own_tasks(["capo"], 3), Protocol())
    assert found["results"]["capo"]["nats,none"] == 1e4
