"""Stage II: the exit gate alone learns whether a loop pays, the language model frozen (Ouro, section 3.4)."""

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
class GateRegression:
    """Binary cross-entropy of "go on" (1 - lambda_t) towards w = sigmoid(k (gain - gamma)).

    gain^(t) = max(0, CE^(t-1) - CE^(t)), the improvement that loop t brought, for t = 2..T. The label says which gate
    learns it; the sum over gates is divided by T as the paper writes it (arXiv 2510.25741, k = 50, gamma = 0.005).

    label:
        "paper"      gate t learns the gain of the loop just done, t = 2..T; the gate of loop 1 gets no gradient.
        "lookahead"  gate t learns the gain of the next loop, t = 1..T-1, which is what leaving or staying decides;
                     the gate of loop T, which no exit rule reads, gets no gradient.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["gate_regression"] = "gate_regression"
    k: float = 50.0
    gamma: float = 0.005
    label: Literal["paper", "lookahead"] = "paper"

    def __post_init__(self) -> None:
        if self.label not in ("paper", "lookahead"):
            raise ValueError(f"label={self.label!r} is not known; choose 'paper' or 'lookahead'")

    def needs(self, loops: int) -> set[int]:
        """Every loop is read."""
        return all_loops(loops)

    def check_loops(self, loops: int) -> None:
        """Refuse a depth without two loops to compare."""
        if loops < 2:
            raise ValueError("gate regression compares loops: train it with loops of at least 2")

    def check_model(self, config: LoopLMConfig) -> None:
        """Refuse a model without a gate."""
        if not config.exit_gate:
            raise ValueError("gate regression trains an exit gate; set exit_gate=True in the model's config")

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
        gain = (-losses.diff(dim=0)).clamp(min=0)  # [loops - 1, B*S], of loops 2..T
        go_on = torch.sigmoid(self.k * (gain - self.gamma))
        num_loops = len(losses)
        first = 2 if self.label == "paper" else 1
        gates = gate_rows(model, trace, range(first, first + num_loops - 1))
        per_gate = F.binary_cross_entropy_with_logits(-gates, go_on, reduction="none")
        loss = (per_gate * weights).sum() / num_loops
        metrics = {"gate_loss": loss.detach(), "go_on_label": (go_on * weights).sum() / (num_loops - 1)}
        return loss, metrics
