"""The same function at the cost of a larger model: what a trained small model does, timed at a size that matters."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from looplm.models import LoopLMForCausalLM

_NORMS = ("pre", "branch", "post", "norm")  # how their names end, before "weight"


@torch.no_grad()
def padded(model: LoopLMForCausalLM, width: int, layers: int) -> LoopLMForCausalLM:
    """`model` with zeros around its matrices and layers that add nothing: its logits, and the cost of the larger one.

    Heads are added, not widened, so that rotations stay; RMS norms are rescaled for the added channels.

    Raises:
        ValueError: for a smaller size, or a model whose zeros would not stay zeros.
    """
    small = model.config
    plain = small.norm == "rms" and small.norm_placement in ("pre", "branch", "sandwich_branch") and not small.bias
    if not plain or small.state_init != "embedding" or small.injection != "none" or small.mlp != "swiglu":
        raise ValueError("only models like Ouro's (RMS norms before and after branches, no injection) can be padded")
    if width < small.hidden_size or layers < small.core_layers:
        raise ValueError(f"the model has width {small.hidden_size} and {small.core_layers} layers; pad to no less")
    share = small.hidden_size / width
    times = -(-width // small.hidden_size)
    config = copy.deepcopy(small)
    config.hidden_size, config.core_layers, config.norm_eps = width, layers, small.norm_eps * share
    config.intermediate_size *= times
    config.num_attention_heads *= times
    config.num_key_value_heads *= times
    large = LoopLMForCausalLM(config).to(model.dtype).eval()
    held = model.state_dict()
    for name, tensor in large.state_dict().items():
        tensor.zero_()
        if name in held:
            given = held[name] * share**0.5 if name.split(".")[-2] in _NORMS else held[name]
            _corner(tensor, given.shape).copy_(given)
    return large


def _corner(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The first part of a tensor along every axis."""
    return tensor[tuple(slice(size) for size in shape)]
