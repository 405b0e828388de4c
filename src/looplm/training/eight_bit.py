"""AdamW with its moments in 8 bits (torchao's), and those as plain tensors that a checkpoint can hold."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.optim import Optimizer

_PARTS = ("codes", "scale", "qmap")  # integers, one scale for each 256 of them, and what number an integer stands for


def eight_bit_adamw(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """torchao's `AdamW8bit` (arXiv 2110.02861): a quarter of the moments' bytes. Tensors below 4,096 values stay whole.

    Its step is compiled on first use; call it within `compiling_in_one_line`.

    Raises:
        ValueError: without the `int8` extra.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ValueError("optimizer.bits=8 needs the 'int8' extra: pip install 'looplm[int8]'") from error
    return AdamW8bit(groups, **settings)


@contextmanager
def compiling_in_one_line() -> Generator[None]:
    """Inside, a step that PyTorch's compiler cannot make says what it takes, not all that the compiler has to say.

    Raises:
        ValueError: in its place; any other error passes.
    """
    try:
        yield
    except BackendCompilerFailed as error:
        reason = next(line for line in str(error).splitlines() if line)
        raise ValueError(
            f"the step of optimizer.bits=8 cannot be compiled ({reason}); that takes a C++ compiler, g++ or the one "
            "that CXX names; where there is one, clear the cache of torch.compile (torchinductor_* in the folder for "
            "temporary files), or set optimizer.bits=32"
        ) from error


def plain_parts(name: str, value: Tensor) -> dict[str, Tensor]:
    """An entry of an optimiser's state under its name; an 8-bit one as its parts, `NAME.codes` and so on."""
    if not isinstance(getattr(value, "codes", None), Tensor):
        return {name: value}
    return {f"{name}.{part}": getattr(value, part) for part in _PARTS}


def whole_entries(entries: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inverse of `plain_parts` over the state of one parameter of this dtype."""
    whole = {name: value for name, value in entries.items() if "." not in name}
    for name in {name.partition(".")[0] for name in entries.keys() - whole.keys()}:
        whole[name] = _joined(*(entries[f"{name}.{part}"] for part in _PARTS), dtype)
    return whole


def _joined(codes: Tensor, scale: Tensor, qmap: Tensor, dtype: torch.dtype) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit(codes, scale, qmap, bool((qmap < 0).any()), dtype)
