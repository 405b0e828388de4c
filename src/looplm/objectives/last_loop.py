"""Plain next-token prediction at the last loop (Huginn, arXiv 2502.05171; STARS; ordinary pretraining and SFT)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from looplm.models import LoopLMConfig, LoopLMForCausalLM, Trace
from looplm.objectives.linear_ce import linear_cross_entropy
from looplm.objectives.targets import (
    Batch,
    Metrics,
    hidden_rows,
    is_gate,
    last_loop,
    next_token_targets,
    target_weights,
)


@dataclass(frozen=True, kw_only=True)
class LastLoop:
    """mean over target tokens of CE_T; the gate, if there is one, is left untouched."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["last_loop"] = "last_loop"

    def needs(self, loops: int) -> set[int]:
        """The last loop alone is read."""
        return {loops}

    def check_loops(self, loops: int) -> None:
        """Any depth will do."""

    def check_model(self, config: LoopLMConfig) -> None:
        """Any model will do."""

    def trains(self, parameter_name: str) -> bool:
        """Everything but the gate learns."""
        return not is_gate(parameter_name)

    def __call__(self, model: LoopLMForCausalLM, trace: Trace, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss and its name; `trace` must keep the last loop and `batch["labels"]` is [B, S], -100 masked."""
        targets = next_token_targets(batch["labels"])
        rows = hidden_rows(model, trace, self.needs(last_loop(trace)))
        dtype = torch.promote_types(rows[0].dtype, torch.float32)
        weights = target_weights(batch, targets, dtype)
        loss, _ = linear_cross_entropy(rows, model.lm_head.weight, targets, weights[None])
        return loss, {"last_loop_loss": loss.detach()}
