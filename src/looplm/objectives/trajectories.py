"""Regularisers read off the trajectory itself: no extra step, gradient through the loops that were run."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from looplm.models.precision import at_least_float32
from looplm.objectives.probes import Form, only, row_norms

States = Mapping[int, Tensor]


@dataclass(frozen=True, kw_only=True)
class SecantRatio(Form):
    """relu(||D_T|| / ||D_{T-1}|| - target) per row, with D_t = h_t - h_{t-1}: do the last steps still grow?

    It sees the directions that were visited and no others. Below 3 loops there are no two steps, and it is 0.
    """

    kind: Literal["secant_ratio"] = "secant_ratio"
    target: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target < 0:
            raise ValueError(f"target={self.target} must not be negative; 1 asks that steps do not grow")

    @property
    def estimates(self) -> str:
        """What the value says."""
        return f"growth of the last step over the one before, beyond {self.target:g} (visited directions only)"

    def needs(self, loops: int) -> set[int]:
        """The last three states are read."""
        return set(range(max(1, loops - 2), loops + 1))

    def values(self, states: States, loops: int, rows_R: Tensor, real_RS: Tensor) -> Tensor:
        """The value [R] of some rows of states {loop: [B, S, D]}, over their real tokens."""
        if loops < 3:
            return torch.zeros(len(rows_R), device=rows_R.device)
        before, middle, last = (at_least_float32(states[loop][rows_R]) for loop in range(loops - 2, loops + 1))
        step, earlier = (row_norms(only(real_RS, x)).flatten() for x in (last - middle, middle - before))
        return (step / earlier.clamp(min=torch.finfo(earlier.dtype).tiny) - self.target).relu()


@dataclass(frozen=True, kw_only=True)
class AdjacentL2(Form):
    """mean over steps, tokens and channels of (h_t - h_{t-1})^2 per row: the baseline that STARS finds wanting.

    The first step counted is that of loop 2, so one loop gives 0.
    """

    kind: Literal["adjacent_l2"] = "adjacent_l2"

    @property
    def estimates(self) -> str:
        """What the value says."""
        return "mean squared change of the state from loop to loop"

    def needs(self, loops: int) -> set[int]:
        """Every loop is read."""
        return set(range(1, loops + 1))

    def values(self, states: States, loops: int, rows_R: Tensor, real_RS: Tensor) -> Tensor:
        """The value [R] of some rows of states {loop: [B, S, D]}, over their real tokens."""
        chosen = [at_least_float32(states[loop][rows_R]) for loop in range(1, loops + 1)]
        count_R = real_RS.sum(-1).clamp(min=1)
        steps = [only(real_RS, after - before).pow(2).mean(-1).sum(-1) / count_R for before, after in pairwise(chosen)]
        return torch.stack(steps).mean(0) if steps else torch.zeros(len(rows_R), device=rows_R.device)
