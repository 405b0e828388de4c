"""The stability kit against explicit Jacobians of small float64 models and of linear stand-ins."""

import copy
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn.attention import SDPBackend, sdpa_kernel

from conftest import random_ids, tiny_model
from looplm.models.context import NoStore
from looplm.objectives import (
    AdjacentL2,
    ExpectedLoss,
    FiniteDifference,
    GateRegression,
    JacobianVector,
    SecantRatio,
    Stability,
    StabilityTerm,
    VectorJacobian,
)
from looplm.objectives.probes import core_step, squared_norms

FAMILIES = {
    "ouro": {},
    "huginn": {
        "prelude_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
        "injection": "concat", "state_init": "normal", "rope": "adjacent", "exit_gate": False,
    },
    "noisy": {"injection": "diagonal", "state_init": "zero", "state_noise": 0.1, "step_conditioning": True},
}  # fmt: skip
PROBES = [JacobianVector(), VectorJacobian(), FiniteDifference(epsilon=1e-4)]
PER_ROW = [
    *PROBES, JacobianVector(steps=3), VectorJacobian(steps=3), JacobianVector(warm=True), FiniteDifference(warm=True),
    SecantRatio(target=0.1), AdjacentL2(),
]  # fmt: skip


def small(family="ouro", **changes):
    size = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "initializer_range": 0.5}
    return tiny_model(**(size | FAMILIES[family] | changes)).double().train()


def run(model, rows=1, loops=3, seeds=0, **arguments):
    return model.model(
        random_ids(rows, 4), loops=loops, keep_loops="all", use_cache=False, state_seed=seeds, **arguments
    )


def probed(model, trace, rows=(0,)):
    """phi, the state it is probed at, and the explicit Jacobian [n, n] of the first row."""
    loops = max(trace.states)
    phi, x = core_step(model, trace, loops, torch.tensor(rows)), trace.states[loops].detach()[list(rows)]
    first = core_step(model, trace, loops, torch.tensor(rows[:1]))
    return phi, x, torch.autograd.functional.jacobian(first, x[:1]).reshape(x[0].numel(), -1)


def batch_of(rows, seeds=None, num_rows=None):
    rows = torch.as_tensor(rows)
    batch = {"labels": random_ids(len(rows), 4), "rows": rows}
    if seeds is not None:
        batch["row_seeds"] = torch.as_tensor(seeds)
    if num_rows is not None:
        batch["num_rows"] = torch.tensor(num_rows)
    return batch


# What each form measures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", PROBES, ids=lambda form: form.kind)
def test_a_probe_measures_the_product_with_its_own_v(family, form):
    model = small(family)
    phi, x, jacobian = probed(model, run(model))
    v = form.draw(torch.tensor([5]), x)
    assert torch.linalg.vector_norm(v).item() == pytest.approx(1)
    matrix = jacobian.T if form.kind == "vector_jacobian" else jacobian
    wanted = (matrix @ v.flatten()).pow(2).sum()
    exact = form.kind != "finite_difference"
    torch.testing.assert_close(form.measure(phi, x, v)[0], wanted[None], rtol=1e-9 if exact else 1e-3, atol=0)


@pytest.mark.parametrize("form", PROBES, ids=lambda form: form.kind)
def test_the_mean_over_v_is_the_mean_squared_singular_value(form):
    model, many = small(), 4000
    phi, x, jacobian = probed(model, run(model), rows=(0,) * many)
    values, _ = form.measure(phi, x, form.draw(torch.arange(many), x))
    standard_error = values.std() / many**0.5
    mean_square = jacobian.pow(2).sum() / len(jacobian)
    assert standard_error < 0.02 * mean_square
    assert (values.mean() - mean_square).abs() < 4 * standard_error


def test_the_published_form_falls_with_the_number_of_rows():
    model, form = small(), VectorJacobian(whole_tensor=True)
    phi, x, jacobian = probed(model, run(model), rows=(0, 0, 0))
    v = form.draw(torch.tensor([1, 2, 3]), x)
    assert torch.linalg.vector_norm(v).item() == pytest.approx(1)
    values, _ = form.measure(phi, x, v)
    torch.testing.assert_close(values.mean(), (v.flatten(1) @ jacobian).pow(2).sum())
    many = 3000
    phi, x, jacobian = probed(model, run(model), rows=(0,) * many)
    values, _ = form.measure(phi, x, form.draw(torch.arange(many), x))
    assert values.mean().item() == pytest.approx(jacobian.pow(2).sum().item() / (len(jacobian)), rel=0.05)
    assert "depends on the batch" in form.estimates


