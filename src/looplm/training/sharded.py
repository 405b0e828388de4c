"""Tensors and modules that FSDP2 may have sharded."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reshard(module: nn.Module) -> None:
    """Give up the whole weights that a forward without backward has gathered: only shards are trained and saved."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
