"""One evaluation by lm-eval's tasks, from a checkpoint to a result that says all that decided it."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from looplm.evals.benchmarks import offline_tasks, tasks_of
from looplm.evals.harness import Items, Protocol, evaluate
from looplm.evals.lm import Reader
from looplm.evals.memo import Memo
from looplm.evals.own_tasks import OWN, own_tasks
from looplm.evals.parity import Parity, parity
from looplm.evals.progress import Advance, unheard
from looplm.evals.results import Evaluation, Score, averages, digest
from looplm.evals.subject import ModelSettings, Subject, open_subject


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Which tasks, and how they are put.

    shots: instead of each task's own · data: a folder of benchmark files, before installed packages
    cache: a folder of answers · batch_size, max_length: as `Reader` has them · protocol: how lm-eval asks.
    """

    tasks: tuple[str, ...]
    shots: int | None = None
    data: Path | None = None
    batch_size: int = 8
    max_length: int | None = None
    cache: Path | None = None
    protocol: Protocol


def run_evaluation(model: ModelSettings, asked: TaskSettings, advance: Advance = unheard) -> Evaluation:
    """Scores of every task at every depth, the items behind them, and what a token cost.

    A group of tasks ("mmlu") also has the means over the items of all its tasks, as lm-eval weighs groups by size.

    Raises:
        ValueError: for an unknown task, missing data, a depth that the model cannot do, or an unusable checkpoint.
    """
    tasks = _tasks(asked)
    subject = open_subject(model)
    reader = _reader(subject, asked, advance)
    told = _told(subject, reader, asked, tasks)
    if asked.cache is not None:
        reader = replace(reader, memo=_memo(asked.cache, told))
    scores, items = evaluate(reader, tasks, asked.protocol)
    grouped = [score for name, members in told["groups"].items() for score in _group_scores(name, members, items)]
    return subject.result(Evaluation(settings=told, scores=[*grouped, *scores], items=items))


def run_parity(
    model: ModelSettings, asked: TaskSettings, advance: Advance = unheard
) -> tuple[list[Parity], Evaluation]:  # fmt: skip
    """`parity` of a checkpoint at its own loops, in float32 on CPU, and the same as a result.

    The result calls the models its depths, "looplm" and "hf"; "furthest answers" holds how far their answers lie apart.

    Raises:
        ValueError: as `run_evaluation` and `parity` do.
    """
    tasks = _tasks(asked)
    subject = open_subject(model)
    reader = _reader(subject, asked, advance)
    rows = parity(reader, subject.folder, tasks, asked.protocol)
    scores = [
        Score(task=row.task, depth=depth, metric=row.metric, value=value, stderr=None, items=row.items)
        for row in rows
        for depth, value in (("looplm", row.looplm), ("hf", row.hf), ("furthest answers", row.furthest))
    ]
    return rows, subject.result(Evaluation(settings=_told(subject, reader, asked, tasks), scores=scores))


def _tasks(asked: TaskSettings) -> dict[str, Any]:
    """lm-eval's tasks and ours, by name.

    Raises:
        ValueError: for none, an unknown one, missing data, or examples where there are none.
    """
    if not asked.tasks:
        raise ValueError("name at least one task; `looplm eval tasks` lists them")
    ours = [name for name in asked.tasks if name in OWN]
    if ours and asked.shots:
        raise ValueError(f"{ours[0]} is asked without examples; evaluate it apart from what takes {asked.shots} shots")
    return offline_tasks([n for n in asked.tasks if n not in OWN], asked.data, shots=asked.shots) | own_tasks(ours)


def _reader(subject: Subject, asked: TaskSettings, advance: Advance) -> Reader:
    return Reader(
        model=subject.model, tokenizer=subject.tokenizer, depths=subject.depths, kv=subject.kv,
        batch_size=asked.batch_size, max_length=asked.max_length or subject.max_length, seed=asked.protocol.seed,
        advance=advance,
    )  # fmt: skip


def _told(
    subject: Subject, reader: Reader, asked: TaskSettings, tasks: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """All that decides a score, as plain values."""
    protocol = asked.protocol
    template = reader.tokenizer.chat_template if protocol.chat else None
    groups = {name: tasks_of(name) for name in asked.tasks if name not in OWN}
    return {
        **subject.settings, "start_token": reader.begins, "prefix": reader.prefix,
        "max_length": reader.max_length, "max_gen_toks": reader.max_gen_toks, "limit": protocol.limit,
        "seed": protocol.seed, "chat": protocol.chat, "multiturn": protocol.multiturn, "system": protocol.system,
        "template": None if template is None else digest(str(template)),
        "asked": list(asked.tasks), "tasks": {name: _described(task) for name, task in tasks.items()},
        "lm_eval": version("lm_eval"),
        "groups": {name: list(members) for name, members in groups.items() if members != (name,)},
    }  # fmt: skip


def _described(task: Any) -> dict[str, Any]:
    """A task's version, its shots, and a hash of how it asks and judges."""
    ours = ("custom_dataset", "metadata")  # where this machine has the records and the definition
    config = {key: value for key, value in task.dump_config().items() if key not in ours}
    told = json.dumps(config, default=_source)
    return {"version": task.VERSION, "shots": task.config.num_fewshot or 0, "config": digest(told)}


def _source(value: Any) -> str:
    """What a function or class of a task's definition says, wherever it lies in memory."""
    return inspect.getsource(value) if inspect.isroutine(value) or inspect.isclass(value) else str(value)


def _memo(cache: Path, told: Mapping[str, Any]) -> Memo:
    """Answers depend on the model and how it is read, not on which questions a task asks."""
    kept = (
        "checkpoint", "dtype", "device", "tokenizer", "start_token", "prefix", "end_tokens", "kv", "max_length", "seed",
        "looplm", "torch",
    )  # fmt: skip
    settings = {name: told[name] for name in kept}
    return Memo(settings, cache / f"{digest(json.dumps(settings, sort_keys=True))}.jsonl")


def _group_scores(name: str, members: list[str], items: Items) -> list[Score]:
    """The means over the items of all members, of the metrics that all of them have."""
    found = []
    for depth in items[members[0]]:
        told = [item for member in members for item in items[member][depth]]
        shared = [metric for metric in told[0].metrics if all(metric in item.metrics for item in told)]
        found += averages(name, depth, told, shared)
    return found