def test_the_difference_tends_to_the_product():
    model = small()
    phi, x, jacobian = probed(model, run(model))
    v = FiniteDifference().draw(torch.tensor([5]), x)
    exact = (jacobian @ v.flatten()).pow(2).sum()
    errors = [
        (FiniteDifference(epsilon=epsilon).measure(phi, x, v)[0] / exact - 1).abs().item()
        for epsilon in (1e-2, 1e-4, 1e-6)
    ]
    assert errors[0] < 0.1
    assert errors[1] < 2e-2 * errors[0]
    assert errors[2] < 2e-2 * errors[1]


def linear(*matrix):
    matrix = torch.tensor(matrix, dtype=torch.float64)
    return matrix, lambda x: x @ matrix.T


SYMMETRIC, TURN, JORDAN = ((0.5, 0.5), (0.5, 0.5)), ((0.0, -0.9), (0.9, 0.0)), ((0.5, 10.0), (0.0, 0.5))


@pytest.mark.parametrize("kind", [JacobianVector, VectorJacobian])
@pytest.mark.parametrize(("matrix", "mean", "limit"), [(SYMMETRIC, 0.5, 1), (TURN, 0.81, 0.81), (JORDAN, 50.25, 0.25)])
def test_two_by_two(kind, matrix, mean, limit):
    """rho = 1; rho = 0.9 though v never settles; rho = 0.5 though the norm is about 10."""
    matrix, phi = linear(*matrix)
    x = torch.zeros(20_000, 1, 2, dtype=torch.float64)
    assert kind().measure(phi, x, kind().draw(torch.arange(len(x)), x))[0].mean().item() == pytest.approx(
        mean, rel=0.02
    )
    form = kind(steps=1000)
    found = form.measure(phi, x[:1], form.draw(torch.tensor([1]), x[:1]))[0].item()
    assert found == pytest.approx(limit, rel=5e-3)


@pytest.mark.parametrize("form", [JacobianVector(steps=400), VectorJacobian(steps=400)], ids=lambda form: form.kind)
def test_many_steps_find_the_dominant_eigenvalue_of_a_model(form):
    model = small(core_layers=1)
    phi, x, jacobian = probed(model, run(model))
    eigenvalues = torch.linalg.eigvals(jacobian)
    first, second = eigenvalues[eigenvalues.abs().argsort(descending=True)[:2]]
    assert first.imag == 0
    assert second.abs() < 0.97 * first.abs()
    found = form.measure(phi, x, form.draw(torch.tensor([5]), x))[0].item()
    assert found == pytest.approx(first.abs().item() ** 2, rel=1e-4)


def test_secant_and_adjacent_by_hand():
    states = {1: 0.0, 2: 1.0, 3: 1.5, 4: 3.0}
    states = {loop: torch.full((2, 3, 5), value) for loop, value in states.items()}
    rows, real = torch.tensor([0, 1]), torch.ones(2, 3, dtype=torch.bool)
    assert SecantRatio().values(states, 4, rows, real).tolist() == pytest.approx([2, 2])  # 1.5 / 0.5 - 1
    assert SecantRatio().values(states, 3, rows, real).tolist() == [0, 0]  # 0.5 / 1 - 1 is below 0
    assert SecantRatio().values(states, 2, rows, real).tolist() == [0, 0]
    assert AdjacentL2().values(states, 4, rows, real).tolist() == pytest.approx([(1 + 0.25 + 2.25) / 3] * 2)
    assert AdjacentL2().values(states, 1, rows, real).tolist() == [0, 0]
    assert SecantRatio().needs(5) == {3, 4, 5}
    assert SecantRatio().needs(2) == {1, 2}
    assert AdjacentL2().needs(3) == {1, 2, 3}
    assert JacobianVector().needs(7) == {7}


