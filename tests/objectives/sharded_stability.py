"""Run by torchrun: gradients of loss and stability under DDP and FSDP2 against those of one process, as JSON."""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from conftest import random_ids, tiny_model
from looplm.objectives import (
    AdjacentL2,
    ExpectedLoss,
    FiniteDifference,
    JacobianVector,
    Stability,
    StabilityTerm,
    VectorJacobian,
)

ROWS = 4


class Regularised(nn.Module):
    def __init__(self, form):
        super().__init__()
        changes = {"prelude_layers": 1, "coda_layers": 1, "injection": "concat", "state_init": "normal"}
        self.model = tiny_model(**changes).double().train()
        self.term = StabilityTerm(Stability(form=form))

    def forward(self, rows):
        ids, seeds = random_ids(ROWS, 6)[rows], rows + 100
        weights = torch.full(ids.shape, 1 / (ROWS * 5), dtype=torch.float64)
        batch = {"labels": ids, "weights": weights, "rows": rows, "num_rows": torch.tensor(ROWS), "row_seeds": seeds}
        trace = self.model.model(ids, loops=3, keep_loops="all", use_cache=False, state_seed=seeds)
        loss, _ = ExpectedLoss()(self.model, trace, batch)
        return self.term.settings.mix(loss, self.term(self.model, trace, batch)[0])


def wrapped(module, parallel):
    if parallel == "ddp":
        return DistributedDataParallel(module, broadcast_buffers=False)
    for block in module.model.model.core:
        fully_shard(block, reshard_after_forward=False)
    return fully_shard(module, reshard_after_forward=False)


def worst_difference(form, parallel):
    """The largest relative difference of a parameter's gradient from that of all rows on one process."""
    alone, module = Regularised(form), Regularised(form)
    alone(torch.arange(ROWS)).backward()
    size, rank = dist.get_world_size(), dist.get_rank()
    outer = wrapped(module, parallel)  # named, since DDP's reducer dies with it
    (outer(torch.arange(ROWS).tensor_split(size)[rank]) * size).backward()
    worst = 0.0
    for wanted, parameter in zip(alone.parameters(), module.parameters(), strict=True):
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        worst = max(worst, ((found - wanted.grad).abs().max() / wanted.grad.abs().max()).item())
    return worst


def main():
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    found = {}
    for parallel, form in [
        *(("ddp", form) for form in (JacobianVector(), VectorJacobian(every=4), FiniteDifference(every=4))),
        *(("fsdp", form) for form in (FiniteDifference(), FiniteDifference(every=4, warm=True), AdjacentL2())),
    ]:
        found[f"{parallel} {form.kind} {form.every}"] = worst_difference(form, parallel)
    for form in (JacobianVector(), VectorJacobian()):
        try:
            worst_difference(form, "fsdp")
        except ValueError as error:
            found[f"fsdp {form.kind}"] = str(error)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
