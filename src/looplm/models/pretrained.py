"""What the backbone and the language model share as transformers models: traits, initialisation, strict loading."""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from looplm.models.block import Attention, Block
from looplm.models.config import LoopLMConfig
from looplm.models.initialisation import initialise
from looplm.models.int8 import check_savable
from looplm.models.reading import EMBEDDING, FOREIGN, HEAD, find_folder, read_layout, read_tensors


class LoopLMPreTrainedModel(PreTrainedModel):
    """What the backbone and the language model share: transformers' traits, initialisation and strict loading."""

    config_class = LoopLMConfig
    config: LoopLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": Block, "attentions": Attention}  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        initialise(module, self.config)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, output_loading_info=False, **kwargs):
        """As in transformers, but a tensor that is missing from the files is an error, never initialised anew.

        Folders in Ouro's and Huginn's released layouts open too; their configs are translated, no remote code is run.
        """
        if not kwargs.setdefault("use_safetensors", True):
            raise ValueError("use_safetensors=False: looplm reads safetensors only")
        source = pretrained_model_name_or_path
        if source is not None and "state_dict" not in kwargs and _is_foreign(source, kwargs):
            model, info = cls._from_foreign(source, *args, config=config, **kwargs)
        else:
            loaded: Any = super().from_pretrained(source, *args, config=config, output_loading_info=True, **kwargs)
            model, info = loaded
        head = {HEAD} if not hasattr(model, "lm_head") else set()
        for problem, names in (
            ("misses", info["missing_keys"]),
            ("has another shape for", {key[0] for key in info["mismatched_keys"]}),
            ("has an unexpected", set(info["unexpected_keys"]) - head),
        ):
            if names:
                raise ValueError(f"{source} {problem} tensor '{min(names)}' ({len(names)} in all)")
        _check_tensor_parallel(model.config, kwargs.get("distributed_config"))
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; int8 weights are refused."""
        check_savable(self)
        return super().save_pretrained(*args, **kwargs)

    @classmethod
    def _from_foreign(cls, source: str, *args: Any, config: LoopLMConfig | None, **kwargs: Any) -> Any:
        """Load a released layout: its tensors under our names go through transformers' own loading."""
        if kwargs.pop("variant", None) is not None:
            raise ValueError("variant= is not known in Ouro's and Huginn's layouts; name the folder itself")
        hub = _hub_arguments(kwargs)
        folder = find_folder(source, **hub) / kwargs.pop("subfolder", "")
        layout, stored = read_layout(folder)
        tensors = read_tensors(folder, layout, stored, cls._shapes(stored))
        if config is None:
            config, kwargs = LoopLMConfig.from_dict(stored.to_dict(), return_unused_kwargs=True, **kwargs)
        loaded: Any = super().from_pretrained(
            None, *args, config=config, state_dict=tensors, output_loading_info=True, **kwargs
        )
        model = loaded[0]
        model.config.name_or_path = model.name_or_path = str(source)  # transformers was told of no folder
        if model.can_generate() and (folder / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return loaded

    @classmethod
    def _shapes(cls, config: LoopLMConfig) -> dict[str, torch.Size]:
        """The shapes of a whole checkpoint under our names, the head's too where this class has none."""
        with torch.device("meta"):
            own = cls(config).state_dict()
        prefix = "" if HEAD in own else f"{cls.base_model_prefix}."
        shapes = {prefix + name: tensor.shape for name, tensor in own.items()}
        return {HEAD: shapes[EMBEDDING]} | shapes

    @classmethod
    def prepare_distribute_model(cls, distributed_config=None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; pipeline stages are refused, since a loop would pass through all of them every time."""
        stages = getattr(distributed_config, "pp_size", None) or 1
        if stages > 1:
            raise ValueError(
                f"pp_size={stages}: a looped core passes its layers again in every loop, which pipeline stages cannot; "
                "use tp_size or fsdp_size"
            )
        return super().prepare_distribute_model(distributed_config, *args, **kwargs)


def _hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in ("cache_dir", "revision", "token", "local_files_only") if name in kwargs}


def _is_foreign(source: str, kwargs: dict[str, Any]) -> bool:
    values, _ = LoopLMConfig.get_config_dict(source, subfolder=kwargs.get("subfolder", ""), **_hub_arguments(kwargs))
    return values.get("model_type") in FOREIGN


def _check_tensor_parallel(config: LoopLMConfig, distributed_config: Any) -> None:
    ranks = getattr(distributed_config, "tp_size", None) or 1
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % ranks:
            raise ValueError(f"tp_size={ranks} does not divide {name}={getattr(config, name)}")
