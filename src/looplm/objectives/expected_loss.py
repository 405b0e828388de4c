"""Stage I: the expected loss under the exit distribution, less beta times its entropy (Ouro, section 3.3)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from looplm.models import LoopLMConfig, LoopLMForCausalLM, Trace
from looplm.models.exits import exit_log_pdf
from looplm.objectives.linear_ce import linear_cross_entropy
from looplm.objectives.targets import Batch, Metrics, hidden_rows, next_token_targets, target_weights


@dataclass(frozen=True, kw_only=True)
class ExpectedLoss:
    """mean over target tokens of sum_t p_t CE_t - beta H(p), p the token's exit distribution.

    Up to a constant this is an ELBO with a uniform prior over loops (arXiv 2510.25741); without the entropy term p
    collapses onto the last loop. Ouro takes beta = 0.1 at first, 0.05 later.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["expected_loss"] = "expected_loss"
    beta: float = 0.05

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
        with torch.no_grad():
            loops = torch.arange(1, len(pdf) + 1, device=pdf.device)
            metrics["mean_exit_loop"] = (loops[:, None] * pdf * weights).sum()
            metrics |= {f"loss_loop{loop}": row for loop, row in enumerate((nll * weights).sum(-1), start=1)}
        return expected - self.beta * entropy, {name: value.detach() for name, value in metrics.items()}
