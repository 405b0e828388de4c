"""A run's batches step by step: which rows this process takes, cut into micro-batches and weighed as one step."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from looplm.data.rows import IGNORED, empty_row, stack
from looplm.training.data_recipe import Data
from looplm.training.mixture import Mixture

Batch = dict[str, Tensor]
Dealt = list[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One process's part of a step.

    micro_batches: each with `input_ids`, `labels`, `position_ids` [B, length]; `rows` (index within the step, -1 for an
        empty row), `source`, `row_seeds` [B]; and `num_rows`, the step's real rows on all processes.
    spans: the step's rows that each micro-batch covers on all processes together. counts: rows of each source since the
        run's start, this step included.
    """

    micro_batches: list[Batch]
    spans: list[range]
    num_rows: int
    counts: dict[str, int]


class StepLoader:
    """The steps `start` to `steps` of a run, from `counts` rows of each source on.

    Rows are a pure function of their index, so workers, processes and resumption change none of them. The step's rows
    are cut into micro-batches of `micro_rows` on every process, as even as may be; a process without a row in one gets
    an empty row.
    """

    def __init__(
        self, mixture: Mixture, counts: Mapping[str, int], start: int, steps: int, *, rank: int = 0, world: int = 1,
        micro_rows: int | None = None, epochs: int | None = None,
    ) -> None:  # fmt: skip
        plan = _Plan(mixture, dict(counts), start, steps, epochs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's own call
            self._loader = StatefulDataLoader(
                _Steps(mixture, rank, world, micro_rows),  # ty: ignore[invalid-argument-type]
                batch_size=None,
                sampler=plan,
                num_workers=mixture.data.workers,
                generator=torch.Generator(),  # else the loader would draw from the run's own stream
            )

    def __iter__(self) -> Iterator[StepBatch]:
        return iter(self._loader)


class _Plan:
    """What each step takes from which source, dealt in the main process."""

    def __init__(self, mixture: Mixture, counts: dict[str, int], start: int, steps: int, epochs: int | None) -> None:
        self.mixture, self.counts, self.start, self.steps = mixture, counts, start, steps
        self.last_row = None if epochs is None else mixture.rows_in_epochs(epochs)

    def __len__(self) -> int:
        return self.steps - self.start

    def __iter__(self) -> Iterator[tuple[int, Dealt, dict[str, int]]]:
        counts = dict(self.counts)
        for step in range(self.start, self.steps):
            num_rows = self.mixture.data.rows_at(step)
            if self.last_row is not None:
                num_rows = min(num_rows, self.last_row - sum(counts.values()))
            dealt = self.mixture.deal(counts, num_rows)
            for name, _ in dealt:
                counts[name] = counts.get(name, 0) + 1
            yield step, dealt, dict(counts)


class _Steps:
    """One process's part of a planned step."""

    def __init__(self, mixture: Mixture, rank: int, world: int, micro_rows: int | None) -> None:
        self.mixture, self.rank, self.world, self.micro_rows = mixture, rank, world, micro_rows

    def __getitem__(self, planned: tuple[int, Dealt, dict[str, int]]) -> StepBatch:
        step, dealt, counts = planned
        spans = _spans(len(dealt), None if self.micro_rows is None else self.micro_rows * self.world)
        micro_batches = [self._batch(step, dealt, share(span, self.rank, self.world)) for span in spans]
        return StepBatch(micro_batches=micro_batches, spans=spans, num_rows=len(dealt), counts=counts)

    def _batch(self, step: int, dealt: Dealt, own: range) -> Batch:
        names = list(self.mixture.sources)
        taken = [dealt[row] for row in own]
        rows = [self.mixture.sources[name].row(index) for name, index in taken]
        numbers = list(own) or [-1]
        batch = stack(rows or [empty_row(self.mixture.data.length, self.mixture.pad)])
        return batch | {
            "rows": torch.tensor(numbers),
            "source": torch.tensor([names.index(name) for name, _ in taken] or [0]),
            "row_seeds": torch.tensor([row_seed(self.mixture.seed, step, row) for row in numbers]),
            "num_rows": torch.tensor(len(dealt)),
        }


def first_rows(batch: StepBatch, count: int) -> Batch:
    """Of the step's first `count` rows those that this process has; a row of padding where it has none."""
    columns = ("input_ids", "position_ids", "row_seeds")
    chosen = [(micro["rows"] >= 0) & (micro["rows"] < count) for micro in batch.micro_batches]
    found = {
        name: torch.cat([micro[name][own] for micro, own in zip(batch.micro_batches, chosen, strict=True)])
        for name in columns
    }
    if len(found["row_seeds"]):
        return found
    first = {name: batch.micro_batches[0][name][:1] for name in columns}
    return first | {"position_ids": torch.zeros_like(first["position_ids"])}


def row_seed(seed: int, step: int, row: int) -> int:
    """A seed of a row's own."""
    return int(np.random.SeedSequence([seed, step, row + 1]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def step_weights(micro_batches: Sequence[Batch], data: Data, all_reduce: Callable[[Tensor], Tensor]) -> list[Batch]:
    """The micro-batches with `weights` [B, length], float64: what each target counts in the step's loss, over all
    processes.
    """
    num_sources = len(data.sources)
    counts = torch.zeros(num_sources, dtype=torch.float64)
    for batch in micro_batches:
        counts.index_add_(0, batch["source"], _targets(batch).sum(-1).double())
    counts = all_reduce(counts).cpu()
    if data.mean == "tokens":
        per_source = torch.full((num_sources,), 1.0, dtype=torch.float64) / counts.sum().clamp(min=1)
    else:
        weights = torch.tensor([source.weight for source in data.sources.values()], dtype=torch.float64)
        per_source = weights / counts.clamp(min=1)
    return [batch | {"weights": _targets(batch) * per_source[batch["source"]][:, None]} for batch in micro_batches]


def _targets(batch: Batch) -> Tensor:
    found = batch["labels"] != IGNORED
    found[:, 0] = False  # nothing precedes a row's first token
    return found


def _spans(num_rows: int, micro: int | None) -> list[range]:
    size = micro or num_rows
    return [range(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def share(span: range, rank: int, world: int) -> range:
    """This process's part of a span, as even as may be."""
    cuts = [span.start + len(span) * part // world for part in (rank, rank + 1)]
    return range(*cuts)
