"""Training objectives: (model, trace, batch) -> (loss, metrics), over one chunked head-loss kernel."""

from looplm.objectives.expected_loss import ExpectedLoss
from looplm.objectives.fixed_prior import FixedPrior
from looplm.objectives.gate_regression import GateRegression
from looplm.objectives.last_loop import LastLoop
from looplm.objectives.linear_ce import linear_cross_entropy
from looplm.objectives.oracle_decider import OracleDecider
from looplm.objectives.policy_gradient import PolicyGradient
from looplm.objectives.priors import GeometricPrior, PoissonLogNormalPrior, Prior, UniformPrior
from looplm.objectives.probes import FiniteDifference, JacobianVector, VectorJacobian
from looplm.objectives.stability import Stability, StabilityForm, StabilityTerm
from looplm.objectives.trajectories import AdjacentL2, SecantRatio

Objective = ExpectedLoss | GateRegression | FixedPrior | LastLoop | OracleDecider

__all__ = [
    "AdjacentL2",
    "ExpectedLoss",
    "FiniteDifference",
    "FixedPrior",
    "GateRegression",
    "GeometricPrior",
    "JacobianVector",
    "LastLoop",
    "Objective",
    "OracleDecider",
    "PoissonLogNormalPrior",
    "PolicyGradient",
    "Prior",
    "SecantRatio",
    "Stability",
    "StabilityForm",
    "StabilityTerm",
    "UniformPrior",
    "VectorJacobian",
    "linear_cross_entropy",
]
