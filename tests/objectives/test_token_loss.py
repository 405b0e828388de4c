"""The bent head loss against plain autograd over whole logits: values, every gradient, rows left out, memory."""

import pytest
import torch
from torch.nn import functional as F

from looplm.analysis.allocations import peak_bytes
from looplm.objectives import token_loss as module
from looplm.objectives.token_loss import entropies, loop_logprobs, token_loss

LOOPS, TOKENS, WIDTH, VOCAB = 3, 11, 8, 13


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(LOOPS)]
    head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    read = torch.rand(LOOPS, TOKENS, generator=generator) < 0.7
    given = [torch.rand(LOOPS, TOKENS, generator=generator, dtype=torch.float64), torch.arange(TOKENS) % 3]
    return (
        [h.requires_grad_() for h in hidden],
        head.requires_grad_(),
        targets,
        read,
        [given[0].requires_grad_(), given[1]],
    )


def bent(nll, given):
    weights, kinds = given
    mixed = (weights * nll).sum(0)
    return torch.where(kinds == 0, mixed.exp().clamp(max=2.0), mixed.square()) + 0.3 * weights[0]


def plain(hidden, head, targets, read, given):
    nll = torch.stack([F.cross_entropy(h @ head.T, targets, reduction="none", ignore_index=-100) for h in hidden])
    nll = nll * read
    kept = targets != -100
    return bent(nll[:, kept], [x[..., kept] for x in given]).sum(), nll


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 100])
@pytest.mark.parametrize("ignored", [[], [0], [2, 3, 4, 5], list(range(11))])
def test_value_and_gradients_equal_the_plain_loss(monkeypatch, chunk_tokens, ignored):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_tokens * VOCAB * LOOPS)
    hidden, head, targets, read, given = problem()
    targets[ignored] = -100
    loss, nll = token_loss(hidden, head, targets, read, bent, given)
    wanted, wanted_nll = plain(hidden, head, targets, read, given)
    torch.testing.assert_close(loss, wanted, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(nll, wanted_nll.detach() * (targets != -100), atol=1e-10, rtol=1e-10)
    assert not nll.requires_grad
    leaves = (*hidden, head, given[0])
    theirs = torch.autograd.grad(3 * wanted, leaves, materialize_grads=True)
    for ours, other in zip(torch.autograd.grad(3 * loss, leaves), theirs, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-10, rtol=1e-10)


def test_only_what_needs_a_gradient_gets_one():
    hidden, head, targets, read, given = problem()
    frozen = [h.detach() for h in hidden]
    loss, _ = token_loss(frozen, head.detach(), targets, read, bent, given)
    (ours,) = torch.autograd.grad(loss, given[0])
    (theirs,) = torch.autograd.grad(plain(frozen, head.detach(), targets, read, given)[0], given[0])
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert not token_loss(hidden, head, targets, read, bent, given)[0].requires_grad


def test_shapes_that_do_not_fit_are_refused():
    hidden, head, targets, read, given = problem()
    with pytest.raises(ValueError, match="of 3 loops and 11 tokens"):
        token_loss(hidden, head, targets, read[:2], bent, given)
    with pytest.raises(ValueError, match="of 3 loops and 11 tokens"):
        token_loss(hidden, head, targets, read, bent, [given[0][:, :5], given[1]])


def test_memory_does_not_grow_with_loops(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64 * 4096)

    def peak(loops):
        hidden = [torch.randn(512, 16).requires_grad_() for _ in range(loops)]
        head, targets = torch.randn(4096, 16).requires_grad_(), torch.randint(4096, (512,))
        read = torch.ones(loops, 512, dtype=torch.bool)
        return peak_bytes(lambda: token_loss(hidden, head, targets, read, lambda nll, _: nll.sum(0), [])[0].backward())

    assert peak(8) < 1.1 * peak(1) + 8 * 2 * 512 * 16 * 4  # and the gradients of the hidden states


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_log_probabilities_bear_any_gradient(monkeypatch, chunk_tokens, frozen_head):
    """A loss made of them afterwards, also across tokens, has the gradient that autograd gives whole logits."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_tokens * VOCAB * LOOPS)
    hidden, head, targets, read, given = problem()
    targets[[2, 5]] = -100
    head = head.detach().requires_grad_(not frozen_head)
    ours = loop_logprobs(hidden, head, targets, read)
    theirs = -plain(hidden, head, targets, read, given)[1]
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    leaves = hidden if frozen_head else [*hidden, head]
    found, wanted = (
        torch.autograd.grad((given[0].detach() * x).sum(0).exp().sum().sqrt() + x.var(), leaves) for x in (ours, theirs)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    with torch.no_grad():
        assert torch.equal(loop_logprobs(hidden, head, targets, read), ours)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("ignored", [[2, 5], list(range(11))])
def test_entropies_are_those_of_whole_logits(monkeypatch, chunk_tokens, ignored):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_tokens * VOCAB)
    (hidden, *_), head, targets, *_ = problem()
    targets[ignored] = -100
    ours = entropies(hidden, head, targets)
    theirs = torch.distributions.Categorical(logits=hidden @ head.T).entropy() * (targets != -100)
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    for one, other in zip(
        *(torch.autograd.grad(x.square().sum(), (hidden, head)) for x in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
