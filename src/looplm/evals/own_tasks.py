"""looplm's own tasks in lm-eval's form: held-out questions, scored by whether greedy decoding gives the answer."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_args

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from looplm.tasks import Task

OWN = {kind.kind: kind for kind in get_args(Task)}
ITEMS = 512


def own_tasks(names: Sequence[str], items: int | None = None) -> dict[str, Any]:
    """The tasks of these names with their default settings, `items` questions each, as likelihoods of the answers.

    All depths of a model are then read from one forward. Questions are those of the "test" split where there is one.
    """
    return {name: _task(name, ITEMS if items is None else items) for name in names}


def _task(name: str, items: int) -> Any:
    task = OWN[name]()
    if "split" in {field.name for field in fields(task)}:
        task = replace(task, split="test")
    asked = [task.example(number) for number in range(items)]
    records = Dataset.from_list([{"prompt": one.prompt, "answer": one.answer} for one in asked])
    config = {
        "task": name, "dataset_path": "looplm", "custom_dataset": lambda **_: {"test": records}, "test_split": "test",
        "output_type": "loglikelihood", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
        "target_delimiter": "", "num_fewshot": 0, "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    }  # fmt: skip
    return ConfigurableTask(config=config)
