"""Priors over loops against sums, hand values and sampled depths."""

import math
from typing import Annotated

import numpy as np
import pytest
import torch
from pydantic import Field, TypeAdapter, ValidationError

from looplm.objectives import (
    ExpectedLoss,
    FixedPrior,
    GeometricPrior,
    Objective,
    PoissonLogNormalPrior,
    UniformPrior,
)


@pytest.mark.parametrize("loops", [1, 2, 7, 200])
@pytest.mark.parametrize(
    "prior",
    [
        UniformPrior(),
        GeometricPrior(p=0.1),
        GeometricPrior(p=0.9),
        PoissonLogNormalPrior(),
        PoissonLogNormalPrior(mean=32.0, sigma=0.0),
        PoissonLogNormalPrior(mean=0.1, sigma=2.0),
    ],
    ids=str,
)
def test_priors_sum_to_one_and_have_finite_logs(prior, loops):
    log_pdf = prior.log_pdf(loops)
    assert log_pdf.shape == (loops,)
    assert log_pdf.isfinite().all()
    assert log_pdf.exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_by_hand():
    assert UniformPrior().log_pdf(4).exp().tolist() == pytest.approx([0.25] * 4)
    assert GeometricPrior(p=0.5).log_pdf(3).exp().tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    poisson = [math.exp(-2), 2 * math.exp(-2), 2 * math.exp(-2)]  # counts 0, 1, 2 of mean 2
    wanted = [mass / sum(poisson) for mass in poisson]
    assert PoissonLogNormalPrior(mean=2.0, sigma=0.0).log_pdf(3).exp().tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(("mean", "sigma"), [(3.0, 0.5), (32.0, 0.5), (1.0, 1.0)])
def test_the_log_normal_mixture_equals_an_integral_over_the_rate(mean, sigma):
    """Over the rate itself, not its logarithm: int Poisson(t - 1; r) LogNormal(r) dr as a sum over a fine grid."""
    rates, width = np.linspace(0, 2000, 1_000_001, retstep=True)
    rates = rates[1:]
    deviation = (np.log(rates) - math.log(mean) + sigma**2 / 2) / sigma
    log_density = -(deviation**2) / 2 - np.log(rates * sigma * math.sqrt(2 * math.pi))
    masses = PoissonLogNormalPrior(mean=mean, sigma=sigma).log_mass(60).exp().tolist()
    for loop in (1, 2, 5, 24, 60):
        log_poisson = (loop - 1) * np.log(rates) - rates - math.lgamma(loop)
        wanted = np.exp(log_poisson + log_density).sum() * width
        assert masses[loop - 1] == pytest.approx(wanted, rel=1e-6)


def test_huginns_prior_has_the_papers_statistics():
    """Mean 33, median 29, mode 24, and all of its mass."""
    mass = PoissonLogNormalPrior(mean=32.0).log_mass(2000).exp()
    loops = torch.arange(1, 2001)
    assert mass.sum().item() == pytest.approx(1, abs=1e-9)
    assert (loops * mass).sum().item() == pytest.approx(33, abs=1e-6)
    assert int((mass.cumsum(0) < 0.5).sum()) + 1 == pytest.approx(29, abs=1)
    assert int(mass.argmax()) + 1 == pytest.approx(24, abs=2)


def test_recipes_choose_a_prior_by_its_kind():
    adapter = TypeAdapter(Annotated[Objective, Field(discriminator="kind")])
    values = {"kind": "expected_loss", "beta": 0.05, "prior": {"kind": "geometric", "p": 0.3}}
    objective = adapter.validate_python(values)
    assert objective == ExpectedLoss(prior=GeometricPrior(p=0.3))
    assert adapter.dump_python(objective, mode="json") == values
    assert adapter.validate_python({"kind": "fixed_prior"}) == FixedPrior(prior=UniformPrior())


@pytest.mark.parametrize(
    ("prior", "where", "message"),
    [
        ({"kind": "geometric", "q": 0.3}, ("prior", "geometric", "q"), "Unexpected keyword"),
        (
            {"kind": "geometric", "p": 2.0},
            ("prior", "geometric"),
            "p=2.0 of a geometric prior must lie between 0 and 1",
        ),
        ({"kind": "normal"}, ("prior",), "expected tags: 'uniform', 'geometric', 'poisson_log_normal'"),
    ],
)
def test_a_wrong_prior_in_a_recipe_is_named(prior, where, message):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(ExpectedLoss).validate_python({"prior": prior})
    (problem,) = caught.value.errors()
    assert problem["loc"] == where
    assert message in problem["msg"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GeometricPrior(p=0.0), "p=0.0 of a geometric prior"),
        (lambda: GeometricPrior(p=1.0), "p=1.0 of a geometric prior"),
        (lambda: PoissonLogNormalPrior(mean=0.0), "mean > 0"),
        (lambda: PoissonLogNormalPrior(sigma=-1.0), "sigma >= 0"),
    ],
)
def test_priors_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
