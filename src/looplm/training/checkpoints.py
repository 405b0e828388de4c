"""Checkpoints that count only when complete: written aside, then renamed."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerFast

from looplm.models import LoopLMForCausalLM, save

_PARTIAL = ".partial"
_STATE, _META = "trainer.safetensors", "trainer.json"


def save_checkpoint(
    folder: Path, step: int, model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerFast, optimizer: Optimizer,
    keep: int,
) -> Path:  # fmt: skip
    """Write `folder/step-N`: model and tokenizer as any transformers folder, optimiser and random state beside them.

    The folder appears under its name in one rename, after its files are on disk. The oldest beyond `keep` go.
    """
    target = folder / f"step-{step:08d}"
    partial = target.with_suffix(_PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    save(model, partial)
    tokenizer.save_pretrained(partial)
    save_file(_optimizer_tensors(model, optimizer) | {"rng": torch.get_rng_state()}, partial / _STATE)
    (partial / _META).write_text(json.dumps({"step": step}))
    for file in partial.iterdir():
        _sync(file)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    _sync(folder)
    for old in complete_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-" + "[0-9]" * 8) if (path / _META).exists())


def restore(checkpoint: Path, model: LoopLMForCausalLM, optimizer: Optimizer) -> int:
    """Put optimiser and random state back (the weights are loaded with the model); the number of steps done."""
    state = load_file(checkpoint / _STATE)
    torch.set_rng_state(state.pop("rng"))
    parameters = dict(model.named_parameters())
    for key, tensor in state.items():
        name, entry = key.rsplit("/", 1)
        optimizer.state[parameters[name]][entry] = tensor
    return json.loads((checkpoint / _META).read_text())["step"]


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{entry}": tensor
        for name, parameter in model.named_parameters()
        for entry, tensor in optimizer.state.get(parameter, {}).items()
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
