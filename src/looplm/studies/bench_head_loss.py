"""Benchmark: the chunked head loss against a plain one that holds the logits of every loop."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.analysis.allocations import peak_bytes
from looplm.objectives import linear_cross_entropy
from looplm.studies.timing import seconds_in_turn

Problem = tuple[list[Tensor], Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class HeadLossRow:
    """One method at one loop count: median seconds of forward and backward, and peak bytes it allocated."""

    method: str
    loops: int
    seconds: float
    peak_bytes: int


def bench_head_loss(tokens: int, width: int, vocab: int, loops: int, repeats: int) -> list[HeadLossRow]:
    """Time and measure both methods in turn, on the same random problem, forward and backward."""
    problem = _problem(tokens, width, vocab, loops)
    methods: dict[str, Callable[[], None]] = {"chunked": partial(_chunked, problem), "plain": partial(_plain, problem)}
    seconds = seconds_in_turn(methods, repeats)
    return [
        HeadLossRow(
            method=name, loops=loops, seconds=statistics.median(seconds[name]),
            peak_bytes=peak_bytes(method),
        )
        for name, method in methods.items()
    ]  # fmt: skip


def _problem(tokens: int, width: int, vocab: int, loops: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(tokens, width, generator=generator).requires_grad_() for _ in range(loops)]
    head = (torch.randn(vocab, width, generator=generator) / width**0.5).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)
    pdf = torch.randn(loops, tokens, generator=generator).softmax(0).requires_grad_()
    return hidden, head, targets, pdf


def _chunked(problem: Problem) -> None:
    hidden, head, targets, pdf = problem
    loss, _ = linear_cross_entropy(hidden, head, targets, pdf / len(targets))
    torch.autograd.grad(loss, [*hidden, head, pdf])


def _plain(problem: Problem) -> None:
    hidden, head, targets, pdf = problem
    logits = [rows @ head.T for rows in hidden]
    nll = torch.stack([F.cross_entropy(rows, targets, reduction="none") for rows in logits])
    torch.autograd.grad((pdf * nll).sum() / len(targets), [*hidden, head, pdf])
