"""The forward's contract: what it returns, the labels loss, and errors that name the input."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from conftest import random_ids, tiny_config, tiny_model
from looplm import LoopLMConfig, LoopLMForCausalLM
from looplm.models.tokens import end_token_ids


@torch.no_grad()
def test_more_loops_only_continue():
    model, ids = tiny_model(), random_ids(2, 6)
    out = model(ids, loops=6, keep_loops="all")
    assert sorted(out.states) == [1, 2, 3, 4, 5, 6]
    assert out.gate_logits.shape == (2, 6, 6)
    for loops in range(1, 7):
        fewer = model(ids, loops=loops)
        torch.testing.assert_close(model.logits_at(out, loops), fewer.logits)
        assert list(fewer.states) == [loops]
        torch.testing.assert_close(out.gate_logits[..., :loops], fewer.gate_logits)


@torch.no_grad()
def test_kept_loops_and_the_verbs():
    model, ids = tiny_model(), random_ids(2, 6)
    out = model(ids, loops=4, keep_loops=[2])
    assert list(out.states) == [2]
    with pytest.raises(ValueError, match="loop 3 was not kept"):
        model.logits_at(out, 3)
    backbone = model.model
    inputs = backbone.embed(backbone.embed_tokens(ids), out.context)
    state = backbone.init_state(inputs, out.context)
    for loop in (1, 2):
        state = backbone.step(state, inputs, loop, out.context.without_store())
    torch.testing.assert_close(state, out.states[2])
    torch.testing.assert_close(backbone.gate(state), out.gate_logits[..., 1])


@torch.no_grad()
def test_the_start_state_may_be_given():
    model, ids = tiny_model(), random_ids(1, 5)
    embeds = model.model.embed_tokens(ids)
    torch.testing.assert_close(model(ids, init_state=embeds).logits, model(ids).logits)
    assert not torch.allclose(model(ids, init_state=embeds * 2).logits, model(ids).logits)
    with pytest.raises(ValueError, match="init_state has shape"):
        model(ids, init_state=embeds[:, :2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.no_grad()
def test_the_gate_is_float32_whatever_the_dtype(dtype):
    model = tiny_model().to(dtype)
    out = model(random_ids(1, 5), keep_loops="all")
    assert out.logits.dtype == dtype
    assert out.gate_logits.dtype == out.exit_pdf.dtype == torch.float32
    gate = model.model.exit_gate
    wanted = out.states[2].float() @ gate.weight.float().T + gate.bias.float()
    torch.testing.assert_close(out.gate_logits[..., 1], wanted.squeeze(-1))
    assert (model.exit_loops(out, 1.0) == 3).all()


@torch.no_grad()
def test_labels_give_the_shifted_mean_loss():
    model, ids = tiny_model(), random_ids(2, 7)
    labels = ids.clone()
    labels[0, :3] = -100
    out = model(ids, labels=labels)
    rows = [(b, s) for b in range(2) for s in range(6) if labels[b, s + 1] != -100]
    wanted = sum(-out.logits[b, s].log_softmax(-1)[labels[b, s + 1]] for b, s in rows) / len(rows)
    torch.testing.assert_close(out.loss, wanted)


def test_all_labels_masked_is_loss_zero():
    model = tiny_model()
    for labels in (torch.full((2, 5), -100), random_ids(2, 1)):
        loss = model(random_ids(*labels.shape), labels=labels).loss
        assert loss == 0
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_a_one_token_sequence_works():
    model, ids = tiny_model(), random_ids(1, 1)
    assert model(ids).logits.shape == (1, 1, 61)
    assert model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 4)


@torch.no_grad()
def test_logits_to_keep_and_tuples():
    model, ids = tiny_model(), random_ids(2, 6)
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, model(ids).logits[:, -1:])
    assert torch.equal(model(ids, use_cache=False, return_dict=False)[0], model(ids).logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loops": 0}, "loops=0 must be a whole number of at least 1"),
        ({"loops": 2.0}, r"loops=2.0 must be"),
        ({"loops": True}, "loops=True must be"),
        ({"keep_loops": "first"}, "keep_loops='first'"),
        ({"keep_loops": [4]}, "names loop 4, but this call runs loops 1 to 3"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(random_ids(1, 4), **arguments)


def test_an_empty_prompt_is_refused():
    empty = torch.zeros(1, 0, dtype=torch.long)
    for call in (tiny_model(), tiny_model().generate):
        with pytest.raises(ValueError, match="at least one token"):
            call(empty)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        tiny_model()()


def test_misspelt_keywords_are_refused_everywhere():
    model = tiny_model()
    with pytest.raises(TypeError, match="'loop'"):
        model(random_ids(1, 4), loop=3)
    with pytest.raises(ValueError, match="loop"):
        model.generate(random_ids(1, 4), loop=3, max_new_tokens=1)
    with pytest.raises(ValueError, match="loops=0"):
        model.generate(random_ids(1, 4), loops=0, max_new_tokens=1)
    with pytest.raises(ValueError, match="unknown config key 'loop'; did you mean 'loops'"):
        tiny_config(loop=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loops": 0}, "loops=0 must be at least 1"),
        ({"hidden_size": "32"}, "hidden_size='32' must be of type int"),
        ({"exit_gate": 1}, "exit_gate=1 must be of type bool"),
        ({"norm_placement": "middle"}, "norm_placement='middle' is not supported; choose one of 'pre'"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"coda_layers": -1}, "coda_layers=-1"),
        ({"core_layers": 0}, "core_layers=0"),
    ],
)
def test_bad_configs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def test_num_hidden_layers_is_derived_and_never_stored():
    config = tiny_config(prelude_layers=1, coda_layers=2, loops=5)
    assert config.num_hidden_layers == 1 + 2 + 5 * 2
    assert "num_hidden_layers" not in config.to_dict()
    assert LoopLMConfig(**config.to_dict()).to_dict() == config.to_dict()
    with pytest.raises(AttributeError):
        config.num_hidden_layers = 3


def test_without_a_gate_exits_are_refused_by_name():
    model = tiny_model(exit_gate=False)
    out = model(random_ids(1, 4), keep_loops="all")
    with pytest.raises(ValueError, match="no exit gate"):
        model.exit_loops(out, 0.5)


@torch.no_grad()
def test_tied_heads_share_storage():
    model = LoopLMForCausalLM(tiny_config(tie_word_embeddings=True)).eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    out = model(random_ids(1, 4))
    torch.testing.assert_close(out.logits, F.linear(out.states[3], model.model.embed_tokens.weight))


@torch.no_grad()
def test_exits_need_every_loop():
    model, ids = tiny_model(), random_ids(1, 5)
    for keep in ([1, 2], [], "last"):
        with pytest.raises(ValueError, match="exits read any of 3 loops, but only"):
            model.logits_at_exit(model(ids, keep_loops=keep), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_autocast_leaves_the_gate_in_float32(dtype):
    model, ids = tiny_model().to(dtype), random_ids(1, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, keep_loops="all")
    assert out.gate_logits.dtype == torch.float32
    gate = model.model.exit_gate
    wanted = out.states[2].float() @ gate.weight.float().T + gate.bias.float()
    torch.testing.assert_close(out.gate_logits[..., 1], wanted.squeeze(-1))


@torch.no_grad()
def test_whole_numbers_of_any_kind_are_loops():
    model, ids = tiny_model(), random_ids(1, 4)
    for loops in (np.int64(2), torch.tensor(2)):
        assert torch.equal(model(ids, loops=loops).logits, model(ids, loops=2).logits)


@pytest.mark.parametrize(
    "changes", [{"loops": [4]}, {"exit_gate": [1]}, {"norm_eps": [1]}, {"rope_theta": float("nan")}]
)
def test_lists_and_nans_are_no_numbers(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        tiny_config(**changes)
    assert tiny_config(eos_token_id=[1, 2]).eos_token_id == [1, 2]


@torch.no_grad()
def test_a_double_model_has_a_double_loss():
    model, ids = tiny_model().double(), random_ids(1, 5)
    assert model(ids, labels=ids).loss.dtype == torch.float64


@torch.no_grad()
def test_the_whole_forward_compiles():
    model, ids = tiny_model(), random_ids(1, 5)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
    assert len(compiled(ids).cache) == 6


def test_end_tokens_are_the_union_of_all_sources(caplog):
    """Field report R01."""
    model = tiny_model(eos_token_id=2)
    model.generation_config.eos_token_id = [2, 5]
    assert end_token_ids(model, tokenizer_eos=0) == {0, 2, 5}
    assert "end tokens differ (config [2], generation config [2, 5], tokenizer [0])" in caplog.text
    caplog.clear()
    model.generation_config.eos_token_id = None
    assert end_token_ids(model, tokenizer_eos=2) == {2}
    assert not caplog.text
    model.config.eos_token_id = None
    assert end_token_ids(model) == set()