def test_a_state_that_stands_still_gives_no_nan():
    states = {loop: torch.ones(1, 2, 3, requires_grad=True) for loop in (1, 2, 3)}
    SecantRatio(target=0.0).values(states, 3, torch.tensor([0]), torch.tensor([[True, False]])).sum().backward()
    assert states[3].grad.isfinite().all()


# Gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("ouro", "eager")])
@pytest.mark.parametrize(
    "form",
    [JacobianVector(), VectorJacobian(), FiniteDifference(), VectorJacobian(whole_tensor=True), SecantRatio(target=0.1),
     AdjacentL2()],
    ids=lambda form: form.kind,
)  # fmt: skip
def test_the_gradient_is_that_of_the_penalty(family, attention, form):
    """Against central differences along random directions of all weights; a probe's state and inputs stay."""
    model, term = small(family), StabilityTerm(Stability(form=form))
    model.set_attn_implementation(attention)
    parameters = list(model.parameters())
    fixed = run(model, rows=2)
    on_trajectory = isinstance(form, SecantRatio | AdjacentL2)

    def penalty():
        return term(model, run(model, rows=2) if on_trajectory else fixed, batch_of([0, 1]))[0]

    value = penalty()
    assert value > 0
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    assert sum(gradient.abs().sum() for gradient in gradients) > 0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
        values, h = [], 1e-5
        for sign in (1, -2):
            with torch.no_grad():
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter += sign * h * direction
            values.append(penalty().item())
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter += h * direction
        slope = sum((g * d).sum().item() for g, d in zip(gradients, directions, strict=True))
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(slope, rel=1e-3)


def test_a_probe_moves_the_core_alone():
    model = small("huginn")
    penalty, metrics = StabilityTerm(Stability())(model, run(model), batch_of([0]))
    assert not metrics["stability"].requires_grad
    penalty.backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached
    assert all(name.startswith(("model.core.", "model.injection.")) for name in reached)


def test_earlier_power_steps_carry_no_gradient():
    """Two steps are one step from the v that the first one made, held constant."""
    model, form = small(), JacobianVector()
    phi, x, _ = probed(model, run(model))
    v = form.draw(torch.tensor([5]), x)
    image = form.measure(phi, x, v)[1]
    once = form.measure(phi, x, image / image.norm())[0]
    twice = JacobianVector(steps=2).measure(phi, x, v)[0]
    weight = model.model.core[0].mlp.up_proj.weight
    torch.testing.assert_close(twice, once)
    torch.testing.assert_close(torch.autograd.grad(twice, weight), torch.autograd.grad(once, weight))


# Rows -------------------------------------------------------------------------------------------------------------


def whole_and_parts(form, parts, loops=3):
    """(penalty, gradients, direction) of six rows in one batch, and in `parts` with an empty row in the last."""
    found = []
    for cut in ([list(range(6))], parts):
        model, term = small("noisy"), StabilityTerm(Stability(form=form))
        ids, seeds = random_ids(7, 4), torch.arange(7) * 1000 + 3
        total = torch.zeros((), dtype=torch.float64)
        for rows in cut:
            padded = [*rows, -1] if rows == parts[-1] else rows
            trace = model.model(ids[padded], loops=loops, keep_loops="all", use_cache=False, state_seed=seeds[padded])
            penalty, _ = term(model, trace, batch_of(padded, seeds[padded], 6))
            total = total + penalty
        total.backward()
        term.end_step(lambda tensor: tensor)
        found.append((total.detach(), [p.grad for p in model.parameters() if p.grad is not None], term.direction))
    return found


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("form", PER_ROW, ids=str)
def test_micro_batches_add_up_to_the_batch(form, every):
    form = replace(form, every=every)
    whole, parts = whole_and_parts(form, [[4], [0, 3], [5, 1], [2]])
    torch.testing.assert_close(parts, whole, atol=1e-9, rtol=1e-9)
    assert whole[0] > 0
    assert (whole[2] is not None) == getattr(form, "warm", False)


