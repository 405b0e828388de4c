"""Checkpoints that count only when complete: written aside by every process, then renamed once."""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from looplm.models import LoopLMForCausalLM, save
from looplm.training.adapters import Lora, gathered_adapter, plain_model, save_adapter
from looplm.training.averaging import Ema
from looplm.training.distribution import World
from looplm.training.eight_bit import plain_parts, whole_entries
from looplm.training.module import TrainedModule

_PARTIAL, _OLD = ".partial", ".old"
_STATE, _META = "trainer", "trainer.json"


@dataclass(frozen=True, kw_only=True)
class Base:
    """The checkpoint that a run's adapters belong to: where it lay, and a hash of its config and weights."""

    path: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands besides tensors: steps done, rows taken from each source, counters of the monitors.

    With fingerprints of what it must go on with: the rows of each source, and the checkpoint under its adapters.
    """

    step: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    guard: dict[str, int] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    base: Base | None = None


_PROGRESS = TypeAdapter(Progress)


@dataclass(frozen=True, kw_only=True)
class Live:
    """The objects whose tensors a checkpoint holds."""

    module: TrainedModule
    optimizers: tuple[Optimizer, ...]
    ema: Ema | None = None
    lora: Lora | None = None

    @property
    def model(self) -> LoopLMForCausalLM:
        """The model under training."""
        return self.module.model

    def parameters(self) -> dict[str, Tensor]:
        """Those of the model, and what is trained beside it, by name."""
        return {**dict(self.model.named_parameters()), **self.module.beside()}

    def trained(self) -> list[Tensor]:
        """The parameters that the optimisers move."""
        return [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]


def save_checkpoint(
    folder: Path, live: Live, progress: Progress, tokenizer: PreTrainedTokenizerBase, keep: int, world: World
) -> Path:
    """Write `folder/step-N`: a model folder with its tokenizer, and in `trainer/` what resuming needs beside it.

    `trainer/` is a distributed checkpoint in safetensors, read back on any number of processes. The folder appears
    under its name in one rename, after its files are on disk; one that is there already stays. The oldest beyond `keep`
    go.
    """
    target = folder / f"step-{progress.step:08d}"
    if (target / _META).exists():
        return target
    partial = target.with_suffix(_PARTIAL)
    if world.leads:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.wait()
    _write_state(partial / _STATE, _tensors(live, world), world)
    _write_model(live.model, {}, partial, world)
    if live.ema is not None:
        _write_model(live.model, live.ema.state_dict(), partial / "ema", world)
    adapter = gathered_adapter(live.model, kept=world.leads)
    if world.leads:
        if live.lora is not None:
            save_adapter(live.lora, adapter, live.model.name_or_path or "", partial)
        tokenizer.save_pretrained(partial)
        state = {file.name: file.stat().st_size for file in sorted((partial / _STATE).iterdir())}
        (partial / _META).write_text(json.dumps(asdict(progress) | {_STATE: state}))
        _publish(partial, target)
        for old in complete_checkpoints(folder)[:-keep]:
            _remove(old)
    world.wait()
    return target


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-" + "[0-9]" * 8) if (path / _META).exists())


def content_hash(checkpoint: Path) -> str:
    """A hash of a checkpoint's config and weights, all of their bytes."""
    found = hashlib.blake2b(digest_size=16)
    for path in (checkpoint / "config.json", *sorted(checkpoint.glob("*.safetensors"))):
        with path.open("rb") as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def clear_unfinished(folder: Path) -> None:
    """Remove what writing or removing a checkpoint left behind when its process died."""
    for suffix in (_PARTIAL, _OLD):
        for stale in folder.glob(f"step-*{suffix}"):
            shutil.rmtree(stale)


def seed_process(seed: int, step: int, world: World) -> None:
    """From `step` on, let torch's generators, from which dropout alone draws in a run, be this process's own."""
    own = np.random.SeedSequence([seed, step, world.rank, 1]).generate_state(1, np.uint64)
    torch.manual_seed(int(own[0]))


def restore(checkpoint: Path, live: Live, world: World) -> None:
    """Put optimiser, averages, and random state back (the weights are loaded with the model).

    A process whose random state was not stored, since there were fewer, keeps the one that it has.

    Raises:
        ValueError: if a file of the state is missing or damaged, or is the state of another model.
    """
    with intact(checkpoint, _STATE):
        _read_state(checkpoint, live, world)


def _read_state(checkpoint: Path, live: Live, world: World) -> None:
    reader = HuggingFaceStorageReader(str(checkpoint / _STATE))
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    parameters = live.parameters()
    own_rng = _rng_states(world)
    state: dict[str, Tensor] = {}
    for key, meta in stored.items():
        place, _, name = key.partition("/")
        if place in ("rng", "cuda_rng"):
            if key in own_rng:
                state[key] = torch.empty(meta.size, dtype=meta.properties.dtype)
        else:
            parameter = parameters.get(name.rpartition("/")[0] if place == "optimizer" else name)
            state[key] = _place_for(parameter, meta)
    with _alone_by_intent():
        dcp.load(state, storage_reader=reader, no_dist=world.size == 1)
    _put_back(state, live, parameters)
    for key in own_rng.keys() & state.keys():
        if key.startswith("cuda_rng/"):
            torch.cuda.set_rng_state(state[key], world.device)
        else:
            torch.set_rng_state(state[key])


