"""One run from recipe to checkpoint: build or resume, train, leave a folder that says what was done."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from looplm.data.text import read_documents
from looplm.data.tokenizer import load_tokenizer, train_tokenizer
from looplm.models import LoopLMConfig, LoopLMForCausalLM, load
from looplm.training.checkpoints import complete_checkpoints, restore, save_checkpoint
from looplm.training.logs import RunLog, StepProgress
from looplm.training.loop import ObjectiveModule, build_optimizer, run_steps
from looplm.training.mixture import Mixture
from looplm.training.recipe import Recipe, resolved


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Where a run stands: its newest checkpoint and how many steps are done of how many."""

    checkpoint: Path
    step: int
    steps: int

    @property
    def finished(self) -> bool:
        """Whether every step was done."""
        return self.step == self.steps


def train(recipe: Recipe, console: Console | None = None, title: str = "train") -> RunResult:
    """Run `recipe`, or resume it bit for bit where its folder already holds a checkpoint of the same recipe.

    Raises:
        ValueError: if the folder belongs to another recipe, or the recipe's model, text or checkpoint is unusable;
            nothing is written then.
    """
    folder = Path(recipe.out)
    _refuse_another(folder, resolved(recipe))
    done = complete_checkpoints(folder / "checkpoints")
    model, tokenizer = _open(done[-1]) if done else _start(recipe)
    recipe.objective.check_model(model.config)
    module = ObjectiveModule(model.train(), recipe.objective)
    optimizer = build_optimizer(module, recipe.optimizer)
    start = restore(done[-1], model, optimizer) if done else 0
    if start == recipe.steps:
        return RunResult(checkpoint=done[-1], step=start, steps=recipe.steps)
    data = Mixture(recipe.data, tokenizer)
    _claim(folder, resolved(recipe))
    log = RunLog(folder, start)

    def save(step: int) -> Path:
        return save_checkpoint(folder / "checkpoints", step, model, tokenizer, optimizer, recipe.keep_checkpoints)

    try:
        with StepProgress(title, recipe.steps, start, console or Console(stderr=True)) as progress:
            step = run_steps(recipe, module, optimizer, data, start, log, progress, save)
    finally:
        log.close()
    return RunResult(checkpoint=complete_checkpoints(folder / "checkpoints")[-1], step=step, steps=recipe.steps)


def _refuse_another(folder: Path, recipe: dict[str, Any]) -> None:
    held = folder / "recipe.json"
    if not held.exists():
        return
    try:
        before = json.loads(held.read_text())
    except ValueError as error:
        raise ValueError(f"{held} is damaged; remove {folder} or give another out=") from error
    before["out"] = recipe["out"]  # the same folder by another path is the same run
    if before != recipe:
        changed = _first_difference(before, recipe)
        raise ValueError(f"{folder} holds a run of another recipe ({changed} differs); give another out= or remove it")


def _claim(folder: Path, recipe: dict[str, Any]) -> None:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    held = folder / "recipe.json"
    if not held.exists():
        aside = held.with_suffix(".partial")
        aside.write_text(json.dumps(recipe, indent=2) + "\n")
        os.replace(aside, held)


def _first_difference(before: Any, now: Any, where: str = "") -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(key for key in sorted({*before, *now}) if before.get(key) != now.get(key))
        return _first_difference(before.get(key), now.get(key), f"{where}.{key}".lstrip("."))
    return where


def _open(checkpoint: Path) -> tuple[LoopLMForCausalLM, PreTrainedTokenizerFast]:
    return load(checkpoint), load_tokenizer(checkpoint)


def _start(recipe: Recipe) -> tuple[LoopLMForCausalLM, PreTrainedTokenizerFast]:
    if recipe.init_from is not None:
        return _open(latest_checkpoint(recipe.init_from))
    tokenizer = _new_tokenizer(recipe)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(recipe.seed)
    defaults = {"loops": recipe.loops, **ids}
    values: dict[str, Any] = defaults | (recipe.model or {}) | {"vocab_size": len(tokenizer)}
    return LoopLMForCausalLM(LoopLMConfig(**values)), tokenizer


def _new_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    documents = read_documents(recipe.data.text.path) if recipe.data.text else []
    words = recipe.data.compose.task.words() if recipe.data.compose else []
    return train_tokenizer(documents, recipe.vocab_size, words)


def latest_checkpoint(path: str | Path) -> Path:
    """`path` itself if it is a checkpoint, else the newest complete checkpoint of the run folder `path`."""
    path = Path(path)
    if (path / "config.json").exists():
        return path
    done = complete_checkpoints(path / "checkpoints")
    if not done:
        raise ValueError(f"'{path}' is neither a checkpoint nor a run with a complete one")
    return done[-1]
