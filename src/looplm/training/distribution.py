"""Many processes as one: the world of a run, and PyTorch's DDP or FSDP2 applied to the training module from outside."""

import atexit
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from looplm.training.module import TrainedModule

Parallel = Literal["ddp", "fsdp"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all: its rank, how many there are, and the device that it computes on."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all processes."""
        if self.size > 1:
            tensor = tensor.to(self.device, copy=True)
            dist.all_reduce(tensor)
        return tensor

    def led(self, action: Callable[[], T]) -> T | None:
        """What `action` gives, on the leading process, which alone does it; None elsewhere.

        Raises:
            ValueError: if it fails for its input or for a file, on every process, so that none waits for another.
        """
        found, fault = None, [None]
        if self.leads:
            try:
                found = action()
            except (ValueError, OSError) as error:
                fault = [str(error)]
        if self.size > 1:
            dist.broadcast_object_list(fault)
        if fault[0] is not None:
            raise ValueError(fault[0])
        return found

    def each(self, action: Callable[[], T]) -> T:
        """What `action`, which waits for no other process, gives on this one.

        Raises:
            ValueError: if it fails for its input or for a file on any process, on every process.
        """
        found, cause = None, None
        try:
            found = action()
        except (ValueError, OSError) as error:
            cause = error
        faults = [None if cause is None else str(cause)] * self.size
        if self.size > 1:
            dist.all_gather_object(faults, faults[self.rank])
        fault = next((fault for fault in faults if fault is not None), None)
        if fault is not None:
            raise ValueError(fault) from cause
        return cast(T, found)

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()


def open_world() -> World:
    """The world that torchrun describes in the environment, or that is open already; one process without it.

    It stays open until the process ends, since runs may follow one another.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    if not dist.is_initialized():
        return World(device=device)
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)


def distribute(module: TrainedModule, parallel: Parallel, world: World) -> nn.Module:
    """`module` on this world's device, its gradients averaged over the processes; call the result, not the module.

    "ddp" keeps whole weights on every process. "fsdp" shards every block and the rest (`fully_shard`); the core's
    blocks keep their gathered weights across loops. Every process must run the same number of loops.
    """
    module.to(world.device)
    if world.size == 1:
        return module
    if parallel == "ddp":
        module.join_unused = True
        return DistributedDataParallel(module)
    mesh = init_device_mesh(world.device.type, (world.size,))
    backbone = module.model.model
    for stack, stays_gathered in ((backbone.prelude, False), (backbone.core, True), (backbone.coda, False)):
        for block in stack:
            fully_shard(block, mesh=mesh, reshard_after_forward=not stays_gathered)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for method in module.called:
        register_fsdp_forward_method(module, method)
    return module


def without_sync(module: nn.Module, last: bool) -> AbstractContextManager:
    """Around all but the last micro-batch of a step: DDP exchanges gradients once a step."""
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return nullcontext()
