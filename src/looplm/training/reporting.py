"""What a run says of itself: the numbers of a step, the held-out losses, and alarms by name."""

import statistics
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from looplm.training.checkpoints import Live
from looplm.training.depth import Depth, DepthSchedule
from looplm.training.distribution import World
from looplm.training.evaluate import held_out_losses
from looplm.training.loader import StepBatch, first_rows
from looplm.training.logs import Log
from looplm.training.module import MetricSums, ObjectiveModule, row_depths
from looplm.training.monitors import NonFiniteGuard, diagnose, gradient_norms, measure_peak_flops, training_flops
from looplm.training.recipe import Recipe
from looplm.training.sharded import reshard

Batch = Mapping[str, Tensor]
_OBSERVED_ROWS = 2  # the first of a step, at log steps


class Reporter:
    """Reads a run without touching it; the same on every process."""

    def __init__(
        self, recipe: Recipe, live: Live, depth: DepthSchedule, held_out: Mapping[str, Batch], guard: NonFiniteGuard,
        world: World,
    ) -> None:  # fmt: skip
        self.recipe, self.live, self.depth, self.world = recipe, live, depth, world
        self.held_out, self.guard = held_out, guard
        assert isinstance(live.module, ObjectiveModule)
        self.module = live.module
        self.loops = live.model.config.loops
        self.peak_flops = measure_peak_flops(world.device, getattr(torch, recipe.precision))

    def gradient_norms(self) -> dict[str, float]:
        """The norm of the gradient by part of the model, before clipping."""
        return gradient_norms(self.live.model)

    def step(self, batch: StepBatch, metrics: MetricSums, step: int, seconds: float) -> dict[str, float]:
        """The numbers of a step that took so many seconds on this process."""
        depths = self._depths(batch, step)
        length = self.recipe.data.length
        flops = sum(
            training_flops(
                self.live.model.config, depth.loops, depth.grad_loops, rows * length, length, self._reads(depth)
            )
            for depth, rows in depths.items()
        )
        speed = {
            "tokens_per_second": batch.num_rows * length / seconds,
            "flop_utilisation": flops / seconds / (self.peak_flops * self.world.size),
            "loops": statistics.mean(depth.loops for depth in depths.elements()),
            "grad_loops": statistics.mean(depth.grad_loops for depth in depths.elements()),
        }
        seen = {f"rows/{name}": count for name, count in batch.counts.items()}
        if self.guard.skipped:
            seen["skipped_steps"] = self.guard.skipped
        return self._observed(batch, depths) | self._means(metrics, depths) | speed | seen

    def evaluation(self) -> dict[str, float]:
        """`{source}/loss_loop{t}` for every source and t = 1 to twice the model's loops."""
        found = held_out_losses(self.module.losses_by_loop, self.held_out, 2 * self.loops, self.world.device)
        reshard(self.module)
        return found

    def tell(self, log: Log, step: int, values: dict[str, float], of: str = "step") -> None:
        """Write `values`, if any, after `step` steps, and which pathologies come or go with these numbers of `of`."""
        if values:
            log.write(step, values)
            log.alarms(step, of, {alarm.name: alarm.message for alarm in diagnose(values, self.recipe.monitors)})

    def _depths(self, batch: StepBatch, step: int) -> Counter[Depth]:
        """How many of a step's rows run at each depth."""
        found: Counter[Depth] = Counter()
        for index, rows in enumerate(batch.spans):
            found.update(row_depths(self.depth, self.recipe.seed, step, index, rows).values())
        return found

    def _reads(self, depth: Depth) -> int:
        return len(self.recipe.objective.needs(depth.loops))

    def _means(self, metrics: MetricSums, depths: Mapping[Depth, float]) -> dict[str, float]:
        """The objective's numbers; rows that stop at different loops have no exit distribution in common."""
        found = metrics.means(self.world.sum)
        if len({depth.loops for depth in depths}) == 1:
            return found
        return {name: value for name, value in found.items() if not name.startswith("exit_loop")}

    def _observed(self, batch: StepBatch, depths: Mapping[Depth, float]) -> dict[str, float]:
        """The trajectory of the step's first rows, wherever they lie, at the step's greatest depth.

        A process without any of them runs a row of padding: under shards all run the same loops.
        """
        rows = {name: value.to(self.world.device) for name, value in first_rows(batch, _OBSERVED_ROWS).items()}
        sums = MetricSums()
        for part, mass in self.module.observed(rows, max(depth.loops for depth in depths)):
            sums.add(part, mass)
        reshard(self.module)
        return sums.means(self.world.sum)
