"""What the objectives share: next-token targets and their weights, and the rows of a trace that they read."""

from collections.abc import Iterable, Mapping

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
    return valid * F.pad(batch["weights"][:, 1:], (0, 1)).flatten().to(dtype)


def is_gate(parameter_name: str) -> bool:
    """Whether a parameter of `LoopLMForCausalLM` belongs to the exit gate."""
    return parameter_name.startswith("model.exit_gate.")


def all_loops(loops: int) -> set[int]:
    """The loops 1..`loops`."""
    return set(range(1, loops + 1))


def last_loop(trace: Trace) -> int:
    """The last loop that was run; of a model without a gate, the last that was kept."""
    return max(trace.states, default=0) if trace.gate_logits is None else trace.gate_logits.shape[-1]


def hidden_rows(model: LoopLMForCausalLM, trace: Trace, loops: Iterable[int] | None = None) -> list[Tensor]:
    """The head-ready hidden [B*S, D] of each of `loops` in order, all by default; the trace may have kept more.

    Raises:
        ValueError: if a loop that is read was not kept.
    """
    wanted = sorted(all_loops(last_loop(trace)) if loops is None else loops)
    if not wanted or not trace.states.keys() >= set(wanted):
        raise ValueError(
            f"the objective reads loops {wanted}, but the trace kept {sorted(trace.states)}; name them in keep_loops"
        )
    return [model.hidden_at(trace, loop).flatten(0, 1) for loop in wanted]


def gate_rows(model: LoopLMForCausalLM, trace: Trace, loops: Iterable[int]) -> Tensor:
    """The gate logits [loops, B*S] of `loops`, whose gradient reaches the gate and nothing before it."""
    return torch.stack([model.model.gate(trace.states[loop].detach()).flatten() for loop in loops])


@torch.no_grad()
def loop_losses(model: LoopLMForCausalLM, trace: Trace, targets: Tensor) -> Tensor:
    """The cross-entropy [loops, B*S] of every loop and token, 0 where the target is masked; no gradient."""
    rows = hidden_rows(model, trace)
    weights = torch.zeros(len(rows), len(targets), device=targets.device)
    return linear_cross_entropy(rows, model.lm_head.weight, targets, weights)[1]


@torch.no_grad()
def loop_metrics(name: str, values: Tensor, weights: Tensor) -> Metrics:
    """`{name}{t}`: the weighted sum over tokens of values [loops, B*S], for every loop t."""
    return {f"{name}{loop}": row for loop, row in enumerate((values * weights).sum(-1), start=1)}
