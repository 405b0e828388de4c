"""How sure every loop is of its tokens, and how far the gradient through it points the same way over a group."""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from looplm.models import LoopLMForCausalLM
from looplm.objectives.linear_ce import IGNORED
from looplm.objectives.policy_gradient import PolicyGradient
from looplm.objectives.targets import hidden_rows
from looplm.rl.batches import Scored, padded
from looplm.rl.module import trajectories

_TINY = 1e-8  # under the logarithm, as in the paper


@torch.no_grad()
def signals(
    model: LoopLMForCausalLM, objective: PolicyGradient, group: Sequence[Scored], loops: int, pad: int, full_keys: bool,
    loop_logits: Tensor | None = None,
) -> dict[str, float]:  # fmt: skip
    """Of one prompt's completions: `entropy_loop{t}` (nats a token) and `log_snr_loop{t}` of every loop t that counts.

    The entropy is that of the tokens which did the loop. The signal-to-noise ratio is that of RLTT's Table of gradients
    (arXiv 2602.10520): over the group's completions, the squared norm of the mean gradient in a loop's logits over its
    total variance. A completion's gradient [V] is the mean over its tokens of A w_t (onehot - P_t).
    """
    batch = {name: value.to(model.device) for name, value in padded(group, pad, full_keys).items()}
    trace = trajectories(model, batch, loops, objective)
    kept, shape = sorted(trace.states), batch["labels"].shape
    hidden = [rows.view(*shape, -1) for rows in hidden_rows(model, trace, kept)]
    weights = objective.seen(trace, batch, loop_logits, torch.float32).weights(objective.loop_weights).view(-1, *shape)
    gradients = torch.zeros(len(kept), len(group), model.config.vocab_size)
    entropies: dict[int, list[float]] = {loop: [] for loop in kept}
    for row, one in enumerate(group):
        places = (batch["labels"][row] != IGNORED).nonzero().squeeze(-1)
        targets = batch["labels"][row, places]
        for index, loop in enumerate(kept):
            logits = model.lm_head(hidden[index][row, places - 1]) / objective.temperature
            log_p = logits.float().log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            entropies[loop] += entropy[batch["exits"][row, places] >= loop].tolist()
            share = one.advantage * weights[loop - 1, row, places - 1] / len(places)
            gradient = -(share[:, None] * log_p.exp()).sum(0)
            gradients[index, row] = gradient.index_add(0, targets, share).cpu()
    found = {f"entropy_loop{loop}": statistics.fmean(values) for loop, values in entropies.items() if values}
    for index, loop in enumerate(kept):
        if gradients[index].any():
            found[f"log_snr_loop{loop}"] = log_snr(gradients[index])
    return found


def log_snr(gradients: Tensor) -> float:
    """log(|mean|^2 / (total variance)) of gradients [R, V] of R completions, each with 1e-8 added."""
    mean = gradients.mean(0)
    variance = (gradients - mean).square().sum(1).mean()
    return ((mean.square().sum() + _TINY) / (variance + _TINY)).log().item()
