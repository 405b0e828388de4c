"""Next-token targets of a batch, shared by the objectives."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.models import LoopLMForCausalLM, LoopModelOutput
from looplm.objectives.linear_ce import IGNORED, linear_cross_entropy

Batch = Mapping[str, Tensor]
Metrics = dict[str, Tensor]


def next_token_targets(labels: Tensor) -> Tensor:
    """Targets [B*S] of labels [B, S]: each position predicts the next label; -100 where there is none.

    The labels shift, not the hidden states, so that [B, S, D] flattens without a copy.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()


def num_targets(batch: Batch, targets: Tensor) -> Tensor:
    """The denominator of a mean over targets: the batch's own count, or `batch["num_targets"]`, which a micro-batch
    sets to the count of its whole step. Never below 1, so that a batch without targets has loss 0.
    """
    return batch.get("num_targets", (targets != IGNORED).sum()).clamp(min=1)


def hidden_rows(model: LoopLMForCausalLM, trace: LoopModelOutput) -> list[Tensor]:
    """The head-ready hidden [B*S, D] of every loop of a trace that kept all of them."""
    return [model.hidden_at(trace, loop).flatten(0, 1) for loop in range(1, trace.gate_logits.shape[-1] + 1)]


@torch.no_grad()
def loop_losses(model: LoopLMForCausalLM, trace: LoopModelOutput, targets: Tensor) -> Tensor:
    """The cross-entropy [loops, B*S] of every loop and token, 0 where the target is masked; no gradient."""
    rows = hidden_rows(model, trace)
    weights = torch.zeros(len(rows), len(targets), device=targets.device)
    return linear_cross_entropy(rows, model.lm_head.weight, targets, weights)[1]
