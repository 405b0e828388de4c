"""A checkpoint layout: how its config and its tensors map to ours, both ways."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from looplm.models.config import LoopLMConfig

TensorTable = dict[str, tuple[str, ...]]


def nothing(config: LoopLMConfig) -> dict[str, Any]:
    """For layouts that store every tensor as it is, and no other."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`read_config` and `write_config` translate config.json.

    `tensors` maps each of the layout's tensor names to ours (None: the names are ours); several of ours are stored as
    one, joined along the first axis and given the shape in `stored_shapes` where that names one. `constants` are
    tensors that the layout stores though the config implies them.
    """

    model_type: str
    read_config: Callable[[dict[str, Any]], LoopLMConfig]
    write_config: Callable[[LoopLMConfig], dict[str, Any]]
    tensors: Callable[[LoopLMConfig], TensorTable] | None = None
    stored_shapes: Callable[[LoopLMConfig], dict[str, tuple[int, ...]]] = nothing
    constants: Callable[[LoopLMConfig], dict[str, Tensor]] = nothing
