"""A gate distilled from an oracle that has seen every loop's loss, the language model frozen (RecurTrace)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.models import LoopLMConfig, LoopLMForCausalLM, Trace
from looplm.objectives.targets import (
    Batch,
    Metrics,
    all_loops,
    gate_rows,
    is_gate,
    loop_losses,
    next_token_targets,
    target_weights,
)


@dataclass(frozen=True, kw_only=True)
class OracleDecider:
    """Binary cross-entropy of "go on" (1 - lambda_t) towards c_t = 1[min_{s>t} CE_s < CE_t - delta], t = 1..T-1.

    Below `floor` the label is always "go on"; read the gate with `min_loops=floor`. The loss is the mean over the T-1
    gates that decide: that of loop T is read by no exit rule and gets no gradient (RecurTrace, arXiv 2609.03379, floor
    2). The label and accuracy metrics are means over the gates from the floor on, where there is a choice.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["oracle_decider"] = "oracle_decider"
    delta: float = 0.0
    floor: int = 2

    def __post_init__(self) -> None:
        if self.delta < 0:
            raise ValueError(
                f"delta={self.delta} must not be negative: it is the least gain that another loop must bring"
            )
        if self.floor < 1:
            raise ValueError(f"floor={self.floor} must be at least 1, the first loop at which a token may leave")

    def needs(self, loops: int) -> set[int]:
        """Every loop is read."""
        return all_loops(loops)

    def check_loops(self, loops: int) -> None:
        """Refuse a depth without a choice beyond the floor."""
        if loops <= self.floor:
            raise ValueError(f"the decider's floor={self.floor} leaves no choice: train it with more loops than that")

    def check_model(self, config: LoopLMConfig) -> None:
        """Refuse a model without a gate."""
        if not config.exit_gate:
            raise ValueError("the oracle's decider is an exit gate; set exit_gate=True in the model's config")

    def trains(self, parameter_name: str) -> bool:
        """Only the gate learns."""
        return is_gate(parameter_name)

    def __call__(self, model: LoopLMForCausalLM, trace: Trace, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss and its parts; `trace` must keep all loops and `batch["labels"]` is [B, S], -100 masked."""
        self.check_model(model.config)
        targets = next_token_targets(batch["labels"])
        losses = loop_losses(model, trace, targets)
        self.check_loops(len(losses))
        weights = target_weights(batch, targets, losses.dtype)
        go_on = self.labels(losses)
        gates = gate_rows(model, trace, range(1, len(losses)))
        per_gate = F.binary_cross_entropy_with_logits(-gates, go_on, reduction="none")
        loss = (per_gate * weights).sum() / len(gates)
        right = ((gates < 0) == go_on.bool()).to(weights)
        chosen = {"go_on_label": go_on, "decider_accuracy": right}
        metrics = {name: (rows[self.floor - 1 :] * weights).mean(0).sum() for name, rows in chosen.items()}
        return loss, {"gate_loss": loss.detach(), **metrics}

    def labels(self, losses: Tensor) -> Tensor:
        """c_t [loops - 1, N] of losses [loops, N]: 1 where going on pays, and below the floor."""
        best_later = losses.flip(0).cummin(0).values.flip(0)[1:]
        go_on = best_later < losses[:-1] - self.delta
        below = torch.arange(1, len(losses), device=losses.device) < self.floor
        return (go_on | below[:, None]).to(losses)
