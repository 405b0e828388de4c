"""Tensors and modules that FSDP2 may have sharded."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor, kept: bool) -> Tensor | None:
    """All of a tensor that may be sharded, then on the CPU, where it is `kept`; every process must ask.

    A device holds no more than this one tensor whole for it, and only until the next.
    """
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if not kept:
        return None
    return found.cpu() if isinstance(tensor, DTensor) else found


def reshard(module: nn.Module) -> None:
    """Give up the whole weights that a forward without backward has gathered: only shards are trained and saved."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
