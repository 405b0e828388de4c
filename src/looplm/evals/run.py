"""One evaluation from a checkpoint to a result that says all that decided it."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from looplm.data.tokenizer import fingerprint, load_tokenizer
from looplm.evals.accounting import costs_of
from looplm.evals.benchmarks import offline_tasks
from looplm.evals.depths import Depth, exit_depth, fixed_depths
from looplm.evals.harness import Items, Protocol, evaluate
from looplm.evals.lm import Reader
from looplm.evals.memo import Memo
from looplm.evals.results import Evaluation
from looplm.models import LoopLMConfig, load
from looplm.training.checkpoints import content_hash
from looplm.training.opening import latest_checkpoint


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `looplm eval` is asked.

    loops, exits: the depths; the model's own loops where both are empty · shots: instead of each task's own
    data: a folder of benchmark files · cache: a folder of answers; the others are `Reader`'s and `Protocol`'s.
    """

    model: str
    tasks: tuple[str, ...]
    loops: tuple[int, ...] = ()
    exits: tuple[str, ...] = ()
    kv: str = "full"
    limit: int | None = None
    shots: int | None = None
    chat: bool = False
    multiturn: bool = False
    system: str | None = None
    batch_size: int = 8
    max_length: int | None = None
    data: Path | None = None
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 1234
    cache: Path | None = None


def run_evaluation(settings: Settings) -> Evaluation:
    """Scores of every task at every depth, the items behind them, and what a token cost.

    Raises:
        ValueError: for an unknown task, missing data, a depth that the model cannot do, or an unusable checkpoint.
    """
    protocol = Protocol(
        limit=settings.limit, chat=settings.chat, multiturn=settings.multiturn, system=settings.system,
        seed=settings.seed,
    )  # fmt: skip
    tasks = offline_tasks(settings.tasks, settings.data, shots=settings.shots)
    folder = latest_checkpoint(settings.model)
    reader = _reader(settings, folder)
    told = _told(settings, folder, reader, tasks)
    if settings.cache is not None:
        reader = replace(reader, memo=_memo(settings.cache, told))
    scores, items = evaluate(reader, tasks, protocol)
    return Evaluation(
        settings=told, scores=scores, items=items, costs=_costs(reader.depths, reader.model.config, items)
    )


def table(found: Evaluation) -> list[dict[str, Any]]:
    """A row for each task and metric, a column for each depth; then what a token costs at each."""
    depths = list(dict.fromkeys(score.depth for score in found.scores))
    rows: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for score in found.scores:
        error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
        rows[score.task, score.metric][score.depth] = f"{score.value:.4f}{error}"
    costs = {name for cost in found.costs.values() for name in cost}
    return [
        *({"task": task, "metric": metric} | {depth: row.get(depth, "") for depth in depths}
          for (task, metric), row in rows.items()),
        *({"task": "", "metric": name} | {depth: f"{found.costs[depth].get(name, 0):.4g}" for depth in depths}
          for name in sorted(costs)),
    ]  # fmt: skip


def _reader(settings: Settings, folder: Path) -> Reader:
    model = load(folder, dtype=settings.dtype, device=settings.device)
    loops = settings.loops if settings.loops or settings.exits else (model.config.loops,)
    depths = [*fixed_depths(loops), *(exit_depth(rule, model.config) for rule in settings.exits)]
    return Reader(
        model=model, tokenizer=load_tokenizer(folder), depths=depths, kv=settings.kv, batch_size=settings.batch_size,
        max_length=settings.max_length or model.config.max_position_embeddings, seed=settings.seed,
    )  # fmt: skip


def _told(settings: Settings, folder: Path, reader: Reader, tasks: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a score, as plain values."""
    template = reader.tokenizer.chat_template if settings.chat else None
    return {
        "model": settings.model, "checkpoint": content_hash(folder), "dtype": settings.dtype,
        "tokenizer": fingerprint(reader.tokenizer), "start_token": reader.begins, "prefix": reader.prefix,
        "kv": settings.kv, "max_length": reader.max_length, "max_gen_toks": reader.max_gen_toks,
        "limit": settings.limit, "seed": settings.seed, "chat": settings.chat, "multiturn": settings.multiturn,
        "system": settings.system, "template": None if template is None else _digest(str(template)),
        "tasks": {name: _described(task) for name, task in tasks.items()}, "lm_eval": version("lm_eval"),
        "looplm": version("looplm"), "torch": version("torch"),
    }  # fmt: skip


def _described(task: Any) -> dict[str, Any]:
    """A task's version, its shots, and a hash of how it asks and judges."""
    config = {key: str(value) for key, value in task.dump_config().items() if key != "custom_dataset"}
    return {"version": task.VERSION, "shots": task.config.num_fewshot or 0, "config": _digest(json.dumps(config))}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _memo(cache: Path, told: Mapping[str, Any]) -> Memo:
    """Answers depend on the model and how it is read, not on which questions a task asks."""
    kept = ("checkpoint", "dtype", "tokenizer", "start_token", "prefix", "kv", "max_length", "seed")
    settings = {name: told[name] for name in kept}
    return Memo(settings, cache / f"{_digest(json.dumps(settings, sort_keys=True))}.jsonl")


def _costs(depths: Sequence[Depth], config: LoopLMConfig, items: Items) -> dict[str, dict[str, float]]:
    """What a token costs at each depth; under an exit rule by the loops that the items' tokens did."""
    return {depth.name: _cost(depth, config, items) for depth in depths}


def _cost(depth: Depth, config: LoopLMConfig, items: Items) -> dict[str, float]:
    if depth.fixed:
        return costs_of(config, depth.loops)
    counted = [(item.loops, item.tokens or 1) for told in items.values() for item in told[depth.name] if item.loops]
    tokens = sum(count for _, count in counted)
    mean = sum(loops * count for loops, count in counted) / tokens
    below = int(mean)  # FLOPs are linear in loops, so a mean costs what its two neighbours do in these shares
    return costs_of(config, {below: below + 1 - mean, below + 1: mean - below})
