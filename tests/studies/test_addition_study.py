"""The addition study's measures on models and curves whose answers are known, and its directions on made-up results."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from looplm.data.tokenizer import word_tokenizer
from looplm.models import LoopLMConfig, LoopLMForCausalLM
from looplm.studies.addition import RANDOM, STARS, STATIC, AdditionStudy
from looplm.studies.addition_measures import follow, summary
from looplm.studies.study import Outcome
from looplm.tasks import Addition
from looplm.training import load_recipe

CELLS = list(AdditionStudy().jobs("smoke", 1))


def test_a_curve_is_summed_up_from_the_trained_loops_on():
    found = summary([(1, 0.2), (2, 1.0), (4, 0.995), (8, 0.991), (16, 0.5), (32, 1.0)])
    assert found["peak"] == 1.0
    assert found["fall"] == pytest.approx(0.5)
    assert found["holds to"] == 8
    assert found["area"] == pytest.approx((0.993 + 0.7455 + 0.75) / 3)


def test_a_model_that_never_holds_its_peak_holds_to_nothing():
    assert summary([(2, 1.0), (4, 0.9), (8, 1.0)])["holds to"] == 0


def test_a_model_that_learned_nothing_holds_to_nothing():
    assert summary([(4, 0.0), (512, 0.1)])["holds to"] == 0


def test_the_area_ends_at_512_loops():
    found = summary([(4, 1.0), (512, 1.0), (4000, 0.0)])
    assert found["area"] == pytest.approx(1.0)
    assert found["fall"] == 1.0


def followed(change, loops):
    """`follow` on a random small model whose block is changed to a known map."""
    torch.manual_seed(0)
    task = Addition()
    tokenizer = word_tokenizer(task.words())
    config = LoopLMConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_attention_heads=2, core_layers=1,
        norm="layer", norm_placement="pre", norm_in_loop=False, exit_gate=False, rope="learned",
        max_position_embeddings=32,
    )  # fmt: skip
    model = LoopLMForCausalLM(config).eval()
    model.model.core[0].forward = lambda x, loop, context: change(x)
    texts = [example.prompt + example.answer for example in map(task.example, range(6))]
    return follow(SimpleNamespace(model=model, tokenizer=tokenizer), texts, loops)


def test_states_under_a_known_map():
    found = followed(lambda x: 0.5 * x, [1, 2, 4, 8])
    assert found.values["norm growth"] == pytest.approx(2**-4)
    assert found.values["radius at 4"] == pytest.approx(0.5)
    assert found.values["radius at 8"] == pytest.approx(0.5)
    assert found.values["residual at 8"] == pytest.approx(0.5)
    norms = dict(found.series["state norm"])
    assert norms[1] / norms[8] == pytest.approx(2**7)
    steps = [after[0] - before[0] for before, after in pairwise(found.series["path"])]
    assert len(found.series["path"]) == 8
    assert [abs(after / before) for before, after in pairwise(steps)] == pytest.approx([0.5] * 6, rel=1e-3)


def test_a_turning_map_has_the_radius_of_its_complex_pair():
    turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]])
    found = followed(lambda x: (x.unflatten(-1, (4, 2)) @ turn.T).flatten(-2), [4, 16])
    assert found.values["radius at 16"] == pytest.approx(0.9, abs=1e-3)


def made_up(**changed):
    """Results in which every direction of the paper's holds, but for the `changed` cells' values."""
    internal = {"norm growth": 8.0, "peak": 1.0, "fall": 1.0, "holds to": 24.0, "area": 0.6}
    external = {"norm growth": 1.0, "peak": 1.0, "fall": 1.0, "holds to": 4.0, "area": 0.2}
    values = {cell: dict(internal if cell.startswith("Pre") else external) for cell in CELLS}
    values[RANDOM] |= {"fall": 0.15, "area": 0.9, "at the deepest": 0.85}
    values[STARS] |= {"fall": 0.0, "area": 1.0, "at the deepest": 1.0}
    values["Post-Sandwich, random loops and L2 0.2"]["area"] = 0.0
    for weight in ("0.15", "0.2"):
        values[f"Post-Sandwich, STARS {weight}"]["peak"] = 0.0
    for cell, new in changed.items():
        values[cell] |= new
    return {cell: [Outcome(values=found)] for cell, found in values.items()}


def refuted(**changed):
    return {verdict.claim for verdict in AdditionStudy().verdicts(made_up(**changed)) if not verdict.holds}


def test_the_papers_own_results_hold():
    assert refuted() == set()


@pytest.mark.parametrize(
    ("cell", "values", "claim"),
    [
        ("Pre, RMSNorm", {"norm growth": 1.5}, "states of internal placements grow"),
        ("Pre-Sandwich, SimpleNorm", {"fall": 0.3}, "internal placements lose"),
        ("Post, LayerNorm", {"holds to": 24.0}, "external placements hold"),
        ("Pre, LayerNorm", {"area": 0.0}, "the place of the norms"),
        (STATIC, {"area": 0.95}, "random loops hold more"),
        (RANDOM, {"fall": 0.01}, "random loops alone lose"),
        (STARS, {"fall": 0.011}, "STARS stays"),
        (STARS, {"at the deepest": 0.8}, "at the deepest STARS"),
        ("Post-Sandwich, L2 0.2", {"area": 0.4}, "an L2 term brings little"),
        ("Post-Sandwich, random loops and L2 0.2", {"area": 0.95}, "an L2 term hurts"),
        ("Post-Sandwich, STARS 0.2", {"peak": 0.9}, "STARS with a weight"),
    ],
)
def test_each_direction_can_fail_alone(cell, values, claim):
    assert [text.startswith(claim) for text in refuted(**{cell: values})].count(True) == 1


def test_a_model_that_learned_nothing_holds_nothing():
    assert any(claim.startswith("STARS stays") for claim in refuted(**{STARS: {"peak": 0.0}}))


def recipes_of(cell, scale):
    (job, *_) = AdditionStudy().jobs(scale, 1)[cell]
    return job.recipes(Path("nowhere"))


def recipe_of(cell, scale):
    """The last stage, with the model of the first."""
    first, last = (found := recipes_of(cell, scale))[0], found[-1]
    return replace(last, model=first.model, init_from=None, out="nowhere")


@pytest.mark.parametrize("scale", ["paper", "cpu"])
def test_cells_differ_from_stars_in_what_their_names_say(scale):
    stars = recipe_of(STARS, scale)
    term = stars.stability
    assert (term.form.kind, term.weight, stars.depth.kind) == ("vector_jacobian", 0.1, "log_normal")
    assert recipe_of(RANDOM, scale) == replace(stars, stability=None)
    assert recipe_of("Post-Sandwich, JSRR only", scale) == replace(stars, depth=None)
    assert recipe_of("Pre-Sandwich, STARS", scale).model == stars.model | {"norm_placement": "sandwich_branch"}
    assert recipe_of("Post-Sandwich, STARS 0.2", scale).stability.weight == 0.2
    l2 = recipe_of("Post-Sandwich, random loops and L2 0.2", scale)
    assert (l2.stability.form.kind, l2.stability.mixing, l2.depth) == ("adjacent_l2", "additive", stars.depth)
    assert (recipe_of("Post-Sandwich, Poisson 10", scale).depth.mean, l2.stability.weight) == (10, 0.2)


@pytest.mark.parametrize("scale", ["paper", "cpu"])
def test_the_grid_differs_by_norms_and_parts_alone(scale):
    static = recipe_of(STATIC, scale)
    assert (static.depth, static.stability, static.loops) == (None, None, 4)
    for cell, change in (
        ("Pre, RMSNorm", {"norm_placement": "pre", "norm": "rms"}), ("Post-Sandwich, coda", {"coda_layers": 1}),
    ):  # fmt: skip
        assert recipe_of(cell, scale) == replace(static, model=static.model | change)


def test_treatments_go_on_from_one_model_that_adds_at_four_loops():
    first, _ = recipes_of(STARS, "cpu")
    assert (first.depth, first.stability, first.loops, first.steps) == (None, None, 4, 800)
    for cell in (RANDOM, "Post-Sandwich, JSRR only", "Post-Sandwich, L2 0.2"):
        other, treated = recipes_of(cell, "cpu")
        assert replace(other, out="") == replace(first, out="")
        assert treated.init_from == other.out
        assert treated.steps == 2400
    (scratch,) = recipes_of(f"{RANDOM} from scratch", "cpu")
    assert scratch.init_from is None


def test_the_papers_scale_is_the_papers_recipe():
    assert recipe_of(STARS, "paper") == replace(load_recipe("stars_addition"), out=recipe_of(STARS, "paper").out)
