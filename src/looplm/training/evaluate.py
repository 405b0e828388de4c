"""Held-out loss at every loop, trained and beyond."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from looplm.models import LoopLMForCausalLM
from looplm.objectives.targets import Batch, loop_losses, next_token_targets, target_weights

_TOKENS_AT_ONCE = 2**13  # the states of all their loops are held


@torch.no_grad()
def losses_by_loop(model: LoopLMForCausalLM, batch: Batch, loops: int) -> Tensor:
    """The weighted cross-entropy [loops] of a batch, read at every loop: the mean over its targets without weights."""
    trace = model.model(
        batch["input_ids"], position_ids=batch["position_ids"], loops=loops, keep_loops="all", use_cache=False
    )
    targets = next_token_targets(batch["labels"])
    losses = loop_losses(model, trace, targets)
    return (losses * target_weights(batch, targets, losses.dtype)).sum(-1)


def held_out_losses(
    read: Callable[[Batch, int], Tensor], batches: Mapping[str, Batch], loops: int, device: torch.device
) -> dict[str, float]:
    """`{source}/loss_loop{t}` for every source and t = 1..loops: mean cross-entropy over the source's targets.

    `read` is `losses_by_loop` of a model; each batch goes through it in parts.
    """
    found = {}
    for source, batch in batches.items():
        count = (batch["labels"][:, 1:] != -100).sum().clamp(min=1)
        columns = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
        total = torch.zeros(loops, dtype=torch.float64)
        rows_at_once = max(1, _TOKENS_AT_ONCE // batch["labels"].shape[1])
        for parts in zip(*(column.split(rows_at_once) for column in columns.values()), strict=True):
            rows = {name: part.to(device) for name, part in zip(columns, parts, strict=True)}
            rows["weights"] = torch.full(rows["labels"].shape, 1 / count.item(), dtype=torch.float64, device=device)
            total += read(rows, loops).double().cpu()
        found |= {f"{source}/loss_loop{loop}": float(loss) for loop, loss in enumerate(total, start=1)}
    return found