def test_the_mean_is_over_the_chosen_rows():
    model, trace = small(), run(small(), rows=5)
    each = [
        StabilityTerm(Stability())(model, trace, batch_of([-1] * row + [0] + [-1] * (4 - row), [7] * 5, 1))[0]
        for row in range(5)
    ]
    third = Stability(form=JacobianVector(every=3))
    found = StabilityTerm(third)(model, trace, batch_of([0, 1, 2, 3, 4], [7] * 5))[0]
    torch.testing.assert_close(found, (each[0] + each[3]) / 2)
    nothing = StabilityTerm(third)(model, trace, batch_of([1, 2, -1, 4, 5], num_rows=6))[0]
    assert nothing == 0


def test_other_seeds_draw_other_directions():
    x = torch.zeros(3, 4, 8)
    v = JacobianVector().draw(torch.tensor([1, 2, 1]), x)
    assert torch.equal(v[0], v[2])
    assert (v[0] * v[1]).sum().abs() < 0.6
    assert torch.equal(JacobianVector().draw(torch.tensor([2]), x[:1])[0], v[1])


# Padding ----------------------------------------------------------------------------------------------------------


def padded_by_hand(pad, padding):
    """Rows of 3 and 5 real tokens as a model is given them, filled up to 7 by `pad`; then each alone, without."""
    ids, lengths = random_ids(2, 7, seed=3), (3, 5)
    places = torch.arange(7).expand(2, 7)
    real = places < torch.tensor(lengths)[:, None]
    filled = torch.where(real, ids, pad)
    given = {"position_ids": places * real} if padding == "positions" else {"attention_mask": real.long()}
    return filled, given, [ids[[row], :length] for row, length in enumerate(lengths)]


def penalised(form, model, ids, rows, seeds, direction=None, **given):
    """The value of the term, its gradient, and the direction after it."""
    model.zero_grad()
    term = StabilityTerm(Stability(form=form))
    term.direction = direction
    trace = model.model(ids, loops=3, keep_loops="all", use_cache=False, state_seed=torch.tensor(seeds), **given)
    value = term(model, trace, batch_of(rows, seeds))[0]
    value.backward()
    term.end_step(lambda tensor: tensor)
    return value.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None], term.direction


