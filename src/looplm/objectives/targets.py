"""Next-token targets of a batch, shared by the objectives."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.models import LoopLMForCausalLM, Trace
from looplm.objectives.linear_ce import IGNORED, linear_cross_entropy

Batch = Mapping[str, Tensor]
Metrics = dict[str, Tensor]


def next_token_targets(labels: Tensor) -> Tensor:
    """Targets [B*S] of labels [B, S]: each position predicts the next label; -100 where there is none.

    The labels shift, not the hidden states, so that [B, S, D] flattens without a copy.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()


def target_weights(batch: Batch, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Row weights [B*S] of the sum over targets, 0 where masked.

    1 / count makes it the batch's mean, and 0 where a batch has no targets at all. `batch["weights"]` [B, S], aligned
    with the labels, replaces that: a mixture weighs its sources by it, and the micro-batches of one step share a count.
    """
    valid = (targets != IGNORED).to(dtype)
    if "weights" not in batch:
        return valid / valid.sum().clamp(min=1)
    return valid * F.pad(batch["weights"][:, 1:], (0, 1)).flatten()


def hidden_rows(model: LoopLMForCausalLM, trace: Trace) -> list[Tensor]:
    """The head-ready hidden [B*S, D] of every loop of a trace that kept all of them."""
    loops = max(trace.states, default=0) if trace.gate_logits is None else trace.gate_logits.shape[-1]
    if sorted(trace.states) != list(range(1, loops + 1)):
        raise ValueError(f"the objective reads every loop, but the trace kept {sorted(trace.states)}; keep_loops='all'")
    return [model.hidden_at(trace, loop).flatten(0, 1) for loop in sorted(trace.states)]


@torch.no_grad()
def loop_losses(model: LoopLMForCausalLM, trace: Trace, targets: Tensor) -> Tensor:
    """The cross-entropy [loops, B*S] of every loop and token, 0 where the target is masked; no gradient."""
    rows = hidden_rows(model, trace)
    weights = torch.zeros(len(rows), len(targets), device=targets.device)
    return linear_cross_entropy(rows, model.lm_head.weight, targets, weights)[1]
