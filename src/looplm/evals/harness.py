"""lm-eval's tasks at every depth of a model, with the items behind each score."""

from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate as run_tasks

from looplm.evals.lm import LoopLM, Reader
from looplm.evals.results import NATS, Item, Score

_BOOTSTRAPS = 1000  # only for metrics whose standard error has no formula
_PERPLEXITY = "perplexity"  # so lm-eval calls an item's log-likelihood, too


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How questions are put.

    limit: items of a task, the first · chat: through the tokenizer's chat template, few-shot examples as earlier turns
    if `multiturn` · system: a turn before all · seed: of the choice of few-shot examples, the same at every depth.
    """

    limit: int | None = None
    chat: bool = False
    multiturn: bool = False
    system: str | None = None
    seed: int = 1234  # lm-eval's own

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1; leave it out for all items")
        if self.multiturn and not self.chat:
            raise ValueError("multiturn writes examples as turns of a chat; set chat, too")


Items = dict[str, dict[str, list[Item]]]


def evaluate(reader: Reader, tasks: Mapping[str, Any], protocol: Protocol) -> tuple[list[Score], Items]:
    """The scores of lm-eval `tasks` (objects by name) at every depth of `reader`, and their items by task and depth.

    Log-likelihoods at all depths come of one forward; generation runs once a depth.
    """
    scores: list[Score] = []
    items: Items = {name: {} for name in tasks}
    lm = LoopLM(reader)
    for depth in reader.depths:
        view = lm.at(depth)
        found = run_at(view, tasks, protocol)
        for name in tasks:
            samples = found["samples"][name]
            scores += _scores(name, depth.name, found["results"][name], _count(samples))
            items[name][depth.name] = _items(view, name, samples)
    return scores, items


def run_at(lm: LM, tasks: Mapping[str, Any], protocol: Protocol) -> Mapping[str, Any]:
    """What lm-eval finds of one model, samples included; the same few-shot examples however often it is asked."""
    for task in tasks.values():
        task.set_fewshot_seed(protocol.seed)
    with redirect_stdout(None):  # it says there which metrics it resamples
        found = run_tasks(
            lm, dict(tasks), limit=protocol.limit, bootstrap_iters=_BOOTSTRAPS, apply_chat_template=protocol.chat,
            fewshot_as_multiturn=protocol.multiturn, system_instruction=protocol.system,
        )  # fmt: skip
    assert found is not None
    return found


def _scores(task: str, depth: str, results: Mapping[str, Any], count: int) -> list[Score]:
    values = {key: value for key, value in results.items() if isinstance(value, float | int) and "," in key}
    errors = {key.replace("_stderr,", ",", 1): value for key, value in values.items() if "_stderr," in key}
    return [
        Score(task=task, depth=depth, metric=_named(key), value=float(value), stderr=errors.get(key), items=count)
        for key, value in values.items()
        if "_stderr," not in key
    ]


def _named(key: str) -> str:
    """lm-eval's "metric,filter"; without the filter where there is none."""
    return key.removesuffix(",none")


def _count(samples: Sequence[Mapping[str, Any]]) -> int:
    return len({sample["doc_id"] for sample in samples})


def _items(lm: LoopLM, task: str, samples: Sequence[Mapping[str, Any]]) -> list[Item]:
    """One for each question, whatever filters its answer went through."""
    found: dict[str, Item] = {}
    for sample in samples:
        key = f"{sample['doc_id']}-{sample['doc_hash'][:8]}"
        metrics = dict(found[key].metrics) if key in found else {}
        for name in sample["metrics"]:
            if isinstance(value := sample[name], bool | int | float):
                mark = (NATS, -value) if name == _PERPLEXITY else (_named(f"{name},{sample['filter']}"), float(value))
                metrics |= [mark]
        found[key] = Item(id=key, metrics=metrics, **asdict(lm.effort(task, sample["doc_id"])))
    return list(found.values())
