"""What a run is watched by: numbers of the trajectory and the gradient, alarms by name, non-finite steps, speed."""

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from looplm.analysis.collapse import token_correlation
from looplm.models import LoopLMConfig, LoopLMForCausalLM, Trace
from looplm.models.accounting import flops_by_part
from looplm.models.exits import exit_log_pdf
from looplm.models.precision import at_least_float32
from looplm.objectives.targets import Metrics
from looplm.training.sharded import whole

_PARTS = {
    "embed_tokens": "embed", "embed_positions": "embed", "loop_embedding": "injection", "exit_gate": "gate",
    "lm_head": "head",
}  # fmt: skip


# The trajectory and the gradient ------------------------------------------------------------------------------


@torch.no_grad()
def observe(model: LoopLMForCausalLM, trace: Trace, real: Tensor) -> list[tuple[Metrics, Tensor]]:
    """Numbers of the kept states and the gate logits of `trace`: sums over the tokens that `real` [B, S] names, with
    the number that each was summed over. Means of them are

    state_norm_loop{t}  ||h_t||
    step_ratio_loop{t}  ||h_t - h_(t-1)|| / ||h_t||, for t >= 2
    token_correlation   the cosine of two tokens' states in a row, over all pairs, at the last kept loop
    exit_loop{t}, exit_entropy  the exit distribution and its entropy in nats, where the model has a gate
    """
    states = {loop: at_least_float32(trace.states[loop]) for loop in sorted(trace.states)}
    seen: Metrics = {}
    for loop, state in states.items():
        norm = state[real].norm(dim=-1)
        seen[f"state_norm_loop{loop}"] = norm.sum()
        if loop - 1 in states:
            seen[f"step_ratio_loop{loop}"] = ((state - states[loop - 1])[real].norm(dim=-1) / norm).sum()
    if model.config.exit_gate:
        assert trace.gate_logits is not None
        log_pdf = exit_log_pdf(trace.gate_logits[real])
        pdf = log_pdf.exp()
        seen |= {f"exit_loop{loop}": p.sum() for loop, p in enumerate(pdf.unbind(-1), start=1)}
        seen["exit_entropy"] = -(pdf * log_pdf).sum()
    correlations = token_correlation(states[max(states)], real)
    return [(seen, real.sum()), ({"token_correlation": correlations.sum()}, correlations.new_tensor(len(correlations)))]


@torch.no_grad()
def gradient_norms(model: LoopLMForCausalLM) -> dict[str, float]:
    """`grad_norm/{part}` for embed, prelude, core, injection, coda, head, gate and norm, as far as they have gradients.

    The squares add up to the square of the whole norm; a tied head counts in embed. Under shards every process asks.
    """
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(at_least_float32(parameter.grad))
            part = name.removeprefix("model.").partition(".")[0]
            part = _PARTS.get(part, part)
            squares[part] = squares.get(part, 0.0) + whole(norm).item() ** 2
    return {f"grad_norm/{part}": math.sqrt(square) for part, square in squares.items()}


# Alarms -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Monitors:
    """Where a number becomes an alarm.

    gate: mean exit probability of the first or last loop.
    correlation: `token_correlation` of the last loop.
    ignored: spread of the held-out losses over loops, relative to the first one's, under which loops do nothing.
    growth: factor of the mean state norm in every single loop.
    norm: mean state norm.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    gate: float = 0.95
    correlation: float = 0.99
    ignored: float = 1e-3
    growth: float = 3.0
    norm: float = 1e4

    def __post_init__(self) -> None:
        if not 0.5 < self.gate <= 1 or not 0 < self.correlation <= 1:
            raise ValueError(f"{self} needs gate above 0.5 and correlation above 0, both at most 1")
        if self.ignored < 0 or self.growth <= 1 or self.norm <= 0:
            raise ValueError(f"{self} needs ignored of at least 0, growth above 1 and norm above 0")


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A pathology by name, with what was seen and its usual cure in one line."""

    name: str
    message: str


def diagnose(values: Mapping[str, float], thresholds: Monitors) -> list[Alarm]:
    """The pathologies that `values` show: metrics under the names that `observe` and the held-out evaluation give."""
    broken = sorted(name for name, value in values.items() if not math.isfinite(value))
    found = [_non_finite(broken)] if broken else []
    checks = (_gate_collapse, _representation_collapse, _norm_explosion, _loops_ignored)
    return found + [alarm for check in checks for alarm in check(values, thresholds)]


def _non_finite(broken: list[str]) -> Alarm:
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    seen = ", ".join(broken[:3]) + more
    return Alarm(name="non-finite", message=f"{seen} not finite; lower the learning rate or the number of loops")


def _gate_collapse(values: Mapping[str, float], thresholds: Monitors) -> Iterable[Alarm]:
    exits = _by_loop(values, "exit_loop")
    if len(exits) < 2:
        return
    for loop, place in ((min(exits), "first"), (max(exits), "last")):
        if exits[loop] >= thresholds.gate:
            yield Alarm(
                name=f"gate collapse to {place}",
                message=f"{exits[loop]:.1%} of the exit probability lies on loop {loop} of {max(exits)}; "
                "raise beta (the entropy weight) or lower optimizer.gate_lr",
            )


