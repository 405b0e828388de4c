"""Our tasks under lm-eval: their questions and answers, and a model that knows them."""

import pytest
from lm_eval.api.model import LM

from looplm.evals.harness import Protocol, run_at
from looplm.evals.own_tasks import OWN, own_tasks
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
    assert len(found["samples"][name]) == 6


def test_questions_and_answers_are_the_tasks_own():
    (task,) = own_tasks(["compose"], 5).values()
    task.build_all_requests()
    wanted = [Compose(split="test").example(number) for number in range(5)]
    assert [request.args for request in task.instances] == [(one.prompt, one.answer) for one in wanted]
