"""Llama's layout against transformers' own Llama: an ordinary decoder is a looped model of one loop."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from looplm.models import load, save

SHAPE = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(params=[{"tie_word_embeddings": True}, {"rope_theta": 1e5, "rms_norm_eps": 1e-5}], ids=["tied", "base"])
def llama(request, tmp_path):
    torch.manual_seed(0)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": request.param.pop("rope_theta", 1e4)}}
    theirs = LlamaForCausalLM(LlamaConfig(**SHAPE, **rope, **request.param)).eval()
    theirs.save_pretrained(tmp_path / "llama")
    return theirs, tmp_path / "llama"


def test_logits_are_llamas_and_the_model_has_one_loop(llama):
    theirs, folder = llama
    ours = load(folder)
    ids = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-6)
    assert (ours.config.loops, ours.config.core_layers, ours.config.exit_gate) == (1, 3, False)
    made = [model.generate(ids, max_new_tokens=6, do_sample=False) for model in (ours, theirs)]
    assert made[0].equal(made[1])


def test_written_back_it_is_what_it_was(llama, tmp_path):
    theirs, folder = llama
    save(load(folder), tmp_path / "again", layout="llama")
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    again = LlamaForCausalLM.from_pretrained(tmp_path / "again")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert again(ids).logits.equal(theirs(ids).logits)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "rope_parameters="),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling="),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"something_new": 1}, "unknown key 'something_new'"),
        ({"rms_norm_eps": None}, "lacks 'rms_norm_eps'"),
    ],
)
def test_what_would_compute_something_else_is_refused(llama, change, says):
    _, folder = llama
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=says):
        load(folder)


def test_older_configs_say_the_base_elsewhere_or_nowhere(llama):
    _, folder = llama
    file = folder / "config.json"
    values = json.loads(file.read_text())
    theta = values.pop("rope_parameters")["rope_theta"]
    file.write_text(json.dumps(values | {"rope_theta": theta, "rope_scaling": None}))
    assert load(folder).config.rope_theta == theta
    file.write_text(json.dumps(values))
    assert load(folder).config.rope_theta == 1e4


def test_a_model_of_several_loops_is_no_llama(llama, tmp_path):
    model = load(llama[1])
    model.config.loops = 2
    with pytest.raises(ValueError, match=r"Llama's layout cannot hold loops=2; it needs 1"):
        save(model, tmp_path / "looped", layout="llama")
    assert not (tmp_path / "looped").exists()
