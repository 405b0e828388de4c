"""Upcycling by depth: a model whose core holds every layer of another's several times."""

import copy
from typing import Literal

import torch

from looplm.models.causal_lm import LoopLMForCausalLM


def duplicate_core(
    model: LoopLMForCausalLM, factor: int = 2, order: Literal["stack", "interleave"] = "stack"
) -> LoopLMForCausalLM:
    """A new model with `factor` copies of each core layer, everything else equal; no tensor is shared with `model`.

    So Ouro went from 24 to 48 layers (arXiv 2510.25741, the start of stage 1b). The paper only says that they were
    duplicated, hence both orders: of layers a, b, "stack" makes a b a b and "interleave" a a b b.

    Raises:
        ValueError: if `factor` or `order` is not one of these, or the model's projections carry adapters.
    """
    if factor < 2:
        raise ValueError(f"factor={factor} must be at least 2: it is how often each core layer will be there")
    layers = range(model.config.core_layers)
    orders = {"stack": [*layers] * factor, "interleave": [layer for layer in layers for _ in range(factor)]}
    if order not in orders:
        raise ValueError(f"order={order!r} is not known; choose 'stack' or 'interleave'")
    config = copy.deepcopy(model.config)
    config.core_layers = len(orders[order])
    config.name_or_path = ""  # the new model lies in no folder yet
    with torch.device("meta"):
        deeper = LoopLMForCausalLM(config)
    before = model.state_dict()
    sources = {name: _source(name, orders[order]) for name in deeper.state_dict()}
    absent = sorted(set(sources.values()) - set(before))
    if absent:
        raise ValueError(f"the model holds no '{absent[0]}'; if it carries adapters, merge them before duplicating")
    tensors = {name: before[source].clone() for name, source in sources.items()}
    deeper.load_state_dict(tensors, strict=True, assign=True)
    deeper.tie_weights()
    deeper.generation_config = copy.deepcopy(model.generation_config)
    return deeper.train(model.training)


def _source(name: str, order: list[int]) -> str:
    """The tensor that `name` of the deeper model is a copy of; its core layer i copies layer `order[i]`."""
    parts = name.split(".")
    if parts[:2] == ["model", "core"]:
        parts[2] = str(order[int(parts[2])])
    return ".".join(parts)
