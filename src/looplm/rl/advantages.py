"""What a group's rewards say of each of its completions."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

_LEAST_SPREAD = 1e-4  # added to a deviation, as in TRL


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """r - mean(r) over a prompt's group, over a standard deviation: the group's (the paper), the batch's, or none.

    dead: what becomes of groups whose rewards are all equal, which have nothing to say. "keep": advantage exactly 0,
        but they count in means and are held near the reference; "drop": they count nowhere; "resample": other prompts
        take their place, up to `attempts` times (DAPO's dynamic sampling), then they are dropped.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # for recipes

    scale: Literal["group", "batch", "none"] = "group"
    dead: Literal["keep", "drop", "resample"] = "keep"
    attempts: int = 3

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts={self.attempts} must be at least 1; dead: drop tries no other prompts")

    def of(self, rewards: Tensor) -> Tensor:
        """Advantages [G, R] of rewards [G, R], a row for each group; exactly 0 where a group's are all equal."""
        if rewards.shape[1] < 2:
            raise ValueError("a group of one completion has nothing to compare it with; take group of at least 2")
        rewards = rewards.double()
        centred = rewards - rewards.mean(1, keepdim=True)
        if self.scale == "group":
            centred = centred / (rewards.std(1, keepdim=True) + _LEAST_SPREAD)
        elif self.scale == "batch":
            centred = centred / (rewards.std() + _LEAST_SPREAD)
        return centred.masked_fill(is_dead(rewards)[:, None], 0.0)


def is_dead(rewards: Tensor) -> Tensor:
    """Whether all rewards of a group are equal [G]; compared, since a mean of equal numbers may round."""
    return (rewards == rewards[:, :1]).all(1)
