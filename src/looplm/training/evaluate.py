"""Held-out loss at every loop, trained and beyond."""

import torch
from torch import Tensor

from looplm.models import LoopLMForCausalLM
from looplm.objectives.targets import loop_losses, next_token_targets, target_weights


@torch.no_grad()
def held_out_losses(model: LoopLMForCausalLM, batches: dict[str, dict[str, Tensor]], loops: int) -> dict[str, float]:
    """`{source}/loss_loop{t}` for every source and t = 1..loops: mean cross-entropy over the source's targets."""
    found = {}
    for source, batch in batches.items():
        trace = model.model(
            batch["input_ids"], position_ids=batch["position_ids"], loops=loops, keep_loops="all", use_cache=False
        )
        targets = next_token_targets(batch["labels"])
        losses = loop_losses(model, trace, targets)
        means = (losses * target_weights(batch, targets, losses.dtype)).sum(-1)
        found |= {f"{source}/loss_loop{loop}": mean.item() for loop, mean in enumerate(means, start=1)}
    return found
