"""Which row of an optimiser step each row of a batch is, and the seeds and counts that follow."""

import torch
from torch import Tensor

from looplm.objectives.targets import Batch


def step_rows(batch: Batch) -> Tensor:
    """The index [B] of each row within its optimiser step, over all ranks and micro-batches; -1 marks an empty row.

    A batch that does not say is a step of its own.
    """
    if "rows" in batch:
        return batch["rows"]
    return torch.arange(len(batch["labels"]), device=batch["labels"].device)


def num_rows(batch: Batch) -> Tensor:
    """How many rows the optimiser step has, over all ranks and micro-batches: 0-d, the batch's own by default."""
    return batch["num_rows"] if "num_rows" in batch else torch.tensor(len(batch["labels"]))


def row_seeds(batch: Batch) -> Tensor:
    """A seed [B] of each row's own, whatever batch it lies in; the row's index by default."""
    return batch["row_seeds"] if "row_seeds" in batch else step_rows(batch)


def chosen_rows(batch: Batch, every: int) -> Tensor:
    """Indices [R] into the batch of the real rows whose index within the step is a multiple of `every`."""
    rows = step_rows(batch)
    return ((rows >= 0) & (rows % every == 0)).nonzero().squeeze(-1)


def num_chosen(batch: Batch, every: int) -> Tensor:
    """How many rows `chosen_rows` names over the whole step: 0-d, at least 1."""
    return ((num_rows(batch) + every - 1) // every).clamp(min=1)
