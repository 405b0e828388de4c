"""lm-eval's own tasks on local records: its prompts, few-shot format, filters and metrics, without a hub."""

import difflib
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
import pyarrow as pa
from datasets import Dataset
from jinja2 import TemplateError
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from looplm.data.files import Record
from looplm.evals.benchmark_data import DataSet, Split, find_split, how_to_get
from looplm.evals.data_sets import OPEN_BOOK, SVAMP, data_set

_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_FEWSHOT_SEED = 1234  # what `lm_eval.simple_evaluate` takes by default
_MISFITS = (TemplateError, LookupError, TypeError, ValueError, AttributeError)  # of records that are none of a task's

# The folder of lm-eval's tasks that defines each; of a folder that ends in "/*", all that it defines.
_HOMES = {
    "gsm8k": "gsm8k",
    "gsm8k_cot": "gsm8k",
    "gsm8k_cot_zeroshot": "gsm8k",
    "hendrycks_math500": "hendrycks_math",
    "minerva_math500": "minerva_math",
    "bbh_cot_fewshot": "bbh/cot_fewshot/*",
    "bbh_cot_zeroshot": "bbh/cot_zeroshot/*",
    "bbh_zeroshot": "bbh/zeroshot/*",
    "mmlu": "mmlu/default/*",
    "mmlu_stem": "mmlu/default/*",
    "mmlu_humanities": "mmlu/default/*",
    "mmlu_social_sciences": "mmlu/default/*",
    "mmlu_other": "mmlu/default/*",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "hellaswag": "hellaswag",
    "piqa": "piqa",
    "winogrande": "winogrande",
    "openbookqa": "openbookqa",
    "sciq": "sciq",
    "commonsense_qa": "commonsense_qa",
    "lambada_openai": "lambada",
    "boolq": "super_glue/boolq",
    "copa": "super_glue/copa",
}

