"""Learning-rate schedules: frozen values, pure in the step."""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
    """Linear warm-up, a plateau, then linear decay to `final` of the peak over the last `decay` share of the steps."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["wsd"] = "wsd"
    warmup_steps: int = 100
    decay: float = 0.2
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or not 0 <= self.decay <= 1 or not 0 <= self.final <= 1:
            raise ValueError(f"{self} needs warmup_steps >= 0 and decay and final between 0 and 1")

    def factor(self, step: int, num_steps: int) -> float:
        """The multiple of the peak rate at 0-based `step` of `num_steps`."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        decay_steps = round(self.decay * num_steps)
        left = num_steps - step
        if left > decay_steps:
            return warm
        return warm * (self.final + (1 - self.final) * left / (decay_steps + 1))
