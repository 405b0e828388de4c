"""Learning-rate schedules: frozen values, pure in the step."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

DecayShape = Literal["linear", "sqrt", "cosine"]

# How much of the way down is left after the share `x` of it: from 1 at x = 0 to 0 at x = 1.
_REMAINING = {
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Linear warm-up over the first `warmup_steps`, then the peak rate."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["constant"] = "constant"
    warmup_steps: int = 100

    def __post_init__(self) -> None:
        _refuse_warmup(self.warmup_steps)

    def factor(self, step: int, num_steps: int) -> float:
        """The multiple of the peak rate at 0-based `step` of `num_steps`."""
        return _warmup(step, self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
    """Linear warm-up, a plateau, then decay to `final` of the peak over the last `decay` share of the steps.

    decay_shape: "linear", "cosine", or "sqrt" for 1 - sqrt of the share done (arXiv 2405.18392).
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["wsd"] = "wsd"
    warmup_steps: int = 100
    decay: float = 0.2
    final: float = 0.0
    decay_shape: DecayShape = "linear"

    def __post_init__(self) -> None:
        _refuse_warmup(self.warmup_steps)
        _refuse_final(self.final)
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay} is a share of the steps; give a number between 0 and 1")
        if self.decay_shape not in _REMAINING:
            raise ValueError(f"decay_shape={self.decay_shape!r} is not known; choose 'linear', 'sqrt' or 'cosine'")

    def factor(self, step: int, num_steps: int) -> float:
        """The multiple of the peak rate at 0-based `step` of `num_steps`."""
        decay_steps = round(self.decay * num_steps)
        return _warmup(step, self.warmup_steps) * _down(step, num_steps, decay_steps, self.final, self.decay_shape)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then half a cosine down to `final` of the peak over all the other steps."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["cosine"] = "cosine"
    warmup_steps: int = 100
    final: float = 0.1

    def __post_init__(self) -> None:
        _refuse_warmup(self.warmup_steps)
        _refuse_final(self.final)

    def factor(self, step: int, num_steps: int) -> float:
        """The multiple of the peak rate at 0-based `step` of `num_steps`."""
        down_steps = max(0, num_steps - self.warmup_steps)
        return _warmup(step, self.warmup_steps) * _down(step, num_steps, down_steps, self.final, "cosine")


LearningRate = WarmupStableDecay | Cosine | Constant


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _down(step: int, num_steps: int, down_steps: int, final: float, shape: DecayShape) -> float:
    """From 1 towards `final` over the last `down_steps`; `final` itself would be one step past the end."""
    done = max(0, step + 1 - (num_steps - down_steps)) / (down_steps + 1)
    return final + (1 - final) * _REMAINING[shape](done)


def _refuse_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must not be negative")


def _refuse_final(final: float) -> None:
    if not 0 <= final <= 1:
        raise ValueError(f"final={final} is a share of the peak rate; give a number between 0 and 1")