def _representation_collapse(values: Mapping[str, float], thresholds: Monitors) -> Iterable[Alarm]:
    correlation = values.get("token_correlation", 0.0)
    if correlation > thresholds.correlation:
        yield Alarm(
            name="representation collapse",
            message=f"the states of different tokens have a mean cosine of {correlation:.4f}; "
            "lower the learning rate, or norm the branches' outputs (norm_placement='sandwich_dual')",
        )


def _norm_explosion(values: Mapping[str, float], thresholds: Monitors) -> Iterable[Alarm]:
    norms = _by_loop(values, "state_norm_loop")
    if not norms:
        return
    ordered = [norms[loop] for loop in sorted(norms)]
    growth = min((after / before if before else 1.0 for before, after in pairwise(ordered)), default=1.0)
    cure = "add the stability term, set norm_in_loop=True or injection='diagonal'"
    if growth > thresholds.growth:
        yield Alarm(name="norm explosion", message=f"each loop multiplies the state by {growth:.3g} or more; {cure}")
    elif max(ordered) > thresholds.norm:
        yield Alarm(name="norm explosion", message=f"the states have a mean norm of {max(ordered):.3g}; {cure}")


def _loops_ignored(values: Mapping[str, float], thresholds: Monitors) -> Iterable[Alarm]:
    sources = {name.rpartition("/")[0] for name in values if re.fullmatch(r".+/loss_loop\d+", name)}
    for source in sorted(sources):
        losses = _by_loop(values, f"{source}/loss_loop")
        first, last = min(losses), max(losses)
        spread = max(losses.values()) - min(losses.values())
        if first < last and spread < thresholds.ignored * losses[first]:
            yield Alarm(
                name="loops ignored",
                message=f"{source} costs {losses[first]:.4f} at loop {first} and {losses[last]:.4f} at loop {last}; "
                "draw the depth at random, or let the state weigh more (sandwich norms, a lower learning rate)",
            )


def _by_loop(values: Mapping[str, float], prefix: str) -> dict[int, float]:
    """The values named `prefix` and a loop's number."""
    numbered = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return {int(loop): value for loop, value in numbered.items() if loop.isdecimal()}


# Steps whose gradient is not finite ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """What to do with a step whose gradient is not finite: "skip" it, up to `patience` in a row, or "stop" at once."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    policy: Literal["skip", "stop"] = "skip"
    patience: int = 3

    def __post_init__(self) -> None:
        if self.policy not in ("skip", "stop"):
            raise ValueError(f"policy={self.policy!r} is not known; choose 'skip' or 'stop'")
        if self.patience < 1:
            raise ValueError(f"patience={self.patience} must be at least 1; policy='stop' has none")


class NonFiniteGuard:
    """Decides over each step by its gradient's norm, and counts the skipped ones; its counts belong to the run."""

    def __init__(self, settings: NonFinite) -> None:
        self.settings = settings
        self.skipped = 0
        self.in_row = 0

    def admits(self, norm: float, step: int) -> bool:
        """Whether 0-based `step` may move the weights; a skipped one is counted.

        Raises:
            ValueError: under "stop", or for the last of `patience` such steps in a row.
        """
        if math.isfinite(norm):
            self.in_row = 0
            return True
        self.skipped += 1
        self.in_row += 1
        if self.settings.policy == "stop" or self.in_row >= self.settings.patience:
            times = "" if self.in_row == 1 else f", {self.in_row} times in a row"
            raise ValueError(f"the gradient is not finite at step {step}{times}; lower optimizer.lr or clip_norm")
        return False

    def state_dict(self) -> dict[str, int]:
        """The counts, as a checkpoint keeps them."""
        return {"skipped": self.skipped, "in_row": self.in_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Put the counts back; a new run has none."""
        self.skipped, self.in_row = state.get("skipped", 0), state.get("in_row", 0)


# Speed --------------------------------------------------------------------------------------------------------


def training_flops(config: LoopLMConfig, loops: int, grad_loops: int, tokens: float, length: int, reads: int) -> int:
    """FLOPs of forward and backward for `tokens` tokens in rows of `length` at a depth, matrix products only.

    A pass with gradient costs three forward ones, a loop without gradient one. The head, and a coda before it, count
    once for each of the `reads` loops that the objective reads. Attention counts every pair of a row, as is usual
    (arXiv 2204.02311, appendix B). What a backend computes beyond that is no useful work and is left out.
    """
    part = flops_by_part(config, context_length=length)
    passes = loops - grad_loops + 3 * grad_loops
    whole = 3 if grad_loops == loops else 1  # the first loop and what enters it
    injected_again = config.injection != "none" and not config.inject_once
    per_token = (
        part["prelude"] * (3 if injected_again else whole)
        + part["injection"] * (whole if config.inject_once else passes)
        + (part["core"] + part["gate"]) * passes
        + (part["coda"] + part["head"]) * 3 * reads
    )
    return round(per_token * tokens)


@torch.no_grad()
def measure_peak_flops(device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 0.2) -> float:
    """FLOP/s of the fastest of many square matrix products on `device`, tried for `seconds`."""
    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    out = matrix @ matrix
    _finish(device)
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(matrix, matrix, out=out)
        _finish(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
