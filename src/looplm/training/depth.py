"""Depth schedules: how many loops a step runs, and how many carry gradient; pure in (seed, step, sample)."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np

_MOST_LOOPS, _MOST_SIGMA = 10**6, 5.0  # far beyond any use, and within the range of what numpy draws


@dataclass(frozen=True, kw_only=True)
class Depth:
    """`loops` in all, the last `grad_loops` of them with gradient."""

    loops: int
    grad_loops: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A curriculum: the depth grows from the share `start` of what it will be to all of it, over `steps` steps.

    shape: "linear", or "one_minus_sqrt", 1 - sqrt(1 - u) at the share u of the steps, slow first and fast at the end.
        Both are McLeish et al.'s (arXiv 2511.07384; the public code takes transformers' warm-ups of these names, over a
        quarter to three quarters of a run, and rounds counts up).
    grad: whether the schedule's `grad_loops` grow likewise.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    shape: Literal["linear", "one_minus_sqrt"] = "linear"
    start: float = 0.25
    steps: int
    grad: bool = False

    def __post_init__(self) -> None:
        if self.shape not in ("linear", "one_minus_sqrt"):
            raise ValueError(f"shape={self.shape!r} of a growth is not known; choose 'linear' or 'one_minus_sqrt'")
        if not 0 < self.start <= 1:
            raise ValueError(f"start={self.start} of a growth must be a share of the depth above 0, at most 1")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} of a growth must be at least 1")

    def share(self, step: int) -> float:
        """The share of the full depth at 0-based `step`: `start` at step 0, 1 from step `steps` on."""
        done = min(1.0, step / self.steps)
        risen = done if self.shape == "linear" else 1 - math.sqrt(1 - done)
        return self.start + (1 - self.start) * risen


def _generator(seed: int, step: int, sample: int, *stream: int) -> np.random.Generator:
    """All ranks and every resumed run draw the same for the same step: loops from stream (), grad_loops from (1,)."""
    return np.random.default_rng([seed, step, sample, *stream])


def _whole(count: float) -> int:
    """`count` rounded up, a hair's breadth of floating point above a whole number forgiven."""
    return math.ceil(count - 1e-9)


