"""Depth schedules: how many loops a step runs, and how many carry gradient; pure in (seed, step, sample)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Depth:
    """`loops` in all, the last `grad_loops` of them with gradient."""

    loops: int
    grad_loops: int


def _generator(seed: int, step: int, sample: int) -> np.random.Generator:
    """All ranks and every resumed run draw the same depth for the same step."""
    return np.random.default_rng([seed, step, sample])


@dataclass(frozen=True, kw_only=True)
class _Bounded:
    """A distribution over loops, clipped to [`low`, `high`]; the last `grad_loops` carry gradient (all by default)."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    low: int = 1
    high: int = 100
    grad_loops: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a depth schedule needs 1 <= low <= high, got low={self.low}, high={self.high}")
        if self.grad_loops is not None and self.grad_loops < 1:
            raise ValueError(f"grad_loops={self.grad_loops} must be at least 1")

    def draw(self, seed: int, step: int, sample: int = 0) -> Depth:
        """The depth of `step`; `sample` tells micro-batches or sequences of one step apart."""
        loops = int(np.clip(self._sample(_generator(seed, step, sample)), self.low, self.high))
        return Depth(loops=loops, grad_loops=min(loops, self.grad_loops or loops))

    def _sample(self, generator: np.random.Generator) -> float:
        raise AssertionError("a distribution says how it is drawn")


@dataclass(frozen=True, kw_only=True)
class FixedDepth(_Bounded):
    """Always `loops`."""

    kind: Literal["fixed"] = "fixed"
    loops: int = 4

    def _sample(self, generator: np.random.Generator) -> float:
        return self.loops


@dataclass(frozen=True, kw_only=True)
class UniformDepth(_Bounded):
    """Every count from `low` to `high` alike."""

    kind: Literal["uniform"] = "uniform"

    def _sample(self, generator: np.random.Generator) -> float:
        return int(generator.integers(self.low, self.high + 1))


@dataclass(frozen=True, kw_only=True)
class PoissonDepth(_Bounded):
    """Poisson(`mean`), clipped (STARS, arXiv 2605.26733, Table 1)."""

    kind: Literal["poisson"] = "poisson"
    mean: float = 5.0

    def _sample(self, generator: np.random.Generator) -> float:
        return generator.poisson(self.mean)


@dataclass(frozen=True, kw_only=True)
class LogNormalDepth(_Bounded):
    """exp(N(`mu`, `sigma`)) rounded, clipped: STARS' choice, mu 2.0 and sigma 0.7 in [1, 100] for addition."""

    kind: Literal["log_normal"] = "log_normal"
    mu: float = 2.0
    sigma: float = 0.7

    def _sample(self, generator: np.random.Generator) -> float:
        return round(generator.lognormal(self.mu, self.sigma))


@dataclass(frozen=True, kw_only=True)
class LogNormalPoissonDepth(_Bounded):
    """Huginn's (arXiv 2502.05171, section 3.3): r ~ Poisson(exp(N(log mean - sigma^2/2, sigma))) + 1.

    The expected count is `mean` + 1 (before clipping); the last `grad_loops`, 8 there, carry gradient.
    """

    kind: Literal["log_normal_poisson"] = "log_normal_poisson"
    mean: float = 32.0
    sigma: float = 0.5
    high: int = 1000
    grad_loops: int | None = 8

    def _sample(self, generator: np.random.Generator) -> float:
        rate = generator.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return generator.poisson(rate) + 1


DepthSchedule = FixedDepth | UniformDepth | PoissonDepth | LogNormalDepth | LogNormalPoissonDepth
