"""The flat loop of reinforcement learning: sample, mark, compare, then update; log, evaluate, save."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from looplm.models import LoopLMForCausalLM
from looplm.rl.batches import Scored, count, padded, weights
from looplm.rl.collect import Collector, Experience
from looplm.rl.diary import Diary
from looplm.rl.module import PolicyModule, emitted_logprobs, simulated_exits
from looplm.rl.recipe import RLRecipe
from looplm.rl.rollouts import drift_found
from looplm.training.checkpoints import Live, Progress
from looplm.training.distribution import World, without_sync
from looplm.training.logs import StepProgress
from looplm.training.loop import clear_gradients, complete_gradients, due, interrupt_requested, set_rates, update
from looplm.training.module import MetricSums
from looplm.training.monitors import NonFiniteGuard
from looplm.training.sharded import whole

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Session:
    """The parts of a run that its loop puts to work.

    wrapped: `live.module` under DDP · reference: opens the model as it was before the run, for a KL term
    loops: the depth of prompts, and the most that a token does.
    """

    recipe: RLRecipe
    world: World
    live: Live
    wrapped: nn.Module
    reference: Callable[[], AbstractContextManager[LoopLMForCausalLM]]
    collector: Collector
    guard: NonFiniteGuard
    diary: Diary
    loops: int
    pad: int

    @property
    def module(self) -> PolicyModule:
        """The policy under its objective."""
        assert isinstance(self.live.module, PolicyModule)
        return self.live.module


def run_steps(
    session: Session, start: Progress, progress: StepProgress, save: Callable[[Progress], object]
) -> int:  # fmt: skip
    """Train from where `start` stands to the last step; the number of steps done, fewer after an interrupt.

    Raises:
        ValueError: where the run must stop; what was reached is saved first.
    """
    recipe, done = session.recipe, start
    with interrupt_requested() as interrupted:
        while done.step < recipe.steps:
            with _saved_on_failure(recipe, start, done, save):
                done = _step(session, done)
            stop = bool(session.world.sum(torch.tensor(float(interrupted()))).item())
            if due(done.step, recipe.save_every, recipe.steps) or stop:
                save(done)
            if due(done.step, recipe.evaluate_every, recipe.steps):
                with _saved_on_failure(recipe, start, done, save):
                    session.world.each(partial(session.diary.evaluation, done.step))
            progress.advance(done.step, f"reward {session.diary.reward:.3f}")
            if stop:
                break
    return done.step


@contextmanager
def _saved_on_failure(
    recipe: RLRecipe, start: Progress, done: Progress, save: Callable[[Progress], object]
) -> Generator[None]:  # fmt: skip
    """Inside, what ends the run on every process ends it with the steps `done` saved, if it took any since `start`.

    A step that fails between two of its updates leaves the former in what is saved.
    """
    try:
        yield
    except ValueError as error:
        if done.step == start.step:
            raise
        save(done)
        raise ValueError(
            f"{error}; step {done.step} is saved: the same command resumes, and init_from={recipe.out} starts from it"
        ) from error


def _step(session: Session, done: Progress) -> Progress:
    """Sample, learn, tell; where the run stands then."""
    recipe, live = session.recipe, session.live
    began = time.perf_counter()
    factor = set_rates(live, recipe.schedule.factor(done.step, recipe.steps))
    live.model.eval()
    experience = session.collector.collect(done.step)
    sampled = time.perf_counter()
    live.model.train()
    metrics = learn(session, experience, done.step)
    session.collector.source.weights_changed()
    done = replace(done, step=done.step + 1, guard=session.guard.state_dict())
    if due(done.step, recipe.log_every, recipe.steps):
        seconds = {"seconds_sampling": sampled - began, "seconds_learning": time.perf_counter() - sampled}
        session.diary.step(done.step, experience, metrics, {"lr_factor": factor} | seconds)
    return done


def learn(session: Session, experience: Experience, step: int) -> dict[str, float]:
    """All updates on a step's completions; what they say of the policy, over all of them and all processes.

    `sampler_drift` is of the first alone: `ratio_drift` before any weight has moved.
    """
    scored, cuts = experience.scored, session.recipe.minibatches
    parts = [
        _prepared(
            session,
            [one for group in scored[len(scored) * part // cuts : len(scored) * (part + 1) // cuts] for one in group],
        )
        for part in range(cuts)
    ]
    sums, norms, drift, taken = MetricSums(), [], {}, 0
    for part in [part for part in parts if part.rows] * session.recipe.epochs:
        norms.append(_gradient(session, part, sums))
        if not drift:
            drift = {"sampler_drift": _accepted_drift(session, sums, step)}
        if session.guard.admits(norms[-1], step):
            update(session.live)
            taken += 1
    norm = sum(norms) / max(1, len(norms))
    return sums.means(session.world.sum) | drift | {"grad_norm": norm, "updates": float(taken)}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The rows of one update on this process as micro-batches, and how many rows all processes learn from."""

    micro_batches: list[Batch]
    rows: float


