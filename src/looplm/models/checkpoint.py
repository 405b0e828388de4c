"""Loading and saving: our own layout and the released ones, strictly and from safetensors only."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig

from looplm.models.causal_lm import LoopLMForCausalLM
from looplm.models.compat.layout import Layout
from looplm.models.compat.ouro import OURO
from looplm.models.config import LoopLMConfig

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TIED = ("lm_head.weight", "model.embed_tokens.weight")


def _own_names(config: LoopLMConfig) -> dict[str, str]:
    with torch.device("meta"):
        return {name: name for name in LoopLMForCausalLM(config).state_dict()}


NATIVE = Layout(
    model_type="looplm",
    read_config=lambda values: LoopLMConfig(**values),
    write_config=lambda config: config.to_diff_dict(),
    names=_own_names,
)
LAYOUTS = {layout.model_type: layout for layout in (NATIVE, OURO)}


def load(path_or_id: str | Path, dtype: str | torch.dtype = "float32", device: str = "cpu") -> LoopLMForCausalLM:
    """Read a looped model from a folder (or a hub id) in our layout or a released one.

    Args:
        dtype: the dtype of the weights; "auto" keeps the files' own.

    Raises:
        ValueError: for a missing, unexpected or misshapen tensor, a file that is not safetensors, or a config value
            that would change the computation and is not supported; each is named.
    """
    folder = find_folder(path_or_id)
    layout, config = read_layout(folder)
    with torch.device("meta"):
        model = LoopLMForCausalLM(config)
    tensors = _read_all(folder, layout.names(config), model.state_dict(), config.tie_word_embeddings)
    wanted = _common_dtype(tensors.values()) if dtype == "auto" else _as_dtype(dtype)
    tensors = {name: tensor.to(device, wanted) for name, tensor in tensors.items()}
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = wanted
    model.generation_config = _generation_config(folder, config)
    return model.eval()


def save(
    model: LoopLMForCausalLM, folder: str | Path, layout: Literal["looplm", "ouro"] = "looplm",
    max_shard_size: str = "5GB",
) -> None:  # fmt: skip
    """Write `model` as safetensors (sharded past `max_shard_size`) with its config, in our layout or Ouro's."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not known; choose one of {', '.join(map(repr, LAYOUTS))}")
    folder = Path(folder)
    if LAYOUTS[layout] is NATIVE:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return
    config = LAYOUTS[layout].write_config(model.config) | {"torch_dtype": str(model.dtype).removeprefix("torch.")}
    theirs = LAYOUTS[layout].names(model.config)
    state = {theirs[name]: tensor for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state[theirs[_TIED[0]]]
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, folder, max_shard_size=max_shard_size)
    model.generation_config.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def find_folder(path_or_id: str | Path) -> Path:
    """The local folder of a path or hub id."""
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
        return Path(snapshot_download(str(path_or_id), allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"'{path_or_id}' is neither a folder nor a hub id that can be reached from here") from error


def read_layout(folder: Path) -> tuple[Layout, LoopLMConfig]:
    """The layout and our config of a checkpoint folder."""
    values = _read_json(folder / "config.json")
    model_type = values.get("model_type")
    if model_type not in LAYOUTS:
        raise ValueError(f"{folder} holds model_type={model_type!r}; looplm reads {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[model_type], LAYOUTS[model_type].read_config(values)


def _read_all(folder: Path, names: dict[str, str], expected: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """All tensors under our names; the files must hold exactly `names`, in the shapes of `expected`."""
    where = _tensor_files(folder)
    head, embedding = (names[name] for name in _TIED)
    missing = sorted(set(names.values()) - set(where) - ({head} if tied else set()))
    if missing:
        raise ValueError(f"{folder} misses tensor '{missing[0]}' ({len(missing)} in all)")
    unexpected = sorted(set(where) - set(names.values()))
    if unexpected:
        raise ValueError(f"{folder} has an unexpected tensor '{unexpected[0]}' ({len(unexpected)} in all)")
    read = {}
    for file in sorted(set(where.values())):
        with _open(file) as tensors:
            read |= {name: tensors.get_tensor(name) for name, holder in where.items() if holder == file}
    for ours, theirs in names.items():
        if theirs in read and read[theirs].shape != expected[ours].shape:
            found, wanted = list(read[theirs].shape), list(expected[ours].shape)
            raise ValueError(f"tensor '{theirs}' in {folder} has shape {found}; the config asks for {wanted}")
    if tied and not torch.equal(read.setdefault(head, read[embedding]), read[embedding]):
        raise ValueError(f"the config ties '{head}' to '{embedding}', but {folder} holds two different tensors")
    return {ours: read[theirs] for ours, theirs in names.items()}


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if (folder / _INDEX).exists():
        declared = _read_json(folder / _INDEX).get("weight_map", {})
        files = [folder / name for name in sorted(set(declared.values()))]
    elif (folder / _SINGLE).exists():
        declared, files = None, [folder / _SINGLE]
    else:
        raise ValueError(f"{folder} holds neither {_SINGLE} nor {_INDEX} (looplm reads safetensors only)")
    where: dict[str, Path] = {}
    for file in files:
        if not file.exists():
            raise ValueError(f"{folder / _INDEX} names {file.name}, which is not there")
        with _open(file) as tensors:
            where |= dict.fromkeys(tensors.keys(), file)
    if declared is not None and set(declared) != set(where):
        stray = min(set(declared) ^ set(where))
        raise ValueError(f"{folder / _INDEX} and its shards disagree about tensor '{stray}'")
    return where


def _open(file: Path):
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise ValueError(f"{file} is not there")
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return values


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
