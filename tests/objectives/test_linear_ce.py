"""The chunked head against log-softmax over whole logits: values, every gradient, and memory."""

import pytest
import torch
from torch.nn import functional as F

from looplm.analysis.allocations import peak_bytes
from looplm.objectives import linear_ce
from looplm.objectives.linear_ce import linear_cross_entropy


def problem(loops=3, tokens=11, width=8, vocab=13, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(tokens, width, generator=generator, dtype=dtype).requires_grad_() for _ in range(loops)]
    head = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)
    weights = torch.rand(loops, tokens, generator=generator, dtype=dtype).requires_grad_()
    return hidden, head, targets, weights


def plain(hidden, head, targets, weights):
    nll = torch.stack([F.cross_entropy(h @ head.T, targets, reduction="none", ignore_index=-100) for h in hidden])
    return (weights * nll).sum(), nll


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 100])
@pytest.mark.parametrize("ignored", [[], [0], [2, 3, 4, 5], list(range(10))])
def test_value_and_gradients_equal_the_plain_head(monkeypatch, chunk_rows, ignored):
    monkeypatch.setattr(linear_ce, "CHUNK_ELEMENTS", chunk_rows * 13)
    hidden, head, targets, weights = problem()
    targets[ignored] = -100
    loss, nll = linear_cross_entropy(hidden, head, targets, weights)
    wanted, wanted_nll = plain(hidden, head, targets, weights)
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(nll, wanted_nll.detach(), atol=1e-6, rtol=0)
    assert not nll.requires_grad
    leaves = (*hidden, head, weights)
    for ours, theirs in zip(gradients(3 * loss, *leaves), gradients(3 * wanted, *leaves), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_near_float64(dtype):
    exact, low = problem(width=32, vocab=50), problem(width=32, vocab=50, dtype=dtype)
    low[0][:] = [h.detach().to(dtype).requires_grad_() for h in exact[0]]
    low = (low[0], exact[1].detach().to(dtype).requires_grad_(), exact[2], exact[3].detach().float().requires_grad_())
    loss, nll = linear_cross_entropy(*low)
    wanted, _ = plain(*exact)
    assert nll.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=0)
    for ours, theirs in zip(gradients(loss, low[1], *low[0]), gradients(wanted, exact[1], *exact[0]), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


def test_everything_ignored_is_zero():
    hidden, head, _, weights = problem()
    loss, nll = linear_cross_entropy(hidden, head, torch.full((11,), -100), weights)
    assert loss == 0
    assert (nll == 0).all()
    assert all((grad == 0).all() for grad in gradients(loss, *hidden, head, weights))


def test_only_what_needs_a_gradient_gets_one():
    hidden, head, targets, weights = problem()
    frozen = [h.detach() for h in hidden]
    (weights_grad,) = gradients(linear_cross_entropy(frozen, head.detach(), targets, weights)[0], weights)
    torch.testing.assert_close(weights_grad, plain(frozen, head, targets, weights)[1].detach())
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, head, targets, weights)[0].requires_grad


def test_a_second_backward_is_refused():
    hidden, head, targets, weights = problem()
    loss, _ = linear_cross_entropy(hidden, head, targets, weights)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        loss.backward()


def test_misshapen_weights_are_refused():
    hidden, head, targets, weights = problem()
    with pytest.raises(ValueError, match=r"weights have shape \[11, 3\]; expected \[loops, tokens\] = \[3, 11\]"):
        linear_cross_entropy(hidden, head, targets, weights.T)


def test_too_many_rows_are_refused():
    hidden, head, targets, weights = problem()
    with pytest.raises(ValueError, match="hidden states have 11 rows, the targets 5"):
        linear_cross_entropy(hidden, head, targets[:5], weights[:, :5])


def test_memory_does_not_grow_with_loops(monkeypatch):
    """N = 512 tokens, D = 64, V = 4,096, chunks of 128 rows: 1 to 8 loops, beyond hidden states and their gradients."""
    monkeypatch.setattr(linear_ce, "CHUNK_ELEMENTS", 128 * 4096)
    beyond = {}
    for loops in (1, 8):
        hidden, head, targets, weights = problem(loops, 512, 64, 4096, torch.float32)

        def work(hidden=hidden, head=head, targets=targets, weights=weights):
            linear_cross_entropy(hidden, head, targets, weights)[0].backward()

        gradient_bytes = loops * 512 * 64 * 4  # the hidden states themselves exist before
        beyond[loops] = peak_bytes(work) - gradient_bytes
    assert beyond[1] > 128 * 4096 * 4  # at least one chunk of logits was seen
    assert beyond[8] <= 1.10 * beyond[1]


def test_the_meter_sees_what_a_plain_head_holds():
    hidden, head, targets, weights = problem(4, 512, 64, 4096, torch.float32)
    held = peak_bytes(lambda: plain(hidden, head, targets, weights)[0].backward())
    assert held >= 4 * 512 * 4096 * 4
