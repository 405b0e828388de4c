"""Weighted linear cross-entropy over rows = (loop, token) that never holds the logits of more than one chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Suffixes: N tokens, T loops, C rows of a chunk, D width, V vocabulary.

IGNORED = -100
CHUNK_ELEMENTS = 2**25  # logits held at once; large enough that the head gradient is a fat matrix product


def linear_cross_entropy(
    hidden_TND: Sequence[Tensor], weight_VD: Tensor, targets_N: Tensor, weights_TN: Tensor
) -> tuple[Tensor, Tensor]:
    """sum over t, n of weights[t, n] * nll[t, n], and the nll [T, N] itself (float32, detached).

    nll[t, n] = -log softmax(weight @ hidden[t][n])[targets[n]]; rows whose target is -100 cost nothing and count 0.
    The gradients of hidden states and head are made in the forward pass, chunk by chunk, and the logits dropped;
    the gradient of `weights_TN` is the nll. Peak memory beyond the hidden states and the gradients is one chunk of
    logits, whatever the number of loops and the vocabulary.

    Args:
        hidden_TND: T tensors [N, D], one a loop (a sequence, so that nothing is stacked and copied).
        weight_VD: the head.
        targets_N: token ids, -100 where ignored.
        weights_TN: row weights; fold a mean's denominator in here.
    """
    if weights_TN.shape != (len(hidden_TND), len(targets_N)):
        raise ValueError(
            f"weights have shape {list(weights_TN.shape)}; expected [loops, tokens] = "
            f"[{len(hidden_TND)}, {len(targets_N)}]"
        )
    if any(len(hidden_ND) != len(targets_N) for hidden_ND in hidden_TND):
        raise ValueError(f"hidden states have {len(hidden_TND[0])} rows, the targets {len(targets_N)}")
    weight_VD = weight_VD.to(hidden_TND[0].dtype)  # under autocast the states may be lower than the parameters
    with torch.autocast(weight_VD.device.type, enabled=False):
        return _LinearCrossEntropy.apply(torch.is_grad_enabled(), weight_VD, targets_N, weights_TN, *hidden_TND)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, with_grad, weight_VD, targets_N, weights_TN, *hidden_TND):
        wants_head = with_grad and ctx.needs_input_grad[1]
        wants_hidden = with_grad and any(ctx.needs_input_grad[4:])
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        nll_TN = weights_TN.new_zeros(weights_TN.shape, dtype=wide)
        head_grad = torch.zeros_like(weight_VD, dtype=wide) if wants_head else None
        hidden_grads = [torch.zeros_like(hidden) if wants_hidden else None for hidden in hidden_TND]
        kept = (targets_N != IGNORED).nonzero().squeeze(-1)
        chunk = max(1, CHUNK_ELEMENTS // weight_VD.shape[0])
        for loop, hidden_ND in enumerate(hidden_TND):
            for rows in kept.split(chunk):
                nll_TN[loop, rows] = _chunk(
                    hidden_ND, weight_VD, targets_N, weights_TN[loop], rows, head_grad, hidden_grads[loop]
                )
        ctx.grads = (None if head_grad is None else head_grad.to(weight_VD.dtype), nll_TN, hidden_grads)
        ctx.weights_dtype = weights_TN.dtype
        ctx.mark_non_differentiable(nll_TN)
        return (weights_TN * nll_TN).sum(), nll_TN

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        if ctx.grads is None:
            raise RuntimeError("the head loss was differentiated twice; call linear_cross_entropy again")
        (head_grad, nll_TN, hidden_grads), ctx.grads = ctx.grads, None
        scaled = [None if grad is None else grad.mul_(grad_loss) for grad in (head_grad, *hidden_grads)]
        weights_grad = (nll_TN * grad_loss).to(ctx.weights_dtype) if ctx.needs_input_grad[3] else None
        return None, scaled[0], None, weights_grad, *scaled[1:]


def _chunk(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, rows: Tensor,
    head_grad_VD: Tensor | None, hidden_grad_ND: Tensor | None,
) -> Tensor:  # fmt: skip
    """The nll [C] of `rows`; their gradients are added to the given buffers before the logits are dropped."""
    hidden_CD, targets_C = hidden_ND[rows], targets_N[rows]
    softmax_CV, nll_C = softmax_in_place(hidden_CD, weight_VD, targets_C)
    if head_grad_VD is None and hidden_grad_ND is None:
        return nll_C
    logits_grad_CV = logits_gradient(softmax_CV, targets_C, weights_N[rows]).to(weight_VD.dtype)
    if hidden_grad_ND is not None:
        hidden_grad_ND[rows] = logits_grad_CV @ weight_VD
    if head_grad_VD is not None:
        add_head_gradient(head_grad_VD, logits_grad_CV, hidden_CD)
    return nll_C


def logits_gradient(softmax_CV: Tensor, targets_C: Tensor, weights_C: Tensor) -> Tensor:
    """The gradient [C, V] of sum weights * nll in the logits, in the memory of their softmax."""
    weights_C = weights_C.to(softmax_CV.dtype)
    softmax_CV.mul_(weights_C[:, None])
    softmax_CV[torch.arange(len(targets_C), device=targets_C.device), targets_C] -= weights_C
    return softmax_CV


def softmax_in_place(hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """softmax of the chunk's logits [C, V] and the nll [C], in at least float32, in the logits' own memory."""
    logits_CV = hidden_CD @ weight_VD.T
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    logits_CV.sub_(logits_CV.amax(-1, keepdim=True))
    chosen_C = logits_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    total_C = logits_CV.exp_().sum(-1)
    return logits_CV.div_(total_C[:, None]), total_C.log() - chosen_C


def add_head_gradient(head_grad_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """Add the head's gradient from that of the logits; a wider buffer adds up many chunks' without loss."""
    if head_grad_VD.dtype == grad_CV.dtype:
        head_grad_VD.addmm_(grad_CV.T, hidden_CD)
    else:
        head_grad_VD.add_(grad_CV.T @ hidden_CD)