# What lm-eval does not define: one of its tasks with other records or another prompt.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "svamp_cot": ("gsm8k_cot", {"dataset_path": SVAMP}),
    "svamp_cot_zeroshot": (
        "gsm8k_cot_zeroshot",
        {"dataset_path": SVAMP, "training_split": None, "fewshot_split": None},
    ),
    "openbookqa_open": ("openbookqa", {"dataset_path": OPEN_BOOK, "doc_to_text": "{{fact1}}\n{{question_stem}}"}),
    "sciq_closed": ("sciq", {"doc_to_text": "Question: {{question}}\nAnswer:"}),
}


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a benchmark would be run on.

    tasks: how many of lm-eval's · split, items: what is evaluated · origin: the package or the files
    examples: where few-shot examples come from, "" for nowhere · notes: what differs from lm-eval on the hub's data.
    """

    name: str
    tasks: int
    split: str
    items: int
    origin: str
    examples: str
    licence: str
    notes: str


@dataclass(frozen=True, kw_only=True)
class _Definition:
    """A task as lm-eval defines it in the folder `home`, under the name `base`, with our `changes`."""

    name: str
    base: str
    home: str
    changes: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def data(self) -> DataSet:
        return data_set(self.config["dataset_path"], self.configuration)

    @property
    def configuration(self) -> str:
        return self.config.get("dataset_name") or ""

    @property
    def brings_examples(self) -> bool:
        return bool((self.config.get("fewshot_config") or {}).get("samples"))


class _NoExamples(ContextSampler):
    """In place of examples that were not asked for, which lm-eval would draw from the questions themselves."""

    def sample(self, n: int, eval_doc: Any = None, df: Any = None, **kwargs: Any) -> Sequence[dict[str, Any]]:
        raise ValueError(f"this task was prepared without examples; make it by offline_tasks(..., shots={n})")


def benchmark_names() -> tuple[str, ...]:
    """Every benchmark, groups of tasks ("mmlu", "bbh_cot_fewshot") by their own name."""
    return (*_HOMES, *_VARIANTS)


def tasks_of(name: str) -> tuple[str, ...]:
    """The tasks of a benchmark: itself, or those of a group, such as the 57 of "mmlu".

    Raises:
        ValueError: if there is no such benchmark or task.
    """
    base, _ = _VARIANTS.get(name, (name, {}))
    index = _manager(_home(base)).task_index
    if base not in index:
        raise _unknown(name)
    return (name,) if name in _VARIANTS else tuple(_leaves(index, name))


def offline_tasks(
    names: Sequence[str], folder: Path | None = None, items: int | None = None, shots: int | None = None
) -> dict[str, Task]:
    """Tasks for `lm_eval.evaluator.evaluate(lm, task_dict=...)`, by name, on records that are on this machine.

    Each split is taken from `folder` if it is there, else from a package. items: how many questions of each task, from
    the first · shots: examples before each question, None for as many as lm-eval's definition says. Examples come from
    lm-eval's definition or from its training or validation split, drawn by the seed that lm-eval has by default;
    never from the split that is evaluated.

    Raises:
        ValueError: for an unknown name, a count that is not positive, data that are in neither place, or records that
            the task cannot ask, or among whose choices is no right one.
    """
    if items is not None and items < 1:
        raise ValueError(f"items must be at least 1, got {items}")
    if shots is not None and shots < 0:
        raise ValueError(f"shots must be 0 or more, got {shots}")
    tasks = dict.fromkeys(task for name in names for task in tasks_of(name))
    return {task: _task(_definition(task), folder, items, shots) for task in tasks}


def benchmark_records(name: str, folder: Path | None = None) -> list[Record]:
    """The records of all questions of a benchmark, of its tasks one after the other.

    Raises:
        ValueError: as `describe` does.
    """
    return [
        Record(f"{task} question {number}", row)
        for task in tasks_of(name)
        for number, row in enumerate(_evaluated(_definition(task), folder)[1].rows(), start=1)
    ]


def describe(name: str, folder: Path | None = None) -> Description:
    """Where the records of a benchmark were found, and how many.

    Raises:
        ValueError: if there is no such benchmark, or its records are in neither the folder nor a package.
    """
    parts = [(task, *_evaluated(task, folder)) for task in map(_definition, tasks_of(name))]
    return Description(
        name=name,
        tasks=len(parts),
        split=_each(split for _, split, _ in parts),
        items=sum(len(found.rows()) for _, _, found in parts),
        origin=_each(found.origin for _, _, found in parts),
        examples=_each(_examples_from(task, folder, split) for task, split, _ in parts),
        licence=_each(task.data.licence for task, _, _ in parts),
        notes=_each(note for task, split, found in parts for note in (found.note, _instead(task, split))),
    )


def _each(texts: Iterator[str]) -> str:
    """All that differ, by comma; the first and a count if there are more than three."""
    different = [text for text in dict.fromkeys(texts) if text]
    return ", ".join(different) if len(different) < 4 else f"{different[0]} and {len(different) - 1} more"


def _home(name: str) -> str:
    for known, home in _HOMES.items():
        if name == known or (home.endswith("/*") and name.startswith(f"{known}_")):
            return home.removesuffix("/*")
    raise _unknown(name)


def _unknown(name: str) -> ValueError:
    near = difflib.get_close_matches(name, benchmark_names(), n=3, cutoff=0.4)
    return ValueError(f"there is no benchmark '{name}'; near it are {', '.join(near or benchmark_names())}")


@cache
def _manager(home: str) -> TaskManager:
    """lm-eval's index of one folder; all folders would take half a minute."""
    return TaskManager(include_path=str(Path(lm_eval.__file__).parent / "tasks" / home), include_defaults=False)


def _leaves(index: Mapping[str, Any], name: str) -> Iterator[str]:
    entry = index[name]
    members = sorted(entry.tags) if entry.cfg is None else entry.cfg["task"]
    if isinstance(members, str):
        yield name
    else:
        for member in members:
            yield from _leaves(index, member)


def _definition(name: str) -> _Definition:
    base, changes = _VARIANTS.get(name, (name, {}))
    home = _home(base)
    config = (_manager(home).task_index[base].cfg or {}) | changes
    return _Definition(name=name, base=base, home=home, changes=changes, config=config)


def _find(task: _Definition, split: str, folder: Path | None) -> Split | None:
    return find_split(task.data, task.configuration, split, folder)


def _evaluated(task: _Definition, folder: Path | None) -> tuple[str, Split]:
    splits = [task.config[key] for key in ("test_split", "validation_split") if task.config.get(key)]
    for split in splits:
        if found := _find(task, split, folder):
            return split, found
    how = how_to_get(task.data, task.configuration, splits[0], folder)
    raise ValueError(f"{task.name} has no {splits[0]} split here: {how}")


def _instead(task: _Definition, split: str) -> str:
    return "" if task.config.get("test_split") in (None, split) else f"{split} in place of test"


