"""Reading a checkpoint folder strictly: whichever layout it is in, our config and our tensors come out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from looplm.models.compat.huginn import HUGINN
from looplm.models.compat.layout import Layout, TensorTable
from looplm.models.compat.llama import LLAMA
from looplm.models.compat.ouro import OURO
from looplm.models.config import LoopLMConfig

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

NATIVE = Layout(
    model_type="looplm",
    read_config=lambda values: LoopLMConfig(**values),
    write_config=lambda config: config.to_diff_dict(),
)
FOREIGN = {layout.model_type: layout for layout in (OURO, HUGINN, LLAMA)}
LAYOUTS = {NATIVE.model_type: NATIVE} | FOREIGN


def find_folder(path_or_id: str | Path, weights: bool = True, **hub: Any) -> Path:
    """The local folder of a path or hub id; without `weights` a hub is asked for the small files alone.

    `hub` goes to huggingface_hub: revision, token, cache_dir, local_files_only.
    """
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    try:
        patterns = ["*.json", "*.txt", "*.jinja", "*.model", *(["*.safetensors"] if weights else [])]
        return Path(snapshot_download(str(path_or_id), allow_patterns=patterns, **hub))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"'{path_or_id}' is neither a folder nor a hub id that can be reached from here") from error


def read_layout(folder: Path) -> tuple[Layout, LoopLMConfig]:
    """The layout and our config of a checkpoint folder."""
    values = _read_json(folder / "config.json")
    model_type = values.get("model_type")
    if model_type not in LAYOUTS:
        raise ValueError(f"{folder} holds model_type={model_type!r}; looplm reads {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[model_type], LAYOUTS[model_type].read_config(values)


def tensor_table(layout: Layout, config: LoopLMConfig, own_names: Mapping[str, Any]) -> TensorTable:
    """The layout's tensor names, each with ours."""
    return {name: (name,) for name in own_names} if layout.tensors is None else layout.tensors(config)


def read_tensors(
    folder: Path, layout: Layout, config: LoopLMConfig, expected: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """The tensors of `folder` under our names, in the files' own dtype, of exactly the shapes in `expected`.

    Raises:
        ValueError: for a missing, unexpected or misshapen tensor, named as the files name it.
    """
    table = tensor_table(layout, config, expected)
    where, tied = _tensor_files(folder), config.tie_word_embeddings
    constants, stored = layout.constants(config), layout.stored_shapes(config)
    missing = sorted(set(table) - set(where) - ({HEAD} if tied else set()))
    if missing:
        raise ValueError(f"{folder} misses tensor '{missing[0]}' ({len(missing)} in all)")
    unexpected = sorted(set(where) - set(table) - set(constants))
    if unexpected:
        raise ValueError(f"{folder} has an unexpected tensor '{unexpected[0]}' ({len(unexpected)} in all)")
    read = _read_files(where)
    for name, value in constants.items():
        if name in read and not _agrees(read.pop(name), value):
            raise ValueError(f"'{name}' in {folder} is not what the config implies")
    ours: dict[str, Tensor] = {}
    for theirs, parts in table.items():
        if theirs in read:
            ours |= _split(theirs, read[theirs], parts, expected, stored.get(theirs), folder)
    if tied and not torch.equal(ours.setdefault(HEAD, ours[EMBEDDING]), ours[EMBEDDING]):
        raise ValueError(f"the config ties the head to the embedding, but {folder} holds two different tensors")
    return ours


def _split(
    theirs: str,
    tensor: Tensor,
    parts: tuple[str, ...],
    expected: Mapping[str, torch.Size],
    stored: tuple[int, ...] | None,
    folder: Path,
) -> dict[str, Tensor]:
    shapes = [expected[part] for part in parts]
    joined = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
    wanted = joined if stored is None else list(stored)
    if list(tensor.shape) != wanted:
        raise ValueError(f"tensor '{theirs}' in {folder} has shape {list(tensor.shape)}; the config asks for {wanted}")
    if not tensor.is_floating_point():
        raise ValueError(f"tensor '{theirs}' in {folder} is {tensor.dtype}, not floating point")
    pieces = tensor.reshape(joined).split([shape[0] for shape in shapes])
    return {part: piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}


def _agrees(stored: Tensor, implied: Tensor) -> bool:
    return stored.shape == implied.shape and torch.allclose(stored.float(), implied, atol=1e-2)


def _read_files(where: dict[str, Path]) -> dict[str, Tensor]:
    read = {}
    for file in sorted(set(where.values())):
        with _open(file) as tensors:
            read |= {name: tensors.get_tensor(name) for name, holder in where.items() if holder == file}
    return read


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
