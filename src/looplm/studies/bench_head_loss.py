"""Benchmark: the chunked head loss against a plain one that holds the logits of every loop."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.analysis.allocations import peak_bytes
from looplm.objectives import linear_cross_entropy

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
    methods: dict[str, Callable[[Problem], None]] = {"chunked": _chunked, "plain": _plain}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name, method in methods.items():
            began = time.perf_counter()
            method(problem)
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    return [
        HeadLossRow(
            method=name, loops=loops, seconds=statistics.median(seconds[name]),
            peak_bytes=peak_bytes(lambda method=method: method(problem)),
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
