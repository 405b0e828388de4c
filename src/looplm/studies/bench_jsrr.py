"""Benchmark: what each form of the stability term adds to a training step, all forms in one run."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from looplm.analysis.allocations import peak_bytes
from looplm.objectives import (
    AdjacentL2,
    ExpectedLoss,
    FiniteDifference,
    JacobianVector,
    SecantRatio,
    Stability,
    StabilityForm,
    StabilityTerm,
    VectorJacobian,
)
from looplm.studies.step_problem import StepProblem
from looplm.studies.timing import seconds_in_turn

RECOMMENDED = "finite difference, 1 row in 8"
FORMS: dict[str, StabilityForm | None] = {
    "plain": None,
    "jacobian-vector (paper)": JacobianVector(),
    "vector-jacobian (code)": VectorJacobian(),
    "finite difference": FiniteDifference(),
    RECOMMENDED: FiniteDifference(every=8),
    "finite difference, 1 row in 8, warm": FiniteDifference(every=8, warm=True),
    "secant ratio": SecantRatio(),
    "adjacent L2": AdjacentL2(),
}


@dataclass(frozen=True, kw_only=True)
class JsrrProblem(StepProblem):
    """Sizes of the benchmark."""

    width: int = 256
    layers: int = 2
    loops: int = 4
    vocab: int = 2048
    length: int = 128
    rows: int = 8


@dataclass(frozen=True, kw_only=True)
class JsrrRow:
    """One form's training step: median seconds, time and peak memory over the plain step's, what it estimates."""

    form: str
    seconds: float
    time_ratio: float
    memory_ratio: float
    estimates: str


def bench_jsrr(problem: JsrrProblem, repeats: int) -> list[JsrrRow]:
    """Stage I steps (forward, backward, AdamW) plain and under every form in turn; the first round warms up.

    The time ratio is the median over rounds of a form's seconds over the plain step's in the same round, so that a
    machine that slows down for a while does not tilt it.
    """
    steps = {name: training_step(problem, form) for name, form in FORMS.items()}
    seconds = seconds_in_turn(steps, repeats)
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    return [
        JsrrRow(
            form=name,
            seconds=statistics.median(seconds[name]),
            time_ratio=statistics.median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)),
            memory_ratio=peaks[name] / peaks["plain"],
            estimates="" if form is None else form.estimates,
        )
        for name, form in FORMS.items()
    ]


def training_step(problem: JsrrProblem, form: StabilityForm | None) -> Callable[[], None]:
    """One optimiser step on random ids, with a model and an optimiser of its own."""
    model, objective = problem.model(), ExpectedLoss()
    term = None if form is None else StabilityTerm(Stability(form=form))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(problem.vocab, (problem.rows, problem.length), generator=torch.Generator().manual_seed(0))
    batch = {"labels": ids}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        trace = model.model(ids, keep_loops="all", use_cache=False)
        loss, _ = objective(model, trace, batch)
        if term is not None:
            loss = term.settings.mix(loss, term(model, trace, batch)[0])
        loss.backward()
        optimizer.step()
        if term is not None:
            term.end_step(lambda images: images)

    return step
