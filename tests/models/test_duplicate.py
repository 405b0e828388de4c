"""Upcycling by duplicated layers: where every tensor comes from, and that nothing else changes."""

import pytest
import torch

import looplm
from conftest import random_ids, tiny_model
from looplm.models.convert.duplicate import duplicate_core


@pytest.mark.parametrize(("order", "sources"), [("stack", [0, 1, 0, 1]), ("interleave", [0, 0, 1, 1])])
def test_every_tensor_is_a_copy_of_its_own(order, sources):
    model = tiny_model(prelude_layers=1, coda_layers=1, injection="concat", qk_bias=True).to(torch.bfloat16)
    deeper = duplicate_core(model, 2, order)
    before, after = model.state_dict(), deeper.state_dict()
    core = {name for name in before if name.startswith("model.core.")}
    for layer, source in enumerate(sources):
        prefix = f"model.core.{source}."
        for name in (name for name in core if name.startswith(prefix)):
            copied = after.pop(f"model.core.{layer}.{name.removeprefix(prefix)}")
            assert torch.equal(copied, before[name])
    assert after.keys() == before.keys() - core
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert len({tensor.data_ptr() for tensor in (*before.values(), *deeper.state_dict().values())}) == len(
        before
    ) + len(deeper.state_dict())
    assert deeper.dtype == torch.bfloat16
    assert all(parameter.requires_grad for parameter in deeper.parameters())


def test_only_the_number_of_core_layers_changes_in_the_config():
    model = tiny_model(prelude_layers=1, eos_token_id=3).train()
    model.generation_config.max_new_tokens = 7
    model.config.name_or_path = "somewhere"
    deeper = duplicate_core(model, 3)
    assert (model.config.core_layers, deeper.config.core_layers) == (2, 6)
    assert deeper.config.name_or_path == ""
    assert deeper.config.to_dict() | {"core_layers": 2, "_name_or_path": "somewhere"} == model.config.to_dict()
    assert deeper.generation_config.max_new_tokens == 7
    assert deeper.training


def test_a_stacked_core_once_is_the_old_core_twice():
    """Where nothing happens between loops, the layers a b a b applied once are a b applied twice."""
    model, ids = tiny_model(norm_in_loop=False, coda_layers=1), random_ids(2, 9)
    with torch.no_grad():
        wanted = model(ids, loops=2).logits
        torch.testing.assert_close(duplicate_core(model)(ids, loops=1).logits, wanted)
        assert not torch.allclose(duplicate_core(model, order="interleave")(ids, loops=1).logits, wanted, atol=1e-3)


def test_the_copies_learn_apart():
    model, ids = tiny_model(), random_ids(2, 9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    deeper = duplicate_core(model)
    deeper(ids, labels=ids).loss.backward()
    torch.optim.SGD(deeper.parameters(), lr=0.1).step()
    after = deeper.state_dict()
    name = "attention.q_proj.weight"
    assert not torch.equal(after[f"model.core.0.{name}"], after[f"model.core.2.{name}"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tied_heads_stay_tied_and_the_result_can_be_saved(tmp_path):
    deeper, ids = duplicate_core(tiny_model(tie_word_embeddings=True)), random_ids(2, 9)
    assert deeper.lm_head.weight is deeper.model.embed_tokens.weight
    looplm.save(deeper, tmp_path)
    torch.testing.assert_close(looplm.load(tmp_path)(ids).logits, deeper(ids).logits)
    assert deeper.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1,), "factor=1 must be at least 2"), ((2, "shuffle"), "order='shuffle' is not known")],
)
def test_duplications_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        duplicate_core(tiny_model(), *arguments)
