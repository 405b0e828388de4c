"""The built-in recipes: they load, build the published shapes, and hold the papers' numbers."""

import itertools

import pytest
import torch

from looplm import LoopLMConfig, LoopLMForCausalLM
from looplm.models.accounting import count_parameters
from looplm.models.presets import PRESETS
from looplm.training import load_recipe, train
from looplm.training.recipe import BUILT_IN, built_in_recipes, resolved


@pytest.mark.parametrize("name", built_in_recipes())
def test_every_built_in_recipe_loads_and_says_what_it_is(name):
    recipe = load_recipe(name)
    assert (BUILT_IN / f"{name}.yaml").read_text().startswith("# ")
    assert resolved(recipe)["objective"]["kind"]
    if recipe.model is not None and recipe.init_from is None:
        LoopLMConfig(vocab_size=64, loops=recipe.loops or 4, **recipe.model)


# arXiv 2510.25741, training tables: tokens, length, loops, beta, RoPE base, peak and final rate, tokens a step.
OURO = {
    "ouro_1a": (3e12, 4096, 8, 0.1, 1e4, 3e-4, 3e-4, 8.39e6),
    "ouro_1b": (3e12, 4096, 4, 0.05, None, 3e-4, 3e-4, 8.39e6),
    "ouro_1b_upcycled": (3e12, 4096, 4, 0.05, None, 3e-4, 3e-4, 8.39e6),
    "ouro_2": (1.4e12, 16384, 4, 0.05, 4e4, 3e-4, 3e-5, 8.39e6),
    "ouro_3": (20e9, 65536, 4, 0.05, 1e6, 3e-5, 3e-5, 8.39e6),
    "ouro_4": (300e9, 32768, 4, 0.05, None, 3e-5, 1e-5, 8.39e6),
}


@pytest.mark.parametrize(("name", "numbers"), OURO.items(), ids=OURO)
def test_ouros_stages_have_the_papers_numbers(name, numbers):
    tokens, length, loops, beta, rope, peak, final, batch = numbers
    recipe = load_recipe(name)
    data = recipe.data
    rows = sum(data.rows_at(step) for step in range(20_000)) + (recipe.steps - 20_000) * data.rows
    rows = recipe.steps * data.rows if data.ramp is None else rows
    assert rows * data.length == pytest.approx(tokens, rel=0.003)
    assert (data.length, recipe.loops, recipe.objective.beta) == (length, loops, beta)
    assert data.rows * data.length == pytest.approx(batch, rel=0.01)
    assert (recipe.model or {}).get("rope_theta") == rope
    assert recipe.optimizer.lr == peak
    last = recipe.optimizer.lr * recipe.schedule.factor(recipe.steps - 1, recipe.steps)
    assert last == pytest.approx(final, rel=0.02)
    assert (recipe.optimizer.betas, recipe.optimizer.weight_decay, recipe.clip_norm) == ((0.9, 0.95), 0.1, 1.0)


def test_ouros_stages_follow_one_another_and_ramp():
    first = load_recipe("ouro_1a").data
    assert first.rows_at(0) * first.length == pytest.approx(4.19e6, rel=0.01)
    assert load_recipe("ouro_1b_upcycled").duplicate.factor == 2
    chain = ["ouro_1a", "ouro_1b", "ouro_2", "ouro_3", "ouro_4", "ouro_sft"]
    for before, after in itertools.pairwise(chain):
        assert load_recipe(after).init_from == load_recipe(before).out


SHARES = {
    "ouro_1a": [73.4, 13.0, 7.5, 4.1, 2.0],
    "ouro_2": [66.5, 15.0, 6.2, 4.6, 3.8, 3.4, 0.5],
    "huginn": [28.7, 25.4, 18.7, 8.1, 7.5, 6.1, 5.5],
}


@pytest.mark.parametrize(("name", "shares"), SHARES.items(), ids=SHARES)
def test_mixtures_are_the_papers(name, shares):
    found = [source.share for source in load_recipe(name).data.sources.values()]
    assert found == shares
    assert sum(found) == pytest.approx(100, abs=0.1)


def test_mid_training_replays_in_proportion():
    sources = load_recipe("ouro_4").data.sources
    assert sum(source.share for source in sources.values()) == pytest.approx(100, abs=0.01)
    assert sources["sft_mix"].share == 30
    stage_two = load_recipe("ouro_2").data.sources
    for name, source in stage_two.items():
        assert sources[name].share == pytest.approx(0.6 * source.share, abs=0.006)
    stage_one = {name: s for name, s in load_recipe("ouro_1a").data.sources.items() if name != "ultra_fineweb_zh"}
    total = sum(source.share for source in stage_one.values())
    for name, source in stage_one.items():
        assert sources[name].share == pytest.approx(10 * source.share / total, abs=0.006)


