"""Model, objective and stability term as one module, so that what wraps it sees every use of a parameter."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from looplm.models import LoopLMForCausalLM, Trace
from looplm.models.context import real_tokens
from looplm.objectives import Objective, Stability, StabilityTerm
from looplm.objectives.probes import in_evaluation
from looplm.objectives.rows import num_rows, step_rows
from looplm.objectives.targets import Batch, Metrics
from looplm.training.depth import Depth, DepthSchedule
from looplm.training.evaluate import losses_by_loop
from looplm.training.monitors import observe

DepthGroup = tuple[Depth, Batch]


class MetricSums:
    """Metrics of many batches: each a weighted sum, with the total of the weights (`mass`) that it was summed over."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: Metrics, mass: Tensor) -> None:
        """Add one batch's sums."""
        for name, value in metrics.items():
            pair = torch.stack([value.detach().double().cpu(), mass.detach().double().cpu()])
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def means(self, sum_over_processes: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Each metric's mean over all that it was read on, if anything: a loop that few rows reached counts those."""
        names = sorted(self.sums)
        if not names:
            return {}
        table = sum_over_processes(torch.stack([self.sums[name] for name in names])).tolist()
        return {name: value / mass for name, (value, mass) in zip(names, table, strict=True) if mass}


class TrainedModule(nn.Module):
    """A model under an objective: what a step differentiates, and what DDP and FSDP2 wrap.

    called: names of methods beside `forward` that read parameters · join_unused: set where DDP waits for all of them.
    """

    called: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: LoopLMForCausalLM, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.stability: StabilityTerm | None = None
        self.autocast = autocast
        self.join_unused = False

    def precision(self) -> torch.autocast:
        """Around what may be computed in a lower precision."""
        return torch.autocast(self.model.device.type, self.autocast, enabled=self.autocast is not None)

    def joined(self, loss: Tensor) -> Tensor:
        """`loss` with every trained parameter in its graph, if that is asked for."""
        if not self.join_unused:
            return loss
        return _Join.apply(loss, *(parameter for parameter in self.parameters() if parameter.requires_grad))

    def beside(self) -> dict[str, nn.Parameter]:
        """What is trained beside the model, by name."""
        return {name: value for name, value in self.named_parameters() if not name.startswith("model.")}


class ObjectiveModule(TrainedModule):
    """`model` under `objective`, with an optional stability term."""

    called = ("losses_by_loop", "observed")

    def __init__(
        self, model: LoopLMForCausalLM, objective: Objective, stability: Stability | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, autocast)
        self.objective = objective
        self.stability = None if stability is None else StabilityTerm(stability)

    def forward(self, groups: Sequence[DepthGroup], step: int) -> tuple[Tensor, list[tuple[Metrics, Tensor]]]:
        """The loss of a micro-batch whose rows are grouped by depth; its metrics with their weights."""
        parts = [self._group(depth, batch, step) for depth, batch in groups]
        loss = self.joined(torch.stack([loss for loss, _ in parts]).sum())
        return loss, [weighed for _, found in parts for weighed in found]

    def _group(self, depth: Depth, batch: Batch, step: int) -> tuple[Tensor, list[tuple[Metrics, Tensor]]]:
        regular = self.stability if self.stability is not None and self.stability.settings.weight_at(step) else None
        needed = self.objective.needs(depth.loops)
        if regular is not None:
            needed = needed | regular.settings.form.needs(depth.loops)
        with self.precision():
            trace = self._trace(batch, depth, sorted(needed))
            loss, metrics = self.objective(self.model, trace, batch)
            weighed = [(metrics, batch["weights"].sum())]
            if regular is not None:
                penalty, metrics = regular(self.model, trace, batch)
                loss = regular.settings.mix(loss, penalty)
                weighed.append((metrics, (step_rows(batch) >= 0).double().sum() / num_rows(batch)))  # a mean over rows
        return loss, weighed

    def _trace(self, batch: Batch, depth: Depth, keep: list[int]) -> Trace:
        return self.model.model(
            batch["input_ids"],
            position_ids=batch["position_ids"],
            loops=depth.loops,
            keep_loops=keep,
            use_cache=False,
            grad_loops=depth.grad_loops,
            state_seed=batch.get("row_seeds", 0),
        )

    def losses_by_loop(self, batch: Batch, loops: int) -> Tensor:
        """The weighted cross-entropy [loops] of a batch at every loop."""
        with in_evaluation(self.model):
            return losses_by_loop(self.model, batch, loops)

    @torch.no_grad()
    def observed(self, batch: Batch, loops: int) -> list[tuple[Metrics, Tensor]]:
        """What the monitors see of the trajectory on a batch, as `observe` gives it."""
        with in_evaluation(self.model):
            trace = self._trace(batch, Depth(loops=loops, grad_loops=loops), list(range(1, loops + 1)))
            return observe(self.model, trace, real_tokens(batch["position_ids"]))


class _Join(torch.autograd.Function):
    """The loss with every parameter in its graph: one that this depth left out gets a zero gradient, as DDP needs."""

    @staticmethod
    def forward(ctx, loss, *parameters):
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return loss.clone()

    @staticmethod
    def backward(ctx, grad_loss):  # ty: ignore[incompatible-method-override]
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)
        return grad_loss, *zeros


def depth_groups(
    schedule: DepthSchedule, seed: int, step: int, micro_batch: int, rows: range, batch: Batch
) -> list[DepthGroup]:
    """A micro-batch cut by the depth that each row runs at, alike on every process.

    `rows` are the micro-batch's rows over all processes. Where this process has no row of a depth that another one has,
    it runs an empty row there, so that all run the same loops in the same order.
    """
    drawn = row_depths(schedule, seed, step, micro_batch, rows)
    if schedule.per != "sequence":
        return [(drawn[rows[0]], batch)]
    own = batch["rows"].tolist()
    groups = []
    for depth in sorted(set(drawn.values()), key=lambda depth: (depth.loops, depth.grad_loops)):
        chosen = [index for index, row in enumerate(own) if row >= 0 and drawn[row] == depth]
        groups.append((depth, _rows(batch, chosen) if chosen else _empty(batch)))
    return groups


def row_depths(
    schedule: DepthSchedule, seed: int, step: int, micro_batch: int, rows: range
) -> dict[int, Depth]:  # fmt: skip
    """The depth at which each row of a micro-batch runs; rows that share one share its draw."""
    if schedule.per == "sequence":
        return {row: schedule.draw(seed, step, row) for row in rows}
    return dict.fromkeys(rows, schedule.draw(seed, step, micro_batch if schedule.per == "micro_batch" else 0))


def _rows(batch: Batch, chosen: list[int]) -> dict[str, Tensor]:
    return {name: value if value.ndim == 0 else value[chosen] for name, value in batch.items()}


def _empty(batch: Batch) -> dict[str, Tensor]:
    row = _rows(batch, [0])
    masked = {"labels": -100, "weights": 0, "rows": -1}
    return row | {name: torch.full_like(row[name], value) for name, value in masked.items()}
