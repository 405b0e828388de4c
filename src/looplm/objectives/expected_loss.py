"""Stage I: the expected loss under the exit distribution, which beta holds near a prior (Ouro, section 3.3)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from looplm.models import LoopLMConfig, LoopLMForCausalLM, Trace
from looplm.models.exits import exit_log_pdf
from looplm.objectives.linear_ce import linear_cross_entropy
from looplm.objectives.priors import Prior, UniformPrior
from looplm.objectives.targets import (
    Batch,
    Metrics,
    all_loops,
    hidden_rows,
    loop_metrics,
    next_token_targets,
    target_weights,
)


@dataclass(frozen=True, kw_only=True)
class ExpectedLoss:
    """mean over target tokens of sum_t p_t CE_t + beta KL(p || prior), p the token's exit distribution.

    This is an ELBO (arXiv 2510.25741). Under a uniform prior the constant log T is dropped, so that the term is
    -beta H(p), Ouro's; without it p collapses onto the last loop. Ouro takes beta = 0.1 at first, 0.05 later.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["expected_loss"] = "expected_loss"
    beta: float = 0.05
    prior: Prior = field(default_factory=UniformPrior)

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ValueError(f"beta={self.beta} must not be negative; 0 leaves the exit distribution free")

    def needs(self, loops: int) -> set[int]:
        """Every loop is read."""
        return all_loops(loops)

    def check_loops(self, loops: int) -> None:
        """Any depth will do."""

    def check_model(self, config: LoopLMConfig) -> None:
        """Refuse a model without a gate."""
        if not config.exit_gate:
            raise ValueError("the expected loss weighs loops by an exit gate; set exit_gate=True in the model's config")

    def trains(self, parameter_name: str) -> bool:
        """Every parameter learns."""
        return True

    def __call__(self, model: LoopLMForCausalLM, trace: Trace, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss and its parts; `trace` must keep all loops and `batch["labels"]` is [B, S], -100 masked."""
        self.check_model(model.config)
        assert trace.gate_logits is not None
        targets = next_token_targets(batch["labels"])
        log_pdf = exit_log_pdf(trace.gate_logits).flatten(0, -2).T  # [loops, B*S]
        pdf = log_pdf.exp()
        weights = target_weights(batch, targets, pdf.dtype)
        expected, nll = linear_cross_entropy(hidden_rows(model, trace), model.lm_head.weight, targets, pdf * weights)
        entropy = -(pdf * log_pdf * weights).sum()
        metrics = {"expected_loss": expected, "exit_entropy": entropy}
        distance = -entropy
        if not isinstance(self.prior, UniformPrior):
            log_prior = self.prior.log_pdf(len(pdf)).to(pdf)[:, None]
            distance = metrics["exit_prior_kl"] = (pdf * (log_pdf - log_prior) * weights).sum()
        with torch.no_grad():
            loops = torch.arange(1, len(pdf) + 1, device=pdf.device)
            metrics["mean_exit_loop"] = (loops[:, None] * pdf * weights).sum()
            metrics |= loop_metrics("loss_loop", nll, weights) | loop_metrics("exit_loop", pdf, weights)
        return expected + self.beta * distance, {name: value.detach() for name, value in metrics.items()}
