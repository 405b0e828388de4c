"""One run from recipe to checkpoint: build or resume, train, leave a folder that says what was done."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

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
from looplm.training.opening import Opened, is_trained, open_run
from looplm.training.optimizers import build_optimizers
from looplm.training.recipe import Recipe, RunSettings
from looplm.training.reporting import Reporter
from looplm.training.run_folder import alone_in, claim, refuse_another


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
    folder, world = Path(recipe.out), open_world()
    finished = finished_run(recipe, folder)
    if finished is not None:
        return finished
    with alone_in(folder, world):
        return _train(recipe, folder, world, console or Console(stderr=True), title)


def finished_run(recipe: RunSettings, folder: Path) -> RunResult | None:
    """The run of `recipe` in `folder` if it is done; neither model nor text is needed then."""
    refuse_another(folder, recipe)
    done = complete_checkpoints(folder / "checkpoints")
    if not done or recipe.steps is None or read_progress(done[-1]).step != recipe.steps:
        return None
    return RunResult(checkpoint=done[-1], step=recipe.steps, steps=recipe.steps)


def _train(recipe: Recipe, folder: Path, world: World, console: Console, title: str) -> RunResult:
    refuse_another(folder, recipe)  # again, now that nobody else can claim it
    done = complete_checkpoints(folder / "checkpoints")
    start = read_progress(done[-1]) if done else Progress()
    opened = open_run(recipe, done[-1] if done else None, start.base)
    data = Mixture(recipe.data, opened.tokenizer, recipe.seed)
    start = replace(start, rows=_same_rows(data, start.rows, folder), base=opened.base)
    steps = recipe.steps or data.steps_in_epochs(recipe.epochs or 1)
    if start.step > steps:
        raise ValueError(f"{folder} holds {start.step} steps already, more than steps={steps}; give another out=")
    world.wait()  # nobody writes before everybody has looked
    session = _session(recipe, opened, data, steps, world)
    seed_process(recipe.seed, start.step, world)
    if done:
        restore(done[-1], session.live, world)
    session.guard.load_state_dict(start.guard)
    step = _run(session, opened, data, start, folder, console, title) if start.step < steps else steps
    return RunResult(checkpoint=complete_checkpoints(folder / "checkpoints")[-1], step=step, steps=steps)


def _session(recipe: Recipe, opened: Opened, data: Mixture, steps: int, world: World) -> Session:
    model = opened.model
    autocast = torch.bfloat16 if recipe.precision == "bfloat16" else None
    module = ObjectiveModule(model, recipe.objective, recipe.stability, autocast)
    wrapped = distribute(module, recipe.parallel, world)
    optimizers = build_optimizers(
        model, recipe.optimizer, lambda name: is_trained(recipe, name, recipe.objective.trains)
    )
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
    world.led(lambda: claim(folder, recipe))
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
    if start.step == 0 and (dropped := _dropped(data)):
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


def _same_rows(data: Mixture, before: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The fingerprints of the sources, which must be those from `before`, if the run has any."""
    found = data.fingerprints()
    for name, stored in before.items():
        if found[name] != stored:
            raise ValueError(
                f"data.sources.{name} does not give the rows any more that the run in {folder} learns from; "
                f"put its data back, or start another out= with init_from={folder}"
            )
    return found


def _dropped(data: Mixture) -> dict[str, float]:
    """How many conversations of each chat source were too long for a row, left out or cut."""
    chats = {name: source for name, source in data.sources.items() if isinstance(source, ChatRows)}
    counted = {
        f"{what}/{name}": getattr(source, what) for name, source in chats.items() for what in ("dropped", "truncated")
    }
    return {name: count for name, count in counted.items() if count}
