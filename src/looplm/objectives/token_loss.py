"""A loss of every token's log-probabilities at all loops, whatever its form, that holds one chunk of logits."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from looplm.models.precision import at_least_float32
from looplm.objectives.linear_ce import (
    IGNORED,
    add_head_gradient,
    logits_gradient,
    softmax_in_place,
)

# Suffixes: N tokens, T loops, C tokens of a chunk, R of its (loop, token) pairs that are read, D width, V vocabulary.

CHUNK_ELEMENTS = 2**23  # logits held at once: few, since a chunk of every loop lies beside the states of all of them
LossOf = Callable[[Tensor, Sequence[Tensor]], Tensor]


def token_loss(
    hidden_TND: Sequence[Tensor], weight_VD: Tensor, targets_N: Tensor, read_TN: Tensor, loss_of: LossOf,
    given: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sum over n of loss_of(nll[:, n], given[..., n]), and the nll [T, N] itself (float32 or wider, detached).

    nll[t, n] = -log softmax(weight @ hidden[t][n])[targets[n]] where `read_TN`, else 0. `linear_cross_entropy` is the
    case of a loss linear in the nll; this one may bend (a clipped ratio, exp of a difference). Its gradients in hidden
    states, head and `given` are made in the forward pass, chunk by chunk of tokens with all their loops, so that peak
    memory is again one chunk of logits.

    Args:
        hidden_TND: T tensors [N, D], one a loop.
        weight_VD: the head.
        targets_N: token ids; -100 where there is none, which costs nothing.
        read_TN: where a loop is read at all.
        loss_of: (nll [T, C], given [..., C]) -> losses [C], each of its own token's column alone.
        given: further tensors [..., N] that the loss depends on; those that need a gradient get one.
    """
    shape = (len(hidden_TND), len(targets_N))
    if read_TN.shape != shape or any(tensor.shape[-1] != shape[1] for tensor in (*given, *(h.T for h in hidden_TND))):
        raise ValueError(f"hidden states, read_TN and given must all be of {shape[0]} loops and {shape[1]} tokens")
    weight_VD = weight_VD.to(hidden_TND[0].dtype)  # under autocast the states may be lower than the parameters
    grad = torch.is_grad_enabled()
    with torch.autocast(weight_VD.device.type, enabled=False):
        return _TokenLoss.apply(grad, loss_of, len(given), weight_VD, targets_N, read_TN, *given, *hidden_TND)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, with_grad, loss_of, num_given, weight_VD, targets_N, read_TN, *tensors):
        given, hidden_TND = tensors[:num_given], tensors[num_given:]
        needs = ctx.needs_input_grad[6:] if with_grad else (False,) * len(tensors)
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        nll_TN = torch.zeros(read_TN.shape, dtype=wide, device=targets_N.device)
        head_grad = torch.zeros_like(weight_VD, dtype=wide) if with_grad and ctx.needs_input_grad[3] else None
        grads = [torch.zeros_like(x) if need else None for x, need in zip(tensors, needs, strict=True)]
        total = torch.zeros((), dtype=wide, device=targets_N.device)
        kept = (targets_N != IGNORED).nonzero().squeeze(-1)
        for rows in kept.split(max(1, CHUNK_ELEMENTS // (weight_VD.shape[0] * len(hidden_TND)))):
            loops_R, places_R = read_TN[:, rows].nonzero(as_tuple=True)  # in order of loops
            counts = read_TN[:, rows].sum(-1).tolist()
            own = [rows[places] for places in places_R.split(counts)]
            hidden_RD = torch.cat([hidden_ND[mine] for hidden_ND, mine in zip(hidden_TND, own, strict=True)])
            targets_R = targets_N[rows[places_R]]
            softmax_RV, nll_R = softmax_in_place(hidden_RD, weight_VD, targets_R)
            nll_TC = nll_R.new_zeros(len(hidden_TND), len(rows)).index_put((loops_R, places_R), nll_R)
            nll_TN[:, rows] = nll_TC
            loss, nll_grad_TC, given_grads = _bend(loss_of, nll_TC, [x[..., rows] for x in given], needs[:num_given])
            total += loss
            for buffer, grad in zip(grads, given_grads, strict=False):
                if buffer is not None:
                    buffer[..., rows] = grad
            if head_grad is None and not any(needs[num_given:]):
                continue
            logits_grad_RV = logits_gradient(softmax_RV, targets_R, nll_grad_TC[loops_R, places_R]).to(weight_VD.dtype)
            if any(needs[num_given:]):
                parts = (logits_grad_RV @ weight_VD).split(counts)
                for buffer, mine, part in zip(grads[num_given:], own, parts, strict=True):
                    if buffer is not None:
                        buffer[mine] = part
            if head_grad is not None:
                add_head_gradient(head_grad, logits_grad_RV, hidden_RD)
        ctx.grads = (None if head_grad is None else head_grad.to(weight_VD.dtype), grads)
        ctx.mark_non_differentiable(nll_TN)
        return total, nll_TN

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        if ctx.grads is None:
            raise RuntimeError("the token loss was differentiated twice; call token_loss again")
        (head_grad, grads), ctx.grads = ctx.grads, None
        head_grad, *grads = [None if grad is None else grad.mul_(grad_loss) for grad in (head_grad, *grads)]
        return None, None, None, head_grad, None, None, *grads


def _bend(
    loss_of: LossOf, nll_TC: Tensor, given: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The chunk's loss, and its gradients in the nll and in those of `given` that need one."""
    leaves = [
        nll_TC.detach().requires_grad_(),
        *(x.detach().requires_grad_(n) for x, n in zip(given, needs, strict=True)),
    ]
    with torch.enable_grad():
        loss = loss_of(leaves[0], leaves[1:]).sum()
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted, materialize_grads=True) if loss.requires_grad else ())
    nll_grad, *others = [next(found, None) if leaf.requires_grad else None for leaf in leaves]
    return loss.detach(), torch.zeros_like(nll_TC) if nll_grad is None else nll_grad, others


def loop_logprobs(
    hidden_TND: Sequence[Tensor], weight_VD: Tensor, targets_N: Tensor, read_TN: Tensor
) -> Tensor:  # fmt: skip
    """log softmax(weight @ hidden[t][n])[targets[n]] [T, N] where `read_TN` and there is a target, else 0.

    For a loss that others make of them, whose gradient only the backward pass knows: the head then runs once more, and
    no more than one chunk of logits is held here, too. Arguments as in `token_loss`.
    """
    return _LoopLogProbs.apply(weight_VD, targets_N, read_TN, *hidden_TND)


class _LoopLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VD, targets_N, read_TN, *hidden_TND):
        ctx.save_for_backward(targets_N, read_TN, weight_VD, *hidden_TND)
        return -token_loss(hidden_TND, weight_VD, targets_N, read_TN, lambda nll_TC, _: nll_TC.sum(0), [])[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TN):
        targets_N, read_TN, *inputs = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        weight_VD, *hidden_TND = leaves = [x.detach().requires_grad_(n) for x, n in zip(inputs, needs, strict=True)]
        with torch.enable_grad():
            loss, _ = token_loss(hidden_TND, weight_VD, targets_N, read_TN, _against, [grad_TN])
        found = iter(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))
        weight_grad, *hidden_grads = [next(found) if need else None for need in needs]
        return weight_grad, None, None, *hidden_grads


def _against(nll_TC: Tensor, given: Sequence[Tensor]) -> Tensor:
    return -(nll_TC * given[0]).sum(0)


def entropies(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """The entropy [N] of softmax(weight @ hidden[n]) in nats where there is a target, else 0; again by chunks."""
    kept, weight_VD = (targets_N != IGNORED).nonzero().squeeze(-1), weight_VD.to(hidden_ND.dtype)
    chunks = kept.split(max(1, CHUNK_ELEMENTS // weight_VD.shape[0]))
    found = torch.cat([checkpoint(_entropies, hidden_ND[rows], weight_VD, use_reentrant=False) for rows in chunks])
    return found.new_zeros(len(targets_N)).index_put((kept,), found)


def _entropies(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    log_p = at_least_float32(hidden_CD @ weight_VD.T).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)
