"""Loss weights fixed by a prior over loops, apart from any stop that is read or learned later (arXiv 2607.20519)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from looplm.models import LoopLMConfig, LoopLMForCausalLM, Trace
from looplm.objectives.linear_ce import linear_cross_entropy
from looplm.objectives.priors import Prior, UniformPrior
from looplm.objectives.targets import (
    Batch,
    Metrics,
    all_loops,
    hidden_rows,
    is_gate,
    loop_metrics,
    next_token_targets,
    target_weights,
)


@dataclass(frozen=True, kw_only=True)
class FixedPrior:
    """mean over target tokens of sum_t pi_t CE_t, pi the prior; the gate, if there is one, is left untouched."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["fixed_prior"] = "fixed_prior"
    prior: Prior = field(default_factory=UniformPrior)

    def needs(self, loops: int) -> set[int]:
        """Every loop is read."""
        return all_loops(loops)

    def check_loops(self, loops: int) -> None:
        """Any depth will do."""

    def check_model(self, config: LoopLMConfig) -> None:
        """Any model will do."""

    def trains(self, parameter_name: str) -> bool:
        """Everything but the gate learns."""
        return not is_gate(parameter_name)

    def __call__(self, model: LoopLMForCausalLM, trace: Trace, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss and its parts; `trace` must keep all loops and `batch["labels"]` is [B, S], -100 masked."""
        targets = next_token_targets(batch["labels"])
        rows = hidden_rows(model, trace)
        dtype = torch.promote_types(rows[0].dtype, torch.float32)
        weights = target_weights(batch, targets, dtype)
        prior = self.prior.log_pdf(len(rows)).exp().to(weights)  # [loops]
        loss, nll = linear_cross_entropy(rows, model.lm_head.weight, targets, prior[:, None] * weights)
        return loss, loop_metrics("loss_loop", nll, weights)
