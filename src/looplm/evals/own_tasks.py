"""looplm's own tasks in lm-eval's form: held-out questions, scored by whether greedy decoding gives the answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from looplm.evals.benchmarks import hushed
from looplm.evals.results import NATS
from looplm.tasks import Example, Task

OWN = {kind.kind: kind for kind in get_args(Task)}
ITEMS = 512
_DRAWS = 8  # of each wanted question, until a task is taken to have no others


def own_tasks(names: Sequence[str], items: int = ITEMS) -> dict[str, Any]:
    """The tasks of these names with their default settings, as likelihoods of the answers to `questions`.

    All depths of a model are then read from one forward.
    """
    return {name: _task(name, questions(name, items)) for name in names}


def questions(name: str, items: int = ITEMS) -> list[Example]:
    """The first `items` different questions of a task's "test" split, or all that it has (Compose: 147)."""
    task = replace(OWN[name](), split="test")
    found: dict[Example, None] = {}
    for number in range(_DRAWS * items):
        found[task.example(number)] = None
        if len(found) == items:
            break
    return list(found)


def _task(name: str, asked: Sequence[Example]) -> Any:
    records = Dataset.from_list([{"prompt": one.prompt, "answer": one.answer} for one in asked])
    config = {
        "task": name, "dataset_path": "looplm", "custom_dataset": lambda **_: {"test": records}, "test_split": "test",
        "output_type": "loglikelihood", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
        "target_delimiter": "", "num_fewshot": 0, "process_results": _marks,
        "metric_list": [
            {"metric": NATS, "aggregation": "mean", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    }  # fmt: skip
    with hushed():
        return ConfigurableTask(config=config)


def _marks(_: Any, answers: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """The loss of a whole answer rather than its perplexity, which overflows for long ones."""
    ((logprob, greedy),) = answers
    return {NATS: -logprob, "acc": float(greedy)}