def _prepared(session: Session, scored: Sequence[Scored]) -> _Part:
    """Micro-batches of rows of like length, with all that the objective asks of the policy as it is now."""
    recipe, world = session.recipe, session.world
    counts = count(scored, world.sum)
    # Without a pull to the reference a completion of advantage 0 moves nothing, though means count it.
    taught = [one for one in scored if one.counts and one.rollout.token_ids and (one.advantage or recipe.objective.kl)]
    taught.sort(key=lambda one: len(one.rollout.prompt_ids) + len(one.rollout.token_ids), reverse=True)
    size = recipe.micro_rows or max(1, len(taught))
    cuts = [taught[first : first + size] for first in range(0, max(1, len(taught)), size)]
    batches = [padded(rows, session.pad, recipe.sampling.kv == "recomputed") for rows in cuts]
    for batch in batches:
        batch["weights"] = weights(batch, recipe.mean, counts, recipe.sampling.max_tokens)
    ready = [_asked(session, {name: value.to(world.device) for name, value in batch.items()}) for batch in batches]
    return _Part(micro_batches=ready, rows=world.sum(torch.tensor(float(len(taught)))).item())


def _asked(session: Session, batch: Batch) -> Batch:
    """`batch` with what the reference says of it, and the gate that sampled."""
    recipe, module = session.recipe, session.module
    if recipe.simulated_exit is not None:
        batch |= simulated_exits(module.model, batch, session.loops, recipe.simulated_exit)
    if recipe.objective.kl:
        with session.reference() as model:
            batch["reference"] = emitted_logprobs(model, batch, session.loops, module.objective)
    if recipe.asks_old_gate or recipe.objective.learn_exits:
        log_pdf = batch["exit_log_pdf"] = module.of_gate(batch, session.loops)
        if recipe.objective.learn_exits:
            batch["sampled"] = batch["sampled"] + log_pdf.gather(-1, batch["exits"][..., None] - 1).squeeze(-1)
    return batch


def _gradient(session: Session, part: _Part, sums: MetricSums) -> float:
    """The gradient of one update in its parameters, clipped; its norm before."""
    live, world = session.live, session.world
    clear_gradients(live)
    for index, batch in enumerate(part.micro_batches):
        with without_sync(session.wrapped, last=index == len(part.micro_batches) - 1):
            loss, found = session.wrapped(batch, session.loops)
            (loss * world.size).backward()  # the wrapper averages over processes; weights sum to 1 over all of them
        sums.add({"loss": loss.detach()}, batch["weights"].sum())
        for metrics, mass in found:
            sums.add(metrics, mass)
    complete_gradients(live)
    return float(whole(clip_grad_norm_(live.trained(), session.recipe.clip_norm)))


def _accepted_drift(session: Session, sums: MetricSums, step: int) -> float:
    """How far the policy before its first update lies from the one that sampled; too far stops the run."""
    drift = sums.means(session.world.sum)["ratio_drift"]
    if session.recipe.simulated_exit is None and not drift <= session.recipe.max_drift:
        raise ValueError(f"step {step}: {drift_found(drift, session.recipe.max_drift)}")
    return drift
