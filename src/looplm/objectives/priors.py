"""Priors over the loop at which a token leaves: frozen values, each normalised over the loops that are run."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from looplm.objectives.kinds import ByKind

# Quadrature over a standard normal: log-concave integrands whose peaks lie well inside, so that plain sums converge.
_NODES = torch.linspace(-40, 40, 8001, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class UniformPrior:
    """Every loop alike (Ouro's choice, arXiv 2510.25741)."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["uniform"] = "uniform"

    def log_pdf(self, loops: int) -> Tensor:
        """log pi_t [loops], float64."""
        return torch.full((loops,), -math.log(loops), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class GeometricPrior:
    """pi_t in proportion to p (1 - p)^(t - 1), renormalised over 1..T (Ouro's Appendix A compares p = 0.1 to 0.9)."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["geometric"] = "geometric"
    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise ValueError(f"p={self.p} of a geometric prior must lie between 0 and 1, neither included")

    def log_pdf(self, loops: int) -> Tensor:
        """log pi_t [loops], float64."""
        return (torch.arange(loops, dtype=torch.float64) * math.log1p(-self.p)).log_softmax(0)


@dataclass(frozen=True, kw_only=True)
class PoissonLogNormalPrior:
    """Huginn's depth as a prior: t = Poisson(exp(N(log mean - sigma^2/2, sigma))) + 1, renormalised over 1..T.

    Before it is cut at T its mean is `mean` + 1 (arXiv 2502.05171, section 3.3).
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["poisson_log_normal"] = "poisson_log_normal"
    mean: float = 3.0
    sigma: float = 0.5

    def __post_init__(self) -> None:
        if self.mean <= 0 or self.sigma < 0:
            raise ValueError(f"a prior with mean={self.mean}, sigma={self.sigma} needs mean > 0 and sigma >= 0")

    def log_pdf(self, loops: int) -> Tensor:
        """log pi_t [loops], float64."""
        return self.log_mass(loops).log_softmax(0)

    def log_mass(self, loops: int) -> Tensor:
        """log P(t) [loops] before it is cut, float64: the Poisson mass averaged over the log-normal rate."""
        log_rate = math.log(self.mean) - self.sigma**2 / 2 + self.sigma * _NODES
        counts = torch.arange(loops, dtype=torch.float64)[:, None]
        log_poisson = counts * log_rate - log_rate.exp() - torch.lgamma(counts + 1)
        return torch.logsumexp(log_poisson + (-(_NODES**2) / 2).log_softmax(0), dim=-1)


Prior = Annotated[
    UniformPrior | GeometricPrior | PoissonLogNormalPrior, ByKind(UniformPrior, GeometricPrior, PoissonLogNormalPrior)
]
