"""A checkpoint layout: how its config and its tensor names map to ours, both ways."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from looplm.models.config import LoopLMConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`read_config` and `write_config` translate config.json; `names` maps our tensor names to the layout's."""

    model_type: str
    read_config: Callable[[dict[str, Any]], LoopLMConfig]
    write_config: Callable[[LoopLMConfig], dict[str, Any]]
    names: Callable[[LoopLMConfig], dict[str, str]]
