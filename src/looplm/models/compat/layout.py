"""A checkpoint layout: how its config and its tensors map to ours, both ways."""

from collections.abc import Callable, Iterable
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


def check_keys(
    family: str,
    values: dict[str, Any],
    required: Iterable[str],
    fixed: dict[str, tuple[Any, ...]],
    known: Iterable[str],
) -> None:
    """Refuse a released config that lacks a key, has an unknown one, or a value that we do not compute.

    `fixed` gives the values of a key that we compute; the first of them is the default.
    """
    for key in required:
        if values.get(key) is None:
            raise ValueError(f"the {family} config lacks '{key}'")
    for key, allowed in fixed.items():
        if values.get(key, allowed[0]) not in allowed:
            raise ValueError(f"the {family} config has {key}={values[key]!r}, which is not supported")
    unknown = sorted(set(values) - {*known, *fixed})
    if unknown:
        raise ValueError(f"the {family} config has an unknown key '{unknown[0]}', which might change the computation")


def check_parts(family: str, config: LoopLMConfig, parts: dict[str, Any]) -> None:
    """Refuse a model that a family's layout cannot hold, by the part that differs."""
    for part, value in parts.items():
        if getattr(config, part) != value:
            raise ValueError(f"{family}'s layout cannot hold {part}={getattr(config, part)!r}; it needs {value!r}")


def rope_theta(family: str, values: dict[str, Any]) -> float:
    """The base of plain rotary positions, under the older key or the newer one; scaled ones are refused."""
    rope = values.get("rope_parameters") or {}
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    if any(value != plain.get(key) for key, value in rope.items() if key != "rope_theta"):
        raise ValueError(f"the {family} config has rope_parameters={rope!r}, which is not supported")
    thetas = {source["rope_theta"] for source in (values, rope) if source.get("rope_theta") is not None}
    if not thetas:
        raise ValueError(f"the {family} config lacks 'rope_theta'")
    if len(thetas) > 1:
        raise ValueError(f"the {family} config gives two values of rope_theta, {min(thetas)} and {max(thetas)}")
    return float(thetas.pop())