@dataclass(frozen=True, kw_only=True)
class _Bounded:
    """A distribution over loops, clipped to [`low`, `high`]; the last `grad_loops` carry gradient (all by default).

    grad_low: draws the number of loops with gradient uniformly from `grad_low` to `grad_loops` ("uniform k").
    per: what a depth is drawn for: the whole optimiser step, each micro-batch, or each sequence of it.
    growth: a curriculum over the first steps.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    low: int = 1
    high: int = 100
    grad_loops: int | None = None
    grad_low: int | None = None
    per: Literal["step", "micro_batch", "sequence"] = "step"
    growth: Growth | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= _MOST_LOOPS:
            raise ValueError(
                f"a depth schedule needs 1 <= low <= high <= {_MOST_LOOPS}, got low={self.low}, high={self.high}"
            )
        if self.grad_loops is not None and not 1 <= self.grad_loops <= _MOST_LOOPS:
            raise ValueError(f"grad_loops={self.grad_loops} must be at least 1, at most {_MOST_LOOPS}")
        if self.grad_low is not None and not 1 <= self.grad_low <= (self.grad_loops or 0):
            raise ValueError(f"grad_low={self.grad_low} must be between 1 and grad_loops={self.grad_loops}")
        if self.per not in ("step", "micro_batch", "sequence"):
            raise ValueError(f"per={self.per!r} is not known; choose 'step', 'micro_batch' or 'sequence'")

    @property
    def lowest(self) -> int:
        """The smallest depth that a draw can give."""
        return self.low

    def draw(self, seed: int, step: int, sample: int = 0) -> Depth:
        """The depth of 0-based `step`; `sample` tells micro-batches or sequences of one step apart.

        The loops come from numpy's generator of the seed [seed, step, sample], a drawn number of loops with gradient
        from that of [seed, step, sample, 1].
        """
        grown = self._at(step)
        loops = int(np.clip(grown._sample(_generator(seed, step, sample)), grown.low, grown.high))
        with_gradient = loops if grown.grad_loops is None else grown.grad_loops
        if grown.grad_low is not None:
            with_gradient = int(_generator(seed, step, sample, 1).integers(grown.grad_low, with_gradient + 1))
        return Depth(loops=loops, grad_loops=min(loops, with_gradient))

    def scaled(self, factor: float) -> Self:
        """This schedule with `factor` times the depth, never below `low`; the bound `high` stays where it is a clip."""
        if not 0 < factor < math.inf:
            raise ValueError(f"factor={factor} of a depth must be a number above 0")
        return self._scaled(factor)

    def _at(self, step: int) -> Self:
        """The schedule as grown at `step`."""
        share = 1.0 if self.growth is None else self.growth.share(step)
        if self.growth is None or share == 1:
            return self
        grown = self.scaled(share)
        if not self.growth.grad or self.grad_loops is None:
            return grown
        grad_loops = _whole(self.grad_loops * share)
        return replace(grown, grad_loops=grad_loops, grad_low=self.grad_low and min(self.grad_low, grad_loops))

    def _sample(self, generator: np.random.Generator) -> float:
        raise AssertionError("a distribution says how it is drawn")

    def _scaled(self, factor: float) -> Self:
        raise AssertionError("a distribution says how it is scaled")


@dataclass(frozen=True, kw_only=True)
class FixedDepth(_Bounded):
    """Always `loops`."""

    kind: Literal["fixed"] = "fixed"
    loops: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low <= self.loops <= self.high:
            raise ValueError(f"loops={self.loops} must be between low={self.low} and high={self.high}")

    @property
    def lowest(self) -> int:
        """The depth itself, or that of step 0 where it grows."""
        return self._at(0).loops

    def _sample(self, generator: np.random.Generator) -> float:
        return self.loops

    def _scaled(self, factor: float) -> Self:
        loops = max(self.low, _whole(self.loops * factor))
        return replace(self, loops=loops, high=max(self.high, loops))


@dataclass(frozen=True, kw_only=True)
class UniformDepth(_Bounded):
    """Every count from `low` to `high` alike."""

    kind: Literal["uniform"] = "uniform"

    def _sample(self, generator: np.random.Generator) -> float:
        return int(generator.integers(self.low, self.high + 1))

    def _scaled(self, factor: float) -> Self:
        return replace(self, high=max(self.low, _whole(self.high * factor)))


@dataclass(frozen=True, kw_only=True)
class PoissonDepth(_Bounded):
    """Poisson(`mean`), clipped (STARS, arXiv 2605.26733, Table 1)."""

    kind: Literal["poisson"] = "poisson"
    mean: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_spread(self.mean)

    def _sample(self, generator: np.random.Generator) -> float:
        return generator.poisson(self.mean)

    def _scaled(self, factor: float) -> Self:
        return replace(self, mean=self.mean * factor)


@dataclass(frozen=True, kw_only=True)
class LogNormalDepth(_Bounded):
    """exp(N(`mu`, `sigma`)) rounded, clipped: STARS' choice, mu 2.0 and sigma 0.7 in [1, 100] for addition."""

    kind: Literal["log_normal"] = "log_normal"
    mu: float = 2.0
    sigma: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mu <= math.log(_MOST_LOOPS):
            raise ValueError(f"mu={self.mu} is the log of a depth, at most that of {_MOST_LOOPS}; STARS takes 2.0")
        _check_spread(1, self.sigma)

    def _sample(self, generator: np.random.Generator) -> float:
        return round(min(generator.lognormal(self.mu, self.sigma), self.high))

    def _scaled(self, factor: float) -> Self:
        return replace(self, mu=self.mu + math.log(factor))


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

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_spread(self.mean, self.sigma)

    def _sample(self, generator: np.random.Generator) -> float:
        rate = generator.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return generator.poisson(min(rate, 2 * _MOST_LOOPS)) + 1  # numpy draws up to some 9e18

    def _scaled(self, factor: float) -> Self:
        return replace(self, mean=self.mean * factor)


def _check_spread(mean: float, sigma: float = 0.0) -> None:
    if not 0 < mean <= _MOST_LOOPS or not 0 <= sigma <= _MOST_SIGMA:
        raise ValueError(
            f"a depth drawn with mean={mean}, sigma={sigma} needs mean > 0 and sigma >= 0, "
            f"at most {_MOST_LOOPS} and {_MOST_SIGMA:g}"
        )


DepthSchedule = FixedDepth | UniformDepth | PoissonDepth | LogNormalDepth | LogNormalPoissonDepth