def _example_splits(task: _Definition, evaluated: str) -> list[str]:
    """Where lm-eval takes examples from, the first that exists; it would go on to the questions themselves."""
    named = task.config.get("fewshot_split")
    splits = [named] if named else [task.config.get(key) for key in ("training_split", "validation_split")]
    return [split for split in splits if split not in (None, evaluated)]


def _examples(task: _Definition, folder: Path | None, evaluated: str) -> tuple[str, Split] | None:
    if not task.brings_examples:
        for split in _example_splits(task, evaluated):
            if found := _find(task, split, folder):
                return split, found
    return None


def _examples_from(task: _Definition, folder: Path | None, evaluated: str) -> str:
    found = _examples(task, folder, evaluated)
    if found is None:
        return "lm-eval" if task.brings_examples else ""
    split, examples = found
    return f"{split} of {examples.origin}" + (f" ({examples.note})" if examples.note else "")


def _task(task: _Definition, folder: Path | None, items: int | None, shots: int | None) -> Task:
    shots = task.config.get("num_fewshot") or 0 if shots is None else shots
    split, evaluated = _evaluated(task, folder)
    examples = _examples(task, folder, split) if shots else None
    if shots and not examples and not task.brings_examples:
        raise ValueError(f"{task.name} with {shots} examples needs {_lacking(task, folder, split)}; 0 shots need none")
    sets = {split: _records(evaluated, items)}
    if examples:
        sets[examples[0]] = _records(examples[1], None)
    built = _built(task, sets, shots, evaluated.origin)
    if folder is not None:
        _check_questions(built, built.task_docs, f"{evaluated.origin} question", task.name)
        if examples:
            _check_questions(built, built.fewshot_docs(), f"{examples[1].origin} example", task.name)
    built.set_config("task", task.name)
    built.set_fewshot_seed(_FEWSHOT_SEED)
    if shots > (least := len(built.sampler.fewshot_docs()) - (type(built.sampler) is ContextSampler)):
        raise ValueError(f"{task.name} has examples for {max(least, 0)} shots, got {shots}")
    return built


def _check_questions(built: Any, docs: Iterable[Any], origin: str, name: str) -> None:
    for number, doc in enumerate(docs, start=1):
        try:
            asked, right = built.doc_to_text(doc), built.doc_to_target(doc)
            choices = built.doc_to_choice(doc) if built.OUTPUT_TYPE == "multiple_choice" else None
        except _MISFITS as error:
            raise ValueError(f"{origin} {number} cannot be asked by {name}: {error}") from error
        if choices is not None and not _is_among(asked if built.multiple_input else right, choices):
            raise ValueError(f"{origin} {number} has no right answer for {name}, or an empty choice")


def _is_among(right: Any, choices: Sequence[str]) -> bool:
    places = [choices.index(one) if one in choices else one for one in (right if isinstance(right, list) else [right])]
    return all(choices) and all(isinstance(place, int) and 0 <= place < len(choices) for place in places)


def _records(split: Split, items: int | None) -> Dataset:
    rows = split.rows()[:items]
    try:
        return Dataset.from_list(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"the records of {split.origin} differ in the kind of a value: {error}") from error


def _lacking(task: _Definition, folder: Path | None, evaluated: str) -> str:
    splits = _example_splits(task, evaluated)
    if not splits:
        return "a training split, which it does not have"
    return f"its {splits[0]} split: {how_to_get(task.data, task.configuration, splits[0], folder)}"


def _built(task: _Definition, sets: dict[str, Dataset], shots: int, origin: str) -> Any:
    splits = {key: task.config.get(key) if task.config.get(key) in sets else None for key in _SPLITS}
    changes = {**task.changes, **splits, "num_fewshot": shots, "custom_dataset": lambda **_: sets}
    if not shots and not task.brings_examples:
        changes["fewshot_config"] = {"sampler": _NoExamples, "samples": []}
    try:
        with hushed():
            loaded = _manager(task.home).load({"group": task.name, "task": [{**changes, "task": task.base}]})
    except (ImportError, AssertionError) as error:
        raise ValueError(f"lm-eval cannot load {task.name}: {error}") from error
    except _MISFITS as error:
        raise ValueError(f"{origin} holds no questions of {task.name}: {error}") from error
    return loaded["tasks"][task.base]


@contextmanager
def hushed() -> Generator[None]:
    """Without what lm-eval says of every task: that its data set is custom, that defaults are defaults."""
    logger = logging.getLogger("lm_eval.api.task")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
