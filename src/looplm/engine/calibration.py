"""Finding the threshold that gives a mean depth or a loss on given text, and keeping it with a model."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.engine.criteria import CosineConverged, EntropyBelow, LogitsKL, Margin, StateConverged, StepBelow
from looplm.engine.policies import DepthPolicy, ExitCDF, GateAbove, is_number, is_whole
from looplm.engine.traced import TracedPlaces
from looplm.models import LoopLMForCausalLM, Trace

FILE = "depth.json"
_STEPS = 30  # halvings of the threshold's range
_WINDOW = 2**-12  # the least part of that range in which a loss alone is looked for
_LOGITS = 36.0  # gates saturate: thresholds as near to 0 and to 1 as float64 tells apart


@dataclass(frozen=True, kw_only=True)
class Family:
    """Policies that differ in one threshold: from the one that leaves earliest to the one that leaves latest.

    floor: the loops that no token leaves before, unless a caller says otherwise.
    """

    make: Callable[..., DepthPolicy]
    threshold: str
    earliest: float
    latest: float
    floor: int = 1

    def policy(self, threshold: float, min_loops: int | None = None) -> DepthPolicy:
        """The one with this threshold."""
        return self.make(**{self.threshold: threshold}, min_loops=self.floor if min_loops is None else min_loops)

    def nearest(self, reached: Callable[[DepthPolicy], bool], min_loops: int | None = None) -> float:
        """The threshold nearest to the earliest whose policy has `reached` what later ones reach, too, by halving;
        the latest where none has."""
        if reached(self.policy(self.earliest, min_loops)):
            return self.earliest
        return self.between(_halved(lambda part: reached(self.policy(self.between(part), min_loops)), 0.0, 1.0))

    def between(self, part: float) -> float:
        """The threshold at a part from 0, the earliest, to 1, the latest: even in logits, or in decades."""
        if part in (0, 1):
            return self.latest if part else self.earliest
        if {self.earliest, self.latest} == {0.0, 1.0}:
            return 1 / (1 + math.exp(_LOGITS * (1 - 2 * part)))
        if self.latest == 0:
            return self.earliest * (1 - part)
        return self.earliest * (self.latest / self.earliest) ** part


FAMILIES = {
    "exit_cdf": Family(make=ExitCDF, threshold="q", earliest=0.0, latest=1.0),
    "gate_above": Family(make=GateAbove, threshold="threshold", earliest=1e-12, latest=1 - 1e-12, floor=2),
    "state_converged": Family(make=StateConverged, threshold="eps", earliest=10.0, latest=1e-6),
    "step_below": Family(make=StepBelow, threshold="eps", earliest=1e6, latest=1e-6),
    "cosine_converged": Family(make=CosineConverged, threshold="eps", earliest=2.0, latest=1e-9),
    "logits_kl": Family(make=LogitsKL, threshold="eps", earliest=50.0, latest=1e-9),
    "entropy_below": Family(make=EntropyBelow, threshold="nats", earliest=20.0, latest=0.0),
    "margin": Family(make=Margin, threshold="margin", earliest=0.0, latest=1.0),
}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A policy with the mean loops and the mean loss (nats a token) that it had on the text, beside the full depth's.

    loss_by_loop: of every token read at that loop · tokens: how many there were.
    """

    family: str
    threshold: float
    min_loops: int
    max_loops: int
    mean_loops: float
    loss: float
    loss_by_loop: list[float]
    tokens: int

    def __post_init__(self) -> None:
        _check_family(self.family)
        if not is_whole(self.max_loops):
            raise ValueError(f"max_loops={self.max_loops!r} must be a whole number of at least 1")
        self.policy()

    def policy(self) -> DepthPolicy:
        """The policy itself."""
        return FAMILIES[self.family].policy(self.threshold, self.min_loops)


def calibrate(
    model: LoopLMForCausalLM, rows: Tensor, family: str, *, target_loops: float | None = None,
    target_loss: float | None = None, min_loops: int | None = None, max_loops: int | None = None, batch: int = 4,
) -> Calibration:  # fmt: skip
    """The threshold of `family` at which tokens of `rows` [B, S] do so many loops, or cost so much, on average.

    Every position but a row's last counts. States are those of all loops run, as in prefill; text that is generated
    with early exits differs from that in the keys that its tokens see. Of a target loss the earliest threshold that
    reaches it is taken, though deeper ones may miss it again (looped models may think too long).

    Raises:
        ValueError: for an unknown family, a target outside what is to be had (named), none or both of the targets, or
            rows without a token that has a successor.
    """
    _check_family(family)
    _check_target(target_loops, target_loss)
    kind, loops = FAMILIES[family], model.config.loops if max_loops is None else max_loops
    floor = kind.floor if min_loops is None else min_loops
    text = ReadText(model, rows, loops, batch)

    @cache
    def outcome(part: float) -> tuple[float, float]:
        exits = text.exits(kind.policy(kind.between(part), floor))
        return exits.double().mean().item(), text.losses.gather(1, exits[:, None] - 1).double().mean().item()

    def reached(part: float) -> bool:
        mean_loops, loss = outcome(part)
        return mean_loops >= target_loops - 1e-9 if target_loops is not None else loss <= (target_loss or 0.0)

    # Depth only grows from the earliest threshold to the latest, so the whole range holds it; a loss may come and go.
    near = math.inf if target_loss is None else loops / 16
    found = 0.0 if reached(0.0) else _search(reached, lambda part: outcome(part)[0], near)
    if found is None or (target_loops is not None and outcome(0.0)[0] > target_loops + 1e-9):
        raise ValueError(_missed(target_loops, target_loss, [outcome(part) for part in (0.0, 1.0)]))
    mean_loops, loss = outcome(found)
    return Calibration(
        family=family, threshold=kind.between(found), min_loops=floor, max_loops=loops,
        mean_loops=mean_loops, loss=loss,
        loss_by_loop=text.losses.double().mean(0).tolist(), tokens=len(text.losses),
    )  # fmt: skip


