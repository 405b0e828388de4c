"""Where float32 is the least that will do."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or itself where it is float64."""
    return x if x.dtype == torch.float64 else x.float()