@pytest.mark.parametrize("padding", ["positions", "mask"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", [form for form in PER_ROW if not getattr(form, "warm", False)], ids=str)
def test_padding_weighs_nothing(form, family, padding):
    """The mean of the rows without their padding, in value and gradient, whatever token fills them up."""
    model = small(family)
    for pad in (0, 17):
        filled, given, each = padded_by_hand(pad, padding)
        found = penalised(form, model, filled, [0, 1], [5, 6], **given)
        alone = [penalised(form, model, ids, [0], [seed]) for ids, seed in zip(each, (5, 6), strict=True)]
        tolerance = {"rtol": 1e-5, "atol": 1e-9} if form.kind == "finite_difference" else {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(found[0], (alone[0][0] + alone[1][0]) / 2, **tolerance)
        assert found[0] > 0
        for gradient, *others in zip(found[1], *(one[1] for one in alone), strict=True):
            torch.testing.assert_close(gradient, sum(others) / 2, **tolerance)


@pytest.mark.parametrize("form", [JacobianVector(warm=True), FiniteDifference(epsilon=1e-4, warm=True)], ids=str)
def test_a_warm_direction_has_a_part_for_every_length(form):
    """Each row measures its own part of it at unit length, and turns that part alone."""
    model, direction = small(), torch.nn.functional.normalize(random_ids(1, 56).double() - 30).view(7, 8)
    filled, given, each = padded_by_hand(17, "positions")
    value, _, turned = penalised(form, model, filled, [0, 1], [5, 6], direction, **given)
    values, images = [], torch.zeros(7, 8, dtype=torch.float64)
    for ids in each:
        length = ids.shape[1]
        _, x, jacobian = probed(model, model.model(ids, loops=3, keep_loops="all", use_cache=False))
        image = jacobian @ direction[:length].flatten()
        values.append((image.norm() / direction[:length].norm()) ** 2)
        images[:length] += image.view_as(x[0])
    tolerance = 1e-3 if form.kind == "finite_difference" else 1e-9
    torch.testing.assert_close(value, torch.stack(values).mean(), rtol=tolerance, atol=0)
    torch.testing.assert_close(turned, images / images.norm(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", [*PER_ROW, VectorJacobian(whole_tensor=True)], ids=str)
def test_a_row_of_padding_alone_is_no_nan(form):
    model = small()
    value, gradients, _ = penalised(
        form, model, random_ids(1, 4), [0], [5], position_ids=torch.zeros(1, 4, dtype=torch.int64)
    )
    assert value == 0
    assert all(gradient.isfinite().all() for gradient in gradients)


# Warm directions --------------------------------------------------------------------------------------------------


class LinearCore(torch.nn.Module):
    """A model whose step is a matrix on the flattened state, another one for every row."""

    def __init__(self, matrices):
        super().__init__()
        self.matrices = torch.nn.Parameter(matrices)
        self.model = SimpleNamespace(step=self.step, modules=list)
        self.config = SimpleNamespace(_attn_implementation="eager")

    def get_input_embeddings(self):
        return SimpleNamespace(weight=self.matrices)

    def step(self, state, inputs, loop, context):
        return (self.matrices[context.index] @ state.flatten(1)[..., None]).view_as(state)

    def trace(self, rows):
        state = torch.ones(rows, 2, 3, dtype=torch.float64)
        context = SimpleNamespace(
            rows=lambda index: SimpleNamespace(index=index), position_ids=torch.arange(2).expand(rows, 2)
        )  # fmt: skip
        return SimpleNamespace(states={1: state}, gate_logits=None, inputs=state, context=context)


@pytest.mark.parametrize("form", [JacobianVector(warm=True), FiniteDifference(warm=True)], ids=lambda form: form.kind)
def test_a_warm_direction_turns_to_the_dominant_eigenvector(form):
    """One product per step, and the rows share it: power iteration on the mean of their Jacobians."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    mean = basis @ torch.diag(torch.tensor([0.9, 0.6, 0.5, 0.3, 0.2, 0.1], dtype=torch.float64)) @ basis.T
    apart = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    model, term = LinearCore(torch.stack([mean + apart, mean - apart])), StabilityTerm(Stability(form=form))
    for _ in range(60):
        term(model, model.trace(2), batch_of([0, 1]))
        term.end_step(lambda tensor: tensor)
    assert (term.direction.flatten() @ basis[:, 0]).abs().item() == pytest.approx(1, abs=1e-6)
    alone = LinearCore(mean[None])
    assert term(alone, alone.trace(1), batch_of([0]))[0].item() == pytest.approx(0.81, rel=1e-6)


def test_a_warm_direction_is_saved_and_restored():
    model, settings = small(), Stability(form=FiniteDifference(warm=True))
    trace, before = run(model, rows=2), StabilityTerm(settings)
    assert before.state_dict() == {}
    first = before(model, trace, batch_of([0, 1]))[0]
    before.end_step(lambda tensor: tensor)
    after = StabilityTerm(settings)
    after.load_state_dict(before.state_dict())
    second = before(model, trace, batch_of([0, 1]))[0]
    assert second != first
    assert after(model, trace, batch_of([0, 1]))[0] == second


def test_ranks_sum_their_images_even_where_one_chose_no_row():
    """Two processes, of which the second has rows 1 and 2 and so none of every third."""
    model, settings = small(), Stability(form=JacobianVector(warm=True, every=3))
    trace, terms = run(model, rows=2), [StabilityTerm(settings) for _ in range(2)]
    for term, rows in zip(terms, ([0, 3], [1, 2]), strict=True):
        term(model, trace, batch_of(rows, num_rows=4))
    total = sum(term._images for term in terms)
    for term in terms:
        term.end_step(lambda _: total)
    assert torch.equal(terms[0].direction, terms[1].direction)
    torch.testing.assert_close(terms[0].direction, total / total.norm())


def test_a_broken_step_leaves_the_direction():
    model, term = small(), StabilityTerm(Stability(form=JacobianVector(warm=True)))
    term.end_step(lambda tensor: tensor)
    assert term.direction is None
    term(model, run(model), batch_of([0]))
    before = term.direction
    term.end_step(lambda tensor: tensor * torch.nan)
    assert torch.equal(term.direction, before)
    trace = model.model(random_ids(1, 5), loops=2, use_cache=False)
    with pytest.raises(ValueError, match=r"the warm direction is \[4, 8\] but the rows are \[5, 8\]"):
        term(model, trace, batch_of([0]))


# Attention, precision, checkpointing ------------------------------------------------------------------------------


def backends():
    flags = torch.backends.cuda
    return flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()


@pytest.mark.parametrize("forced", [None, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("form", [JacobianVector(), VectorJacobian()], ids=lambda form: form.kind)
def test_r27_products_pass_through_the_default_attention(form, forced):
    model = small().float()
    assert model.config._attn_implementation == "sdpa"
    trace, before = run(model), backends()
    phi, x, _ = probed(model, trace)
    v, h = JacobianVector().draw(torch.tensor([5]), x), 1e-2
    with sdpa_kernel(forced or [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        inside = backends()
        values, image = form.measure(phi, x, v)
        assert backends() == inside
    assert backends() == before
    if isinstance(form, JacobianVector):
        central = (phi(x + h * v) - phi(x - h * v)) / (2 * h)
        torch.testing.assert_close(image, central, atol=1e-3, rtol=1e-3)
    values.sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.model.core.parameters())


def test_the_kernel_settings_come_back_after_an_error():
    def fails(_):
        raise RuntimeError("broken core")

    before = backends()
    with pytest.raises(RuntimeError, match="broken core"):
        JacobianVector().measure(fails, torch.zeros(1, 2, 2), torch.ones(1, 2, 2))
    assert backends() == before


@pytest.mark.parametrize("form", PROBES, ids=lambda form: form.kind)
def test_what_cannot_be_probed_is_refused_in_one_line(form):
    model = tiny_model()
    trace = run(model)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"attn_implementation='flex_attention'; call model\.set_attn_implementation"):
        StabilityTerm(Stability(form=form))(model, trace, batch_of([0]))
    model.set_attn_implementation("eager")
    Stability(form=form).check_model(model)
    half = tiny_model().bfloat16()
    if isinstance(form, FiniteDifference):
        with pytest.raises(ValueError, match="keep them in float32 under autocast"):
            Stability(form=form).check_model(half)
    else:
        assert StabilityTerm(Stability(form=form))(half, run(half), batch_of([0]))[0].isfinite()


@pytest.mark.parametrize("form", PROBES, ids=lambda form: form.kind)
def test_under_autocast_the_value_stays(form):
    model = tiny_model()
    wanted = StabilityTerm(Stability(form=form))(model, run(model), batch_of([0]))[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = StabilityTerm(Stability(form=form))(model, run(model), batch_of([0]))[0]
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(wanted.item(), rel=0.1)


@pytest.mark.parametrize(("form", "unit"), list(product(PROBES, ["block", "loop"])), ids=str)
def test_checkpointing_changes_no_gradient(form, unit):
    gradients = []
    for checkpointed in (False, True):
        model = small("huginn")
        if checkpointed and unit == "block":
            model.gradient_checkpointing_enable()
        elif checkpointed:
            model.model.checkpoint_loops()
        trace = run(model, rows=2)
        penalty = StabilityTerm(Stability(form=form))(model, trace, batch_of([0, 1]))[0]
        (penalty + trace.states[3].pow(2).mean()).backward()
        assert all(module.training for module in model.modules())
        gradients.append([p.grad for p in model.model.core.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", PROBES, ids=lambda form: form.kind)
def test_dropout_is_off_inside_a_probe(form):
    """An adapter's dropout would tell the two branches of a difference apart."""
    model = small()
    trace = run(model)
    wanted = StabilityTerm(Stability(form=form))(model, trace, batch_of([0]))[0]
    dropping = copy.deepcopy(model)
    for block in dropping.model.core:
        block.mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.5), block.mlp.down_proj)
    assert StabilityTerm(Stability(form=form))(dropping, trace, batch_of([0]))[0].item() == pytest.approx(wanted.item())


def test_packed_rows_and_padding_keep_their_masks():
    """The probe of chosen rows sees each row's own mask and positions."""
    model, ids = small(), random_ids(3, 6)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
    trace = model.model(ids, position_ids=positions, loops=2, use_cache=False)
    found = StabilityTerm(Stability(form=JacobianVector(every=2)))(model, trace, batch_of([1, 0, 2], [4, 5, 6]))[0]
    each = []
    for row, seed in ((1, 5), (2, 6)):
        alone = model.model(ids[[row]], position_ids=positions[[row]], loops=2, use_cache=False)
        each.append(StabilityTerm(Stability())(model, alone, batch_of([0], [seed]))[0])
    torch.testing.assert_close(found, (each[0] + each[1]) / 2)


def test_a_trace_with_a_past_is_refused():
    model = tiny_model()
    first = model.model(random_ids(1, 3), use_cache=True)
    with pytest.raises(ValueError, match="without a cached past"):
        StabilityTerm(Stability())(model, model.model(random_ids(1, 2), cache=first.cache), batch_of([0]))
    assert isinstance(first.context.rows(torch.tensor([0])).store, NoStore)


# Settings ---------------------------------------------------------------------------------------------------------


def test_mixing():
    loss, penalty = torch.tensor(2.0), torch.tensor(3.0)
    assert Stability(weight=0.1).mix(loss, penalty).item() == pytest.approx(0.9 * 2 + 0.1 * 3)
    assert Stability(weight=0.1, mixing="additive").mix(loss, penalty).item() == pytest.approx(2 + 0.1 * 3)
    late = Stability(from_step=5)
    assert [late.weight_at(step) for step in (0, 4, 5, 6)] == [0, 0, 0.1, 0.1]


def test_a_high_weight_is_warned_of(recwarn):
    StabilityTerm(Stability(weight=0.14))
    assert not recwarn
    with pytest.warns(UserWarning, match=r"stability\.weight=0\.15 is high"):
        StabilityTerm(Stability(weight=0.15))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": -0.1}, "weight=-0.1"),
        ({"weight": 1.0}, "weight=1.0"),
        ({"mixing": "both"}, "mixing='both'"),
        ({"from_step": -1}, "from_step=-1"),
    ],
)
def test_nonsense_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Stability(**values)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (JacobianVector, {"steps": 0}, "steps=0"),
        (VectorJacobian, {"steps": 0}, "steps=0"),
        (VectorJacobian, {"steps": 2, "whole_tensor": True}, "set steps=1"),
        (FiniteDifference, {"epsilon": 0.0}, r"epsilon=0\.0"),
        (SecantRatio, {"target": -1.0}, r"target=-1\.0"),
        (AdjacentL2, {"every": 0}, "every=0"),
    ],
)
def test_nonsense_in_a_form_is_refused(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_frozen_cores_and_missing_loops_are_refused():
    Stability().check_objective(ExpectedLoss())
    with pytest.raises(ValueError, match="keeps frozen"):
        Stability().check_objective(GateRegression())
    model = tiny_model()
    with pytest.raises(ValueError, match=r"reads loops \[1, 2, 3\], but the trace kept \[3\]"):
        StabilityTerm(Stability(form=AdjacentL2()))(model, model.model(random_ids(1, 4)), batch_of([0]))


def test_a_recipe_names_the_form_by_its_kind():
    adapter = TypeAdapter(Stability)
    found = adapter.validate_python({"form": {"kind": "finite_difference", "every": 8, "warm": True}, "weight": 0.05})
    assert found == Stability(form=FiniteDifference(every=8, warm=True), weight=0.05)
    assert adapter.validate_python(adapter.dump_python(found, mode="json")) == found
    for broken in ({"kind": "finite_difference", "evry": 8}, {"kind": "none"}, {"kind": "secant_ratio", "target": -1}):
        with pytest.raises(ValidationError):
            adapter.validate_python({"form": broken})


def test_every_form_says_what_it_estimates():
    forms = [*PER_ROW, VectorJacobian(whole_tensor=True)]
    assert all(form.estimates for form in forms)
    assert "mean squared singular value" in JacobianVector().estimates
    assert "3 power iterations on J^T" in VectorJacobian(steps=3).estimates
    torch.testing.assert_close(squared_norms(torch.ones(2, 3, 4)), torch.tensor([12.0, 12.0]))
