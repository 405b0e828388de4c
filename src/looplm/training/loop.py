"""The flat training loop: data, schedule, forward, objective, backward, clip, step, log, evaluate, save."""

import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from looplm.training.checkpoints import Live, Progress
from looplm.training.depth import DepthSchedule
from looplm.training.distribution import World, without_sync
from looplm.training.eight_bit import compiling_in_one_line
from looplm.training.loader import StepBatch, StepLoader, step_weights
from looplm.training.logs import Log, StepProgress
from looplm.training.module import MetricSums, depth_groups
from looplm.training.monitors import NonFiniteGuard
from looplm.training.recipe import Recipe
from looplm.training.reporting import Reporter
from looplm.training.sharded import whole


@dataclass(frozen=True, kw_only=True)
class Session:
    """The parts of a run that its loop puts to work; `wrapped` is `live.module` under DDP or FSDP2."""

    recipe: Recipe
    steps: int
    world: World
    live: Live
    wrapped: nn.Module
    depth: DepthSchedule
    guard: NonFiniteGuard
    reporter: Reporter


def run_steps(
    session: Session, loader: StepLoader, start: Progress, log: Log, progress: StepProgress,
    save: Callable[[Progress], object],
) -> int:  # fmt: skip
    """Train from where `start` stands to the last step; the number of steps done, fewer after an interrupt."""
    recipe, live, world = session.recipe, session.live, session.world
    done, saved = start, start.step
    with interrupt_requested() as interrupted:
        began = time.perf_counter()
        for batch in loader:
            factor = set_rates(live, recipe.schedule.factor(done.step, session.steps))
            loss, metrics = accumulate(session, batch, done.step)
            norms = session.reporter.gradient_norms() if due(done.step + 1, recipe.log_every, session.steps) else {}
            norm = clip_grad_norm_(live.trained(), recipe.clip_norm)
            if admitted(session, float(whole(norm)), done, saved, save):
                update(live)
            if live.module.stability is not None:
                live.module.stability.end_step(world.sum)
            done = replace(done, step=done.step + 1, counts=batch.counts, guard=session.guard.state_dict())
            total, stop = world.sum(torch.tensor([loss.item(), float(interrupted())], dtype=torch.float64)).tolist()
            if due(done.step, recipe.log_every, session.steps):
                values = {"loss": total, "lr_factor": factor, "grad_norm": float(whole(norm))} | norms
                seconds = time.perf_counter() - began
                session.reporter.tell(
                    log, done.step, values | session.reporter.step(batch, metrics, done.step - 1, seconds)
                )
            if due(done.step, recipe.evaluate_every, session.steps):
                session.reporter.tell(log, done.step, session.reporter.evaluation(), of="held out")
            if due(done.step, recipe.save_every, session.steps) or stop:
                save(done)
                saved = done.step
            progress.advance(done.step, f"loss {total:.3f}")
            if stop:
                break
            began = time.perf_counter()
    assert saved == done.step or done.step == start.step
    return done.step


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and at the last, happens after `step` steps."""
    return step % every == 0 or step == last


def accumulate(session: Session, batch: StepBatch, step: int) -> tuple[Tensor, MetricSums]:
    """The gradient of a whole step in its parameters; the process's share of the loss, and of the metrics."""
    recipe, live, world = session.recipe, session.live, session.world
    micro_batches = step_weights(batch.micro_batches, recipe.data, world.sum)
    total, metrics = torch.zeros((), dtype=torch.float64, device=world.device), MetricSums()
    clear_gradients(live)
    for index, (rows, micro_batch) in enumerate(zip(batch.spans, micro_batches, strict=True)):
        own = {name: value.to(world.device, non_blocking=True) for name, value in micro_batch.items()}
        groups = depth_groups(session.depth, recipe.seed, step, index, rows, own)
        with without_sync(session.wrapped, last=index == len(micro_batches) - 1):
            loss, found = session.wrapped(groups, step)
            (loss * world.size).backward()  # the wrapper averages over processes, and weights sum to 1 over all of them
        total += loss.detach()
        for part, mass in found:
            metrics.add(part, mass)
    complete_gradients(live)
    return total, metrics


def clear_gradients(live: Live) -> None:
    """Before a step's first backward pass."""
    for optimizer in live.optimizers:
        optimizer.zero_grad(set_to_none=True)


def complete_gradients(live: Live) -> None:
    """A zero for what no pass of the step reached, so that all numbers of processes agree."""
    for parameter in live.trained():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def set_rates(live: Live, factor: float) -> float:
    """Every group's rate at this point of the schedule."""
    for optimizer in live.optimizers:
        for group in optimizer.param_groups:
            rate = group["base_lr"] * factor
            if isinstance(group["lr"], Tensor):  # what a compiled step reads
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
    return factor


def admitted(session: Session, norm: float, done: Progress, saved: int, save: Callable[[Progress], object]) -> bool:
    """Whether the step's gradient is to be used; where the run must stop for it, what was reached is saved first."""
    try:
        return session.guard.admits(norm, done.step)
    except ValueError as error:
        if not saved and session.guard.skipped > done.step:
            raise  # no step has moved a weight: there is nothing to keep, and the folder is free for another recipe
        save(done)
        out = session.recipe.out
        raise ValueError(f"{error} under another out=; init_from={out} starts it from step {done.step}") from error


def update(live: Live) -> None:
    """One step of every optimiser, and of what follows the weights."""
    with compiling_in_one_line():
        for optimizer in live.optimizers:
            optimizer.step()
    if live.ema is not None:
        live.ema.update(live.model)


@contextmanager
def interrupt_requested() -> Generator[Callable[[], bool]]:
    """Inside, Ctrl-C or a scheduler's SIGTERM asks the loop to save after its step; a second one stops at once."""
    requested = False

    def note(number: int, _: object) -> None:
        nonlocal requested
        requested = True
        signal.signal(number, previous[number])

    previous: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, note)
    except ValueError:  # signals belong to the main thread; elsewhere nobody presses Ctrl-C
        yield lambda: False
        return
    try:
        yield lambda: requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
