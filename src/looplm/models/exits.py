"""The exit distribution over loops and the quantile exit rule, in float32 log space (Ouro, arXiv 2510.25741).

lambda_t = sigmoid(gate_t); S_t = prod_{s<=t} (1 - lambda_s); p_t = lambda_t S_{t-1} for t < T and p_T = S_{T-1}.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.models.precision import at_least_float32


def log_survival(gate_logits: Tensor) -> Tensor:
    """log S_t [..., T] of gate logits [..., T]: the log-probability of not having left by loop t."""
    return F.logsigmoid(-at_least_float32(gate_logits)).cumsum(-1)


def exit_log_pdf(gate_logits: Tensor) -> Tensor:
    """log p_t [..., T]; finite for any finite logits, and p sums to 1 over the loops."""
    survival = log_survival(gate_logits)[..., :-1]
    before = F.pad(survival, (1, 0))
    leave = F.logsigmoid(at_least_float32(gate_logits)[..., :-1])
    return torch.cat([before[..., :-1] + leave, before[..., -1:]], dim=-1)


def exit_pdf(gate_logits: Tensor) -> Tensor:
    """p_t [..., T], float32."""
    return exit_log_pdf(gate_logits).exp()


def exit_cdf(gate_logits: Tensor) -> Tensor:
    """CDF_t = 1 - S_t [..., T] for t < T, and exactly 1 at the last loop."""
    cdf = -torch.expm1(log_survival(gate_logits))
    return torch.cat([cdf[..., :-1], torch.ones_like(cdf[..., :1])], dim=-1)


def exit_loops(gate_logits: Tensor, q: float, min_loops: int = 1) -> Tensor:
    """The first loop from `min_loops` on whose CDF reaches q, 1-based [...]; the last loop if none does.

    q >= 1 always means all loops, even where the gate saturates; q = 0 leaves at `min_loops`, a floor such as
    RecurTrace's (arXiv 2609.03379).
    """
    if math.isnan(q) or q < 0:
        raise ValueError(f"exit threshold q={q} must be between 0 (first loop) and 1 (all loops)")
    num_loops = gate_logits.shape[-1]
    if not 1 <= min_loops <= num_loops:
        raise ValueError(f"min_loops={min_loops} must be between 1 and the call's loops, {num_loops}")
    if q >= 1:
        return torch.full(gate_logits.shape[:-1], num_loops, device=gate_logits.device)
    # 1 - S_t >= q is compared as log S_t <= log(1 - q): near q = 1 the CDF itself rounds to 1.
    reached = log_survival(gate_logits) <= math.log1p(-q)
    reached[..., : min_loops - 1] = False
    reached[..., -1] = True
    return reached.int().argmax(-1) + 1