@pytest.mark.parametrize(("name", "preset"), [("ouro_1a", "ouro_1_4b"), ("huginn", "huginn_3_5b")])
def test_new_models_are_the_published_ones(name, preset):
    recipe, published = load_recipe(name), PRESETS[preset]()
    config = LoopLMConfig(vocab_size=published.vocab_size, loops=published.loops, **recipe.model)
    assert count_parameters(config) == count_parameters(published)
    for field, value in recipe.model.items():
        if field not in ("rope_theta", "embed_scale"):
            assert getattr(published, field) == value, field
    if name == "huginn":
        assert config.embed_scale == pytest.approx(published.embed_scale, rel=1e-6)


def test_micro_batches_belong_to_the_run_where_its_result_depends_on_them():
    assert load_recipe("huginn").depth.per == "micro_batch"
    assert "micro_rows" not in load_recipe("huginn").free_fields
    whole = load_recipe("mini_stage1", ["stability={form: {kind: vector_jacobian, whole_tensor: true}, weight: 0.1}"])
    assert "micro_rows" not in whole.free_fields
    each = load_recipe("mini_stage1", ["stability={form: {kind: vector_jacobian}, weight: 0.1}"])
    for recipe in (load_recipe("huginn", ["depth.per=sequence"]), load_recipe("mini_stage1"), each):
        assert "micro_rows" in recipe.free_fields


def test_huginns_recipe_and_its_bad_runs():
    good = load_recipe("huginn")
    assert (good.depth.mean, good.depth.sigma, good.depth.grad_loops, good.depth.per) == (32, 0.5, 8, "micro_batch")
    assert (good.optimizer.lr, good.optimizer.eps, good.optimizer.update_clipping) == (4e-5, 0, True)
    assert good.data.rows * good.data.length == 4096 * 4096
    assert good.steps * good.data.rows * good.data.length == pytest.approx(795e9, rel=0.01)
    collapse, ignored = load_recipe("huginn_bad_collapse"), load_recipe("huginn_bad_ignored")
    assert (collapse.model["norm"], collapse.model["injection"], collapse.model["embed_scale"]) == ("plain", "add", 1.0)
    assert (ignored.model["norm_placement"], ignored.model["injection"]) == ("pre", "concat")
    assert ignored.model["embed_scale"] == good.model["embed_scale"]
    assert collapse.optimizer.lr == ignored.optimizer.lr == 4e-4


def test_stars_recipes():
    addition, ouro = load_recipe("stars_addition"), load_recipe("stars_ouro")
    assert (addition.depth.mu, addition.depth.sigma, addition.depth.low, addition.depth.high) == (2.0, 0.7, 1, 100)
    assert (ouro.depth.mu, ouro.depth.sigma, ouro.depth.low, ouro.depth.high) == (1.7, 0.4, 1, 16)
    assert ouro.depth.per == "micro_batch"
    for recipe in (addition, ouro):
        assert (recipe.stability.weight, recipe.stability.mixing) == (0.1, "convex")
    assert addition.stability.from_step == addition.schedule.warmup_steps == 2000
    settings = [(r.optimizer.lr, r.optimizer.betas, r.optimizer.weight_decay) for r in (addition, ouro)]
    assert settings == [(1e-4, (0.9, 0.999), 0.01), (1e-6, (0.9, 0.95), 0.0)]
    assert (ouro.data.rows, ouro.data.length, ouro.micro_rows, ouro.epochs) == (32, 2048, 1, 1)
    assert addition.model["dropout"] == 0.1


def test_dropout_drops_in_training_alone():
    config = LoopLMConfig(
        vocab_size=64, loops=2, **(load_recipe("stars_addition").model | {"hidden_size": 32, "intermediate_size": 32})
    )
    torch.manual_seed(0)
    model, ids = LoopLMForCausalLM(config), torch.arange(1, 9)[None]
    assert model.eval()(ids).logits.equal(model(ids).logits)
    assert not model.train()(ids).logits.equal(model(ids).logits)
    with pytest.raises(ValueError, match=r"dropout=1.0 must be at least 0 and below 1"):
        LoopLMConfig(dropout=1.0)


def test_the_addition_recipe_starts(tmp_path):
    small = ["model.hidden_size=32", "model.intermediate_size=32", "model.num_attention_heads=2", "steps=2"]
    small += ["data.rows=2", "data.length=64", "stability.from_step=1", "data.sources.addition.held_out_questions=8"]
    assert train(load_recipe("stars_addition", small, {"out": str(tmp_path / "run")})).finished