def save_calibration(found: Calibration, folder: str | Path) -> Path:
    """Keep it beside the model's own files."""
    path = Path(folder) / FILE
    path.write_text(json.dumps(vars(found), indent=2) + "\n")
    return path


def load_calibration(folder: str | Path) -> Calibration:
    """What was kept with a model.

    Raises:
        ValueError: if there is none, or it is damaged.
    """
    path = Path(folder) / FILE
    if not path.exists():
        raise ValueError(f"{folder} has no {FILE}; make it with `looplm calibrate`")
    try:
        return Calibration(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:  # whatever the file holds, and whatever the policy refuses
        raise ValueError(f"{path} is damaged ({error}); make it again with `looplm calibrate`") from error


class ReadText:
    """Text [B, S] with all loops run, `batch` rows at once, of which any policy's exits can be told.

    losses: nats [R, T] of each of the R = B (S - 1) tokens with a successor, read at each loop.
    """

    @torch.no_grad()
    def __init__(self, model: LoopLMForCausalLM, rows: Tensor, loops: int, batch: int = 4) -> None:
        if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] < 2:
            raise ValueError(f"rows has shape {list(rows.shape)}; expected [rows, tokens], at least two tokens each")
        self._parts = [_Part(model, part, loops) for part in rows.split(batch)]
        self.losses = torch.cat([part.losses for part in self._parts])

    @torch.no_grad()
    def exits(self, policy: DepthPolicy) -> Tensor:
        """The loop [R] at which each token leaves.

        Raises:
            ValueError: if the model has not what the policy looks at.
        """
        return torch.cat([part.exits(policy) for part in self._parts])


class _Part:
    """Some rows with all loops run: the losses [R, T] of their tokens with a successor, and where policies leave."""

    def __init__(self, model: LoopLMForCausalLM, rows: Tensor, loops: int) -> None:
        trace: Trace = model.model(rows, loops=loops, keep_loops="all", use_cache=False)
        places = torch.ones_like(rows, dtype=torch.bool)
        places[:, -1] = False
        self._seen, self._targets = TracedPlaces(model, trace, places, loops), rows[:, 1:].flatten()
        self.losses = torch.stack([self._losses(loop) for loop in range(1, loops + 1)], 1)

    def exits(self, policy: DepthPolicy) -> Tensor:
        """The loop [R] at which each token leaves."""
        return self._seen.exits(policy)

    def _losses(self, loop: int) -> Tensor:
        return F.cross_entropy(self._seen.logits(loop)[1].float(), self._targets, reduction="none")


def _check_family(family: str) -> None:
    if family not in FAMILIES:
        raise ValueError(f"policy '{family}' has no threshold to find; choose one of {', '.join(FAMILIES)}")


def _check_target(target_loops: float | None, target_loss: float | None) -> None:
    if (target_loops is None) == (target_loss is None):
        raise ValueError("give exactly one of target_loops and target_loss")
    for name, target in (("target_loops", target_loops), ("target_loss", target_loss)):
        if target is not None and not (is_number(target) and math.isfinite(target)):
            raise ValueError(f"{name}={target!r} must be a finite number")


def _search(reached: Callable[[float], bool], depth: Callable[[float], float], near: float) -> float | None:
    """The first part of the range, above 0, at which the target is reached; None if it is at none that was tried.

    Ends of brackets differ by no more than `near` loops, or lie as near as `_WINDOW`.
    """

    def bracket(early: float, late: float) -> tuple[float, float] | None:
        if depth(late) - depth(early) <= near or late - early <= _WINDOW:
            return (early, late) if reached(late) else None
        middle = (early + late) / 2
        return bracket(early, middle) or bracket(middle, late)

    found = bracket(0.0, 1.0)
    if found is None:
        return None
    return _halved(reached, *found)


def _halved(reached: Callable[[float], bool], early: float, late: float) -> float:
    """The first part between the two at which the target is reached, if all later ones reach it."""
    for _ in range(_STEPS):
        middle = (early + late) / 2
        early, late = (early, middle) if reached(middle) else (middle, late)
    return late


def _missed(target_loops: float | None, target_loss: float | None, ends: list[tuple[float, float]]) -> str:
    (least, first), (most, last) = ends
    if target_loops is not None:
        return f"target_loops={target_loops} is not to be had: tokens do from {least:.2f} to {most:.2f}"
    return (
        f"target_loss={target_loss} is not to be had: the earliest exit costs {first:.4f} nats a token, the latest "
        f"{last:.4f}, and none between them costs so little"
    )
