"""Training objectives: (model, trace, batch) -> (loss, metrics), over one chunked head-loss kernel."""

from looplm.objectives.expected_loss import ExpectedLoss
from looplm.objectives.gate_regression import GateRegression
from looplm.objectives.linear_ce import linear_cross_entropy

__all__ = ["ExpectedLoss", "GateRegression", "linear_cross_entropy"]