def read_progress(checkpoint: Path) -> Progress:
    """Where the run stood at a complete checkpoint.

    Raises:
        ValueError: if trainer.json is damaged, or a file that it names is missing or has another size.
    """
    with intact(checkpoint, _META):
        stored = json.loads((checkpoint / _META).read_text())
        progress = _PROGRESS.validate_python({name: value for name, value in stored.items() if name != _STATE})
        sizes = dict(stored[_STATE])
    for name, size in sizes.items():
        with intact(checkpoint, f"{_STATE}/{name}"):
            if (found := (checkpoint / _STATE / name).stat().st_size) != size:
                raise ValueError(f"{found} bytes where {size} were written")
    return progress


@contextmanager
def intact(checkpoint: Path, part: str) -> Generator[None]:
    """Inside, a part of a run's checkpoint that cannot be read ends in one line that names it and the way out."""
    try:
        yield
    except (CheckpointException, SafetensorError, KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        line = (str(reason).splitlines() or [type(reason).__name__])[0]
        raise ValueError(
            f"{checkpoint / part} is damaged ({line}); remove {checkpoint}, and the run goes on from the one before it"
        ) from error


def _put_back(state: Mapping[str, Tensor], live: Live, parameters: Mapping[str, Any]) -> None:
    owner = {
        id(p): optimizer for optimizer in live.optimizers for group in optimizer.param_groups for p in group["params"]
    }
    moments: dict[str, dict[str, Tensor]] = {}
    averages: dict[str, Tensor] = {}
    direction: dict[str, Tensor] = {}
    for key, tensor in state.items():
        place, _, name = key.partition("/")
        if place == "optimizer":
            owned, _, entry = name.rpartition("/")
            moments.setdefault(owned, {})[entry] = tensor
        elif place == "ema":
            averages[name] = tensor
        elif place == "stability":
            direction[name] = tensor
        elif place == "beside":
            parameters[name].data.copy_(tensor)
    for name, entries in moments.items():
        parameter = parameters[name]
        owner[id(parameter)].state[parameter] = whole_entries(entries, parameter.dtype)
    if live.ema is not None:
        live.ema.load_state_dict(averages)
    if live.module.stability is not None:
        live.module.stability.load_state_dict(direction, strict=bool(direction))


def _tensors(live: Live, world: World) -> dict[str, Tensor]:
    """Every tensor under a name that says whose it is."""
    parameters = live.parameters()
    named = {id(parameter) for parameter in parameters.values()}
    assert named >= {id(parameter) for parameter in live.trained()}, "the model shows other weights than are trained"
    states = {parameter: entries for optimizer in live.optimizers for parameter, entries in optimizer.state.items()}
    tensors = {
        key: part
        for name, parameter in parameters.items()
        for entry, value in states.get(parameter, {}).items()
        for key, part in plain_parts(f"optimizer/{name}/{entry}", torch.as_tensor(value)).items()
    } | {f"beside/{name}": parameter.detach() for name, parameter in live.module.beside().items()}
    if live.ema is not None:
        tensors |= {f"ema/{name}": tensor for name, tensor in live.ema.state_dict().items()}
    if live.module.stability is not None:
        tensors |= {f"stability/{name}": tensor for name, tensor in live.module.stability.named_buffers()}
    return tensors | _rng_states(world)


def _rng_states(world: World) -> dict[str, Tensor]:
    """The states of this process's generators, by the names under which they are stored."""
    states = {f"rng/{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"cuda_rng/{world.rank}"] = torch.cuda.get_rng_state(world.device)
    return states


def _write_model(model: LoopLMForCausalLM, weights: Mapping[str, Tensor], folder: Path, world: World) -> None:
    plain = plain_model(model, weights, kept=world.leads)  # gathers shards, so every process takes part
    if plain is not None:
        save(plain, folder)


def _write_state(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    with _alone_by_intent():
        dcp.save(tensors, storage_writer=writer, no_dist=world.size == 1)


@contextmanager
def _alone_by_intent() -> Generator[None]:
    """Inside, one process without a group is no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _place_for(parameter: Tensor | None, meta: Any) -> Tensor:
    """An empty tensor for a stored one: laid out as its parameter where it has the parameter's shape."""
    if parameter is not None and parameter.shape == meta.size:
        return torch.zeros_like(parameter.detach(), dtype=meta.properties.dtype)
    return torch.zeros(meta.size, dtype=meta.properties.dtype)


def _publish(partial: Path, target: Path) -> None:
    for file in partial.rglob("*"):
        _sync(file)
    if target.exists():  # what is left of a checkpoint; a complete one is never written again
        _remove(target)
    os.replace(partial, target)
    _sync(target.parent)


def _remove(checkpoint: Path) -> None:
    """Take a checkpoint away in one rename, so that nobody ever finds a part of it under its name."""
    old = checkpoint.with_suffix(_OLD)
    shutil.rmtree(old, ignore_errors=True)
    os.replace(checkpoint, old)
    shutil.rmtree(old)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
