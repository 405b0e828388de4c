"""LoRA adapters in a model's projections (PEFT's), and the plain model that weights and adapters amount to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from looplm.models import LoopLMForCausalLM
from looplm.training.sharded import gathered

_FOLDER, _FILE = "adapter", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = "default"
_UNREAD = {"lm_head", "exit_gate", "embed_tokens"}  # whose weights are read without calling the module


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685) of rank `rank` and scale `alpha` / `rank` in the named projections.

    The core is shared, so its adapters act in every loop. All else stays frozen.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not self.targets:
            raise ValueError(f"{self} needs rank of at least 1, alpha above 0 and one target or more")
        unread = sorted(_UNREAD & set(self.targets))
        if unread:
            raise ValueError(
                f"lora.targets: '{unread[0]}' is not read through its module; adapt the core's projections"
            )

    def settings(self) -> Any:
        """PEFT's own form of these settings."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank, lora_alpha=self.alpha,  # ty: ignore[invalid-argument-type]
            lora_dropout=0.0, target_modules=list(self.targets), bias="none",
            task_type="CAUSAL_LM",
        )  # fmt: skip


def add_adapter(model: LoopLMForCausalLM, lora: Lora, seed: int) -> None:
    """Put fresh adapters into `model`, in place; they change nothing until trained.

    Raises:
        ValueError: for a target that is the name of no projection in the model.
    """
    from peft import inject_adapter_in_model

    projections = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    for target in lora.targets:
        if not any(f".{name}".endswith(f".{target}") for name in projections):
            known = sorted({name.rpartition(".")[2] for name in projections} - _UNREAD)
            raise ValueError(f"lora.targets: this model has no projection '{target}', only {', '.join(known)}")
    torch.manual_seed(seed)
    inject_adapter_in_model(lora.settings(), model, adapter_name=_NAME)


def load_adapter(model: LoopLMForCausalLM, folder: Path) -> None:
    """The adapter weights of a checkpoint, into the adapters that `model` has already."""
    parameters = dict(model.named_parameters())
    for name, tensor in load_file(folder / _FOLDER / _FILE).items():
        own = name.removeprefix(_PREFIX).replace(".weight", f".{_NAME}.weight")
        parameters[own].data.copy_(tensor)


def gathered_adapter(model: LoopLMForCausalLM, kept: bool = True) -> dict[str, Tensor]:
    """The adapter weights of `model`, whole, under PEFT's names, where they are `kept`; every process takes part."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters() if is_adapter(name)}
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): tensor.cpu().contiguous()
        for name, tensor in _gathered(own, kept).items()
    }


def save_adapter(lora: Lora, tensors: dict[str, Tensor], base: str, folder: Path) -> None:
    """Write adapter weights in PEFT's form to `folder/adapter`; `base` is the model that they belong to."""
    (folder / _FOLDER).mkdir(parents=True)
    save_file(tensors, folder / _FOLDER / _FILE)
    settings = lora.settings()
    settings.base_model_name_or_path, settings.inference_mode = base, True
    settings.save_pretrained(str(folder / _FOLDER))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain_model(
    model: LoopLMForCausalLM, weights: Mapping[str, Tensor] = MappingProxyType({}), kept: bool = True
) -> LoopLMForCausalLM | None:
    """A model without adapters or shards that computes what `model` does, on the processes that it is `kept` on.

    Every process takes part, one tensor after the other; None where it is not kept. Shards are put together on the CPU,
    and nothing is copied that is whole already. `weights` replace tensors of the same name (an average of them).
    """
    tensors = _gathered(model.state_dict() | dict(weights), kept)
    if not kept:
        return None
    with torch.device("meta"):
        plain = LoopLMForCausalLM(model.config)
    merged = {name.replace(".base_layer.", "."): value for name, value in tensors.items() if not is_adapter(name)}
    for down in (name for name in tensors if ".lora_A." in name):
        layer = down.partition(".lora_A.")[0]
        adapted: Any = model.get_submodule(layer)
        scale = adapted.scaling[_NAME]
        delta = tensors[down.replace(".lora_A.", ".lora_B.")] @ tensors[down]
        merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + scale * delta
    plain.load_state_dict(merged, strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _gathered(tensors: Mapping[str, Tensor], kept: bool) -> dict[str, Tensor]:
    whole = ((name, gathered(tensor.detach(), kept)) for name, tensor in tensors.items())
    return {name: tensor for name, tensor in whole if tensor is not None}
