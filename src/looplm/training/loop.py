"""The flat training loop: schedule, forward, objective, backward, clip, step, log, evaluate, save."""

import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from looplm.models import LoopLMForCausalLM
from looplm.objectives import ExpectedLoss, GateRegression
from looplm.training.depth import Depth
from looplm.training.evaluate import held_out_losses
from looplm.training.logs import RunLog, StepProgress
from looplm.training.mixture import Mixture
from looplm.training.recipe import Optimizer, Recipe


class ObjectiveModule(nn.Module):
    """Model and objective as one module, so that a wrapper (DDP, FSDP) sees every use of a parameter."""

    def __init__(self, model: LoopLMForCausalLM, objective: ExpectedLoss | GateRegression) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: dict[str, Tensor], depth: Depth) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective's loss and metrics on `batch` at a depth."""
        trace = self.model.model(
            batch["input_ids"],
            position_ids=batch["position_ids"],
            loops=depth.loops,
            keep_loops="all",
            use_cache=False,
            grad_loops=depth.grad_loops,
        )
        return self.objective(self.model, trace, batch)


def build_optimizer(module: ObjectiveModule, settings: Optimizer) -> AdamW:
    """AdamW over the parameters that the objective trains; the others are frozen."""
    decayed, plain = [], []
    for name, parameter in module.model.named_parameters():
        parameter.requires_grad_(module.objective.trains(name))
        if parameter.requires_grad:
            (decayed if parameter.ndim > 1 else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def run_steps(
    recipe: Recipe, module: ObjectiveModule, optimizer: AdamW, data: Mixture, start: int, log: RunLog,
    progress: StepProgress, save: Callable[[int], object],
) -> int:  # fmt: skip
    """Train from step `start` to the recipe's last; the number of steps done, fewer after an interrupt."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held_out = data.held_out()
    step = start
    with interrupt_requested() as stop:
        while step < recipe.steps and not stop():
            began = time.perf_counter()
            rate = recipe.optimizer.lr * recipe.schedule.factor(step, recipe.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch = data.train(recipe.seed, step)
            depth = recipe.depth_at(step)
            loss, metrics = module(batch, depth)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = clip_grad_norm_(parameters, recipe.clip_norm)
            if not torch.isfinite(norm):
                raise ValueError(f"the gradient is not finite at step {step}; lower optimizer.lr (now {rate:g})")
            optimizer.step()
            step += 1
            if step % recipe.log_every == 0 or step == recipe.steps:
                values = {"loss": loss.item(), "lr": rate, "grad_norm": norm.item(), "loops": depth.loops}
                values |= {name: value.item() for name, value in metrics.items()}
                seconds = time.perf_counter() - began
                log.write(step, values | {"tokens_per_second": batch["input_ids"].numel() / seconds})
            if step % recipe.evaluate_every == 0 or step == recipe.steps:
                log.write(step, held_out_losses(module.model, held_out, 2 * recipe.loops))
            if step % recipe.save_every == 0 or step == recipe.steps:
                save(step)
            progress.advance(step, f"loss {loss.item():.3f}")
    if step < recipe.steps and step % recipe.save_every:
        save(step)
    return step


@contextmanager
def interrupt_requested() -> Generator[Callable[[], bool]]:
    """Inside, Ctrl-C asks the loop to stop after its step; a second Ctrl-C stops at once."""
    requested = False

    def note(*_: object) -> None:
        nonlocal requested
        requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        previous = signal.signal(signal.SIGINT, note)
    except ValueError:  # signals belong to the main thread; elsewhere nobody presses Ctrl-C
        yield lambda: False
        return
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGINT, previous)
