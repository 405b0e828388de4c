"""Public bug reports about looped models, by number: their checks on checkpoints and model pass here."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import looplm
from conftest import random_ids, tiny_model
from looplm.models.tokens import end_token_ids

FAMILIES = {
    "ouro": {},
    "huginn": {
        "prelude_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
        "injection": "concat", "state_init": "normal", "rope": "adjacent", "qk_bias": True, "exit_gate": False,
        "tie_word_embeddings": True, "init": "takase",
    },
}  # fmt: skip
families = pytest.mark.parametrize("family", list(FAMILIES))


def test_r01_end_tokens_that_disagree_all_count():
    model = tiny_model(eos_token_id=2)
    model.generation_config.eos_token_id = [2, 5]
    assert end_token_ids(model, tokenizer_eos=0) == {0, 2, 5}


@families
@torch.no_grad()
def test_r02_loading_never_initialises_anew(tmp_path, family):
    model, ids = tiny_model(**FAMILIES[family]), random_ids(2, 9)
    looplm.save(model, tmp_path)
    torch.manual_seed(123)
    for again in (looplm.load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        for name, tensor in model.state_dict().items():
            assert tensor.equal(again.state_dict()[name]), name
        assert torch.equal(again(ids).logits, model(ids).logits)
        tied = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
        assert tied == model.config.tie_word_embeddings


def test_r03_tied_tensors_stay_tied(tmp_path):
    model, ids = tiny_model(tie_word_embeddings=True), random_ids(2, 6)
    looplm.save(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len({"lm_head.weight", "model.embed_tokens.weight"} & set(file.keys())) == 1
    again = looplm.load(tmp_path).train()
    before = again.model.embed_tokens.weight.detach().clone()
    again(ids, labels=ids).loss.backward()
    with torch.no_grad():
        again.lm_head.weight -= again.lm_head.weight.grad
    assert not torch.equal(again.model.embed_tokens.weight, before)
    for tied in (True, False):
        resized = tiny_model(tie_word_embeddings=tied)
        resized.resize_token_embeddings(70)
        assert (resized.lm_head.weight is resized.model.embed_tokens.weight) == tied
        assert resized(ids).logits.shape[-1] == resized.config.vocab_size == 70


@torch.no_grad()
def test_r04_stock_caches_and_generic_loaders_are_refused(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match=r"the cache has 2 slots \(loops=1\) but loops=3 needs 6"):
        model(random_ids(1, 4), cache=DynamicCache(config=model.config.at_loops(1)))
    looplm.save(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["LoopLMForCausalLM"]
    assert values["model_type"] == "looplm"  # a loader that does not know it refuses it
    assert (values["core_layers"], values["loops"]) == (2, 3)
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 6


@families
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@torch.no_grad()
def test_r05_fully_masked_rows_stay_finite(family, attention):
    model, ids = tiny_model(**FAMILIES[family]), random_ids(1, 33)
    model.set_attn_implementation(attention)
    mask = torch.tensor([[0] * 31 + [1] * 2])
    for use_cache in (False, True):
        logits = model(ids, attention_mask=mask, loops=4, use_cache=use_cache).logits
        assert logits.isfinite().all()
        torch.testing.assert_close(logits[:, 31:], model(ids[:, 31:], loops=4).logits, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_r06_a_random_start_repeats():
    model, ids = tiny_model(**FAMILIES["huginn"]), random_ids(3, 70)
    assert torch.equal(model(ids).logits, model(ids).logits)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(model(ids[order]).logits, model(ids).logits[order], atol=1e-5, rtol=1e-5)
    first = model(ids[:, :40], use_cache=True)
    rest = model(ids[:, 40:], cache=first.cache)
    chunked = torch.cat([first.logits, rest.logits], 1)
    torch.testing.assert_close(chunked, model(ids).logits, atol=1e-4, rtol=1e-3)
    silent = model(ids, init_state=torch.zeros(3, 70, 32))  # the documented way to do without noise
    assert not torch.allclose(silent.logits, model(ids).logits)


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r07_the_state_does_not_grow_with_depth(family, dtype):
    values = FAMILIES[family] | {"initializer_range": 0.02}
    model, ids = tiny_model(**values).to(dtype), random_ids(2, 12)
    with torch.no_grad():
        out = model(ids, loops=64, keep_loops="all", use_cache=False)
    norms = {loop: state.float().norm(dim=-1).mean() for loop, state in out.states.items()}
    assert norms[2] / 3 < norms[64] < 3 * norms[2]
    assert out.logits.isfinite().all()
    if dtype == torch.float32:
        sizes = {}
        for loops in (4, 32):
            model.zero_grad()
            model(ids, labels=ids, loops=loops).loss.backward()
            sizes[loops] = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert sizes[32] < 10 * sizes[4]


def test_r08_training_builds_no_cache(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a cache was built in training")

    monkeypatch.setattr("looplm.models.backbone.DynamicCache", refuse)
    model, ids = tiny_model().train(), random_ids(1, 4)
    assert model(ids, labels=ids).cache is None
    model.gradient_checkpointing_enable()
    assert model(ids, labels=ids).cache is None
    with pytest.raises(ValueError, match="does not go with gradient checkpointing"):
        model(ids, use_cache=True)
