"""One run from recipe to checkpoint: build or resume, train, leave a folder that says what was done."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from looplm.data.chat import ChatRows
from looplm.training.averaging import Ema
from looplm.training.checkpoints import (
    Live,
    Progress,
    complete_checkpoints,
    read_progress,
    restore,
    save_checkpoint,
    seed_process,
)
from looplm.training.distribution import World, distribute, open_world
from looplm.training.loader import StepLoader
from looplm.training.logs import RunLog, SilentLog, StepProgress
from looplm.training.loop import Session, run_steps
from looplm.training.mixture import Mixture
from looplm.training.module import ObjectiveModule
from looplm.training.monitors import NonFiniteGuard
from looplm.training.opening import Opened, open_run, trained
from looplm.training.optimizers import build_optimizers
from looplm.training.recipe import Recipe, resolved
from looplm.training.reporting import Reporter


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
    """Run `recipe`, or resume it where its folder already holds a checkpoint of the same recipe.

    Under torchrun every process calls this alike. On CPU a resumed run equals the uninterrupted one bit for bit if the
    number of processes is the same, and to rounding if it is not.

    Raises:
        ValueError: if the folder belongs to another recipe, or the recipe's model, text or checkpoint is unusable;
            nothing is written then.
    """
    folder = Path(recipe.out)
    world = open_world()
    _refuse_another(folder, resolved(recipe))
    done = complete_checkpoints(folder / "checkpoints")
    if done and read_progress(done[-1]).step == recipe.steps:
        return RunResult(checkpoint=done[-1], step=recipe.steps, steps=recipe.steps)  # neither model nor text is needed
    opened = open_run(recipe, done[-1] if done else None)
    data = Mixture(recipe.data, opened.tokenizer, recipe.seed)
    steps = recipe.steps or data.steps_in_epochs(recipe.epochs or 1)
    world.wait()  # nobody writes before everybody has looked
    session = _session(recipe, opened, data, steps, world)
    seed_process(recipe.seed, read_progress(done[-1]).step if done else 0, world)
    start = restore(done[-1], session.live, world) if done else Progress()
    session.guard.load_state_dict(start.guard)
    if start.step < steps:
        step = _run(session, opened, data, start, folder, console or Console(stderr=True), title)
    else:
        step = start.step
    return RunResult(checkpoint=complete_checkpoints(folder / "checkpoints")[-1], step=step, steps=steps)


def _session(recipe: Recipe, opened: Opened, data: Mixture, steps: int, world: World) -> Session:
    model = opened.model
    autocast = torch.bfloat16 if recipe.precision == "bfloat16" else None
    module = ObjectiveModule(model, recipe.objective, recipe.stability, autocast)
    wrapped = distribute(module, recipe.parallel, world)
    optimizers = build_optimizers(model, recipe.optimizer, lambda name: trained(recipe, name))
    ema = None if recipe.ema is None else Ema(model, recipe.ema)
    live = Live(module=module, optimizers=optimizers, ema=ema, lora=recipe.lora)
    depth = recipe.depth_schedule(model.config.loops)
    guard = NonFiniteGuard(recipe.nonfinite)
    return Session(
        recipe=recipe, steps=steps, world=world, live=live, wrapped=wrapped, depth=depth,
        guard=guard, reporter=Reporter(recipe, live, depth, data.held_out(), guard, world),
    )  # fmt: skip


def _run(
    session: Session, opened: Opened, data: Mixture, start: Progress, folder: Path, console: Console, title: str
) -> int:
    recipe, world = session.recipe, session.world
    if world.leads:
        _claim(folder, resolved(recipe))
    loader = StepLoader(
        data,
        start.counts,
        start.step,
        session.steps,
        rank=world.rank,
        world=world.size,
        micro_rows=recipe.micro_rows,
        epochs=recipe.epochs,
    )
    log = RunLog(folder, start.step, console) if world.leads else SilentLog()
    if dropped := _dropped(data):
        log.write(start.step, dropped)

    def save(progress: Progress) -> Path:
        return save_checkpoint(
            folder / "checkpoints", session.live, progress, opened.tokenizer, recipe.keep_checkpoints, world
        )

    try:
        with StepProgress(title, session.steps, start.step, console if world.leads else Console(quiet=True)) as bar:
            return run_steps(session, loader, start, log, bar, save)
    finally:
        log.close()


def _dropped(data: Mixture) -> dict[str, float]:
    """How many conversations of each chat source were too long for a row, left out or cut."""
    chats = {name: source for name, source in data.sources.items() if isinstance(source, ChatRows)}
    counted = {
        f"{what}/{name}": getattr(source, what) for name, source in chats.items() for what in ("dropped", "truncated")
    }
    return {name: count for name, count in counted.items() if count}


def _refuse_another(folder: Path, recipe: dict[str, Any]) -> None:
    held = folder / "recipe.json"
    if not held.exists():
        return
    try:
        before = json.loads(held.read_text())
    except ValueError as error:
        raise ValueError(f"{held} is damaged; remove {folder} or give another out=") from error
    before = before | {name: recipe[name] for name in _NOT_THE_RUN}
    if before != recipe:
        changed = _first_difference(before, recipe)
        raise ValueError(f"{folder} holds a run of another recipe ({changed} differs); give another out= or remove it")


# The same folder by another path is the same run, and these decide memory and speed alone.
_NOT_THE_RUN = ("out", "micro_rows", "checkpointing", "parallel")


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
