"""Loading is strict and by name; saving gives back what was read, byte for byte."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import looplm
from conftest import random_ids, tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(ouro_folder, tmp_path):
    copy = tmp_path / "ouro"
    shutil.copytree(ouro_folder, copy)
    (copy / "expected.safetensors").unlink()
    return copy


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_config(folder, **changes):
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("max_shard_size", ["5GB", "200KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ouro_round_trip_is_byte_equal(folder, tmp_path, max_shard_size, dtype):
    change_tensors(folder, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    looplm.save(looplm.load(folder, dtype="auto"), tmp_path / "ours", max_shard_size=max_shard_size)
    looplm.save(looplm.load(tmp_path / "ours", dtype="auto"), tmp_path / "theirs", "ouro", max_shard_size)
    shards = list((tmp_path / "theirs").glob("*.safetensors"))
    assert len(shards) == 1 if max_shard_size == "5GB" else len(shards) > 1
    written = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    original = load_file(folder / WEIGHTS)
    assert set(written) == set(original)
    for name, tensor in original.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].view(torch.uint8).equal(tensor.view(torch.uint8))
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "theirs"))
    for ignored in ("auto_map", "transformers_version", "torch_dtype"):
        before.pop(ignored, None), after.pop(ignored, None)
    assert {k: after.get(k) for k in before} == before
    again, ids = looplm.load(tmp_path / "theirs"), random_ids(1, 9)
    assert torch.equal(again(ids).logits, looplm.load(folder)(ids).logits)


@pytest.mark.parametrize(
    "name", ["model.early_exit_gate.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_missing_tensor_is_named(folder, name):
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"misses tensor '{name}'"):
        looplm.load(folder)


def test_an_extra_tensor_is_named(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.3.bias": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"unexpected tensor 'model.layers.3.bias'"):
        looplm.load(folder)


def test_a_misshapen_tensor_is_named(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"tensor 'model.norm.weight' .* has shape \[2\]; the config asks for \[64\]"):
        looplm.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"use_sliding_window": True},
        {"sliding_window": 128},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"attention_dropout": 0.1},
        {"attention_bias": True},
        {"early_exit_step": 2},
        {"early_exit_threshold": 0.5},
        {"brand_new_key": 1},
    ],
)
def test_config_values_that_change_the_computation_are_refused(folder, change):
    change_config(folder, **change)
    with pytest.raises(ValueError, match=next(iter(change))):
        looplm.load(folder)


@pytest.mark.parametrize("key", ["total_ut_steps", "rope_theta", "vocab_size"])
def test_a_missing_config_key_is_named(folder, key):
    values = json.loads((folder / "config.json").read_text())
    del values[key]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"lacks '{key}'"):
        looplm.load(folder)


def test_folders_that_are_no_checkpoints(folder, tmp_path):
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        looplm.load(tmp_path / "nowhere")
    change_config(folder, model_type="gpt2")
    with pytest.raises(ValueError, match="model_type='gpt2'"):
        looplm.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        looplm.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is not there"):
        looplm.load(folder)


def test_files_that_are_not_whole(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        looplm.load(folder)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors only"):
        looplm.load(folder)


def test_a_missing_shard_is_named(folder, tmp_path):
    looplm.save(looplm.load(folder), tmp_path / "sharded", "ouro", max_shard_size="200KB")
    shard = min((tmp_path / "sharded").glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=f"names {shard.name}, which is not there"):
        looplm.load(tmp_path / "sharded")


def test_from_pretrained_is_strict_too(tmp_path):
    looplm.save(tiny_model(), tmp_path)
    ids = random_ids(1, 5)
    assert torch.equal(looplm.load(tmp_path)(ids).logits, tiny_model()(ids).logits)
    assert type(AutoConfig.from_pretrained(tmp_path)) is looplm.LoopLMConfig
    backbone = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(backbone(ids).last_hidden_state, tiny_model().model(ids).last_hidden_state)
    change_tensors(tmp_path, lambda tensors: tensors.pop("model.exit_gate.bias"))
    for load in (AutoModelForCausalLM.from_pretrained, looplm.load):
        with pytest.raises(ValueError, match=r"misses tensor 'model.exit_gate.bias'"):
            load(tmp_path)
    change_tensors(
        tmp_path, lambda tensors: tensors.update({"model.exit_gate.bias": torch.zeros(1), "x": torch.ones(1)})
    )
    for load in (AutoModelForCausalLM.from_pretrained, looplm.load):
        with pytest.raises(ValueError, match="unexpected tensor 'x'"):
            load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("with_head", [True, False])
def test_tied_and_untied_heads(tmp_path, tied, with_head):
    model, ids = tiny_model(tie_word_embeddings=tied), random_ids(1, 5)
    looplm.save(model, tmp_path)
    head = model.lm_head.weight.detach().clone()
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": head}) if with_head else t.pop("lm_head.weight", 0))
    if not tied and not with_head:
        with pytest.raises(ValueError, match=r"misses tensor 'lm_head.weight'"):
            looplm.load(tmp_path)
        return
    again = looplm.load(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    if tied and with_head:
        change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head + 1}))
        with pytest.raises(ValueError, match="two different tensors"):
            looplm.load(tmp_path)


def test_other_parts_cannot_be_saved_as_ouro(tmp_path):
    with pytest.raises(ValueError, match="norm_placement='pre'"):
        looplm.save(tiny_model(norm_placement="pre"), tmp_path / "x", "ouro")
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="layout='gguf'"):
        looplm.save(tiny_model(), tmp_path, "gguf")


@pytest.mark.parametrize("dtype", ["int8", "float33", "no"])
def test_a_dtype_that_is_none_is_refused(folder, dtype):
    with pytest.raises(ValueError, match=f"dtype='{dtype}'"):
        looplm.load(folder, dtype=dtype)


def test_two_rotary_bases_that_differ_are_refused(folder):
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(ValueError, match=r"two values of rope_theta, 500000.0 and 1000000.0"):
        looplm.load(folder)
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert looplm.load(folder).config.rope_theta == 1e6


def test_pickles_are_never_read(tmp_path):
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="safetensors only"):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


def test_an_unknown_device_is_refused(folder):
    with pytest.raises(ValueError, match="device='foo'"):
        looplm.load(folder, device="foo")


def test_mismatched_sizes_are_never_initialised_anew(tmp_path):
    looplm.save(tiny_model(), tmp_path)
    other = tiny_model(intermediate_size=64).config
    with pytest.raises(ValueError, match="has another shape for tensor"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=other, ignore_mismatched_sizes=True)
