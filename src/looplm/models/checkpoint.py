"""Loading and saving: our own layout and the released ones, strictly and from safetensors only."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import GenerationConfig

from looplm.models.causal_lm import LoopLMForCausalLM
from looplm.models.config import LoopLMConfig
from looplm.models.int8 import check_savable
from looplm.models.reading import HEAD, LAYOUTS, NATIVE, find_folder, read_layout, read_tensors, tensor_table

LayoutName = Literal["looplm", "ouro", "huginn_raven", "llama"]


def load(path_or_id: str | Path, dtype: str | torch.dtype = "float32", device: str = "cpu") -> LoopLMForCausalLM:
    """Read a looped model from a folder (or a hub id) in our layout or a released one.

    Args:
        dtype: the dtype of the weights; "auto" keeps the files' own.

    Raises:
        ValueError: for a missing, unexpected or misshapen tensor, a file that is not safetensors, or a config value
            that would change the computation and is not supported; each is named.
    """
    place, folder = _as_device(device), find_folder(path_or_id)
    layout, config = read_layout(folder)
    config.name_or_path = str(path_or_id)  # PEFT and TRL open the base model again by it
    with torch.device("meta"):
        model = LoopLMForCausalLM(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tensors = read_tensors(folder, layout, config, shapes)
    wanted = _common_dtype(tensors.values()) if dtype == "auto" else _as_dtype(dtype)
    tensors = {name: tensor.to(place, wanted) for name, tensor in tensors.items()}
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = wanted
    model.generation_config = _generation_config(folder, config)
    return model.eval()


def save(
    model: LoopLMForCausalLM, folder: str | Path, layout: LayoutName = "looplm", max_shard_size: str = "5GB"
) -> None:
    """Write `model` as safetensors (sharded past `max_shard_size`) with its config, in our layout or a family's own.

    Raises:
        ValueError: if the layout is unknown or cannot hold this model's parts, or its weights are int8; nothing is
            written then.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not known; choose one of {', '.join(map(repr, LAYOUTS))}")
    check_savable(model)
    folder, target = Path(folder), LAYOUTS[layout]
    if target is NATIVE:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return
    config = target.write_config(model.config) | {"torch_dtype": str(model.dtype).removeprefix("torch.")}
    ours = model.state_dict()
    state = {theirs: _join(ours, parts) for theirs, parts in tensor_table(target, model.config, ours).items()}
    state |= {name: state[name].reshape(shape) for name, shape in target.stored_shapes(model.config).items()}
    if model.config.tie_word_embeddings:
        del state[HEAD]
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state | target.constants(model.config), folder, max_shard_size=max_shard_size)
    model.generation_config.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _join(ours: dict[str, Tensor], parts: tuple[str, ...]) -> Tensor:
    return ours[parts[0]] if len(parts) == 1 else torch.cat([ours[part] for part in parts])


def _as_device(device: str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device!r} is not to be had here: {str(error).splitlines()[0]}") from error


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating-point dtype; choose float32, bfloat16, float16 or auto")
    return found


def _common_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    found = {tensor.dtype for tensor in tensors}
    if len(found) > 1:
        raise ValueError(f"the files mix dtypes ({', '.join(sorted(map(str, found)))}); name one with dtype=")
    return found.pop()


def _generation_config(folder: Path, config: LoopLMConfig) -> GenerationConfig:
    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)
