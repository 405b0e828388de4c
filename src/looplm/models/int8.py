"""Weight-only int8: the blocks' projections in a quarter of the bytes, one scale per output channel."""

from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from looplm.models.block import Block

Model = TypeVar("Model", bound=PreTrainedModel)

_DTYPES = (torch.float32, torch.bfloat16)  # float16 would overflow: sums are made of integers and scaled later


def quantize_int8(model: Model) -> Model:
    """Hold the linear projections of prelude, core and coda as int8, in place, and give the model back.

    torchao rounds each row w of a matrix to s * round(w / s) with s = max|w| / 127.5, so no weight moves by more than
    s / 2; activations and products keep the model's dtype. Embeddings, head, gate, injection and norms stay as they
    are. It saves memory, not time: each product makes a float copy of its own matrix, for as long as it runs.

    Raises:
        ValueError: without the `int8` extra, for a model that is int8 already, or one in another dtype than float32 and
            bfloat16.
    """
    try:
        from torchao.quantization.quant_api import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ValueError("int8 weights need the 'int8' extra: pip install 'looplm[int8]'") from error
    if is_int8(model):
        raise ValueError("the model's weights are int8 already; quantize the float model, once")
    if model.dtype not in _DTYPES:
        raise ValueError(f"int8 weights are made from float32 or bfloat16, not {model.dtype}; load it as one")
    for block in model.modules():
        if isinstance(block, Block):
            quantize_(block, Int8WeightOnlyConfig(set_inductor_config=False))
    return model


def is_int8(module: nn.Module) -> bool:
    """Whether any of its parameters is held as int8."""
    return any(_is_held_apart(parameter) for parameter in module.parameters())


def held_bytes(module: nn.Module) -> int:
    """Bytes of its parameters as they are held: of int8 ones their integers, scales and zero points."""
    return sum(part.nbytes for parameter in module.parameters() for part in _parts(parameter))


def check_savable(model: nn.Module) -> None:
    """Refuse int8 weights, which no layout of ours holds.

    Raises:
        ValueError: if the model has any.
    """
    if is_int8(model):
        raise ValueError("int8 weights are not saved; save the float model, and quantize it whenever it is loaded")


def _is_held_apart(weight: Tensor) -> bool:
    return isinstance(getattr(weight, "qdata", None), Tensor)


def _parts(weight: Tensor) -> list[Tensor]:
    if not _is_held_apart(weight):
        return [weight]
    names, _ = weight.__tensor_flatten__()  # ty: ignore[missing-attribute]
    return [getattr(weight, name) for name in names]
