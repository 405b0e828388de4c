"""The stability term: a regulariser of the core's Jacobian or trajectory, weighed against an objective's loss."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from looplm.models import LoopLMForCausalLM, Trace
from looplm.models.context import real_tokens
from looplm.models.precision import at_least_float32
from looplm.objectives.kinds import ByKind
from looplm.objectives.probes import (
    AnyProbe,
    FiniteDifference,
    JacobianVector,
    VectorJacobian,
    check_probe,
    core_step,
    in_evaluation,
    is_sharded,
    only,
    row_norms,
    unit_rows,
)
from looplm.objectives.rows import chosen_rows, num_chosen, row_seeds
from looplm.objectives.targets import Batch, Metrics, last_loop
from looplm.objectives.trajectories import AdjacentL2, SecantRatio

RISKY_WEIGHT = 0.15

StabilityForm = Annotated[
    JacobianVector | VectorJacobian | FiniteDifference | SecantRatio | AdjacentL2,
    ByKind(JacobianVector, VectorJacobian, FiniteDifference, SecantRatio, AdjacentL2),
]


class _Objective(Protocol):
    def trains(self, parameter_name: str) -> bool:
        """Whether the parameter of this name learns."""
        ...


@dataclass(frozen=True, kw_only=True)
class Stability:
    """Which form, how much of it, and how it joins the loss.

    mixing: "convex" is (1 - weight) loss + weight penalty (STARS' equation 4), "additive" leaves the loss whole
        (its Algorithm 1). from_step: the optimiser step from which it is on; before it, nothing is computed.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    form: StabilityForm = field(default_factory=JacobianVector)
    weight: float = 0.1
    mixing: Literal["convex", "additive"] = "convex"
    from_step: int = 0

    def __post_init__(self) -> None:
        if self.mixing not in ("convex", "additive"):
            raise ValueError(f"mixing={self.mixing!r} is not known; choose 'convex' or 'additive'")
        if self.weight < 0 or (self.mixing == "convex" and self.weight >= 1):
            raise ValueError(f"weight={self.weight} must not be negative, and below 1 where mixing='convex'")
        if self.from_step < 0:
            raise ValueError(f"from_step={self.from_step} must not be negative; 0 regularises from the start")

    def weight_at(self, step: int) -> float:
        """The penalty's weight at a step counted from 0; where it is 0 the form need not be run."""
        return self.weight if step >= self.from_step else 0.0

    def mix(self, loss: Tensor, penalty: Tensor) -> Tensor:
        """The loss that is differentiated; linear in both, so that micro-batches still add up."""
        share = 1 - self.weight if self.mixing == "convex" else 1.0
        return share * loss + self.weight * penalty

    def check_objective(self, objective: _Objective) -> None:
        """Refuse an objective that freezes what would be regularised."""
        if not objective.trains("model.core.0.mlp.up_proj.weight"):
            raise ValueError("stability regularises the core, which this objective keeps frozen; leave stability out")

    def check_model(self, model: LoopLMForCausalLM) -> None:
        """Refuse a model that the form cannot probe."""
        if isinstance(self.form, AnyProbe):
            check_probe(self.form, model)


class StabilityTerm(nn.Module):
    """`(model, trace, batch) -> (penalty, metrics)`, the mean over the step's chosen rows of the form's value.

    A row's value is that of its real tokens alone (see `real_tokens`), whatever padding stands beside them.
    `trace` must keep the loops of `settings.form.needs`. Penalties of micro-batches and ranks add up to the step's.

    A form with `warm` has one direction v [S, D] for all rows, kept in a buffer: `end_step` replaces it by the
    normalised sum of J v over the step's chosen rows, power iteration across steps on the rows' mean Jacobian.
    """

    direction: Tensor | None

    def __init__(self, settings: Stability) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("direction", None)  # its size is the first batch's
        self.register_load_state_dict_pre_hook(_make_room)
        self._images: Tensor | None = None  # [S, D], of this step; no buffer, since each process has its own
        if settings.weight >= RISKY_WEIGHT:
            warnings.warn(
                f"stability.weight={settings.weight:g} is high: STARS' addition model failed at 0.15 and 0.20 "
                "(Appendix C)",
                stacklevel=2,
            )

    def forward(self, model: LoopLMForCausalLM, trace: Trace, batch: Batch) -> tuple[Tensor, Metrics]:
        """The penalty and its metrics; see the class.

        Raises:
            ValueError: for a model that the form cannot probe, or rows of another length than a warm direction's.
        """
        form, loops = self.settings.form, last_loop(trace)
        if not trace.states.keys() >= form.needs(loops):
            raise ValueError(
                f"stability.form reads loops {sorted(form.needs(loops))}, but the trace kept {sorted(trace.states)}"
            )
        rows_R = chosen_rows(batch, form.every)
        if isinstance(form, AnyProbe):
            values_R = self._probe(form, model, trace, row_seeds(batch), rows_R)
        else:
            real_RS = real_tokens(trace.context.position_ids)[rows_R]
            values_R = form.values(trace.states, loops, rows_R, real_RS)
        penalty = values_R.sum() / num_chosen(batch, form.every).to(values_R.device)
        return penalty, {"stability": penalty.detach()}

    def end_step(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """After an optimiser step, on every process: fold the step's J v, summed by `all_reduce`, into the direction.

        A sum that is zero or not finite leaves the direction as it is.
        """
        if self._images is None:
            return
        total, self._images = all_reduce(self._images).to(self._images.device), None
        norm = torch.linalg.vector_norm(total)
        if norm > 0 and norm.isfinite():
            self.direction = total / norm

    def _probe(self, form: AnyProbe, model: LoopLMForCausalLM, trace: Trace, seeds: Tensor, rows_R: Tensor) -> Tensor:
        check_probe(form, model)
        loops = last_loop(trace)
        state = trace.states[loops].detach()
        direction_SD = self._kept_direction(form, state) if _is_warm(form) else None
        if not len(rows_R) and not is_sharded(model):
            return at_least_float32(state.new_zeros(0))
        # Sharded weights are gathered by all processes together: one without a chosen row probes any, and counts none.
        read_R = rows_R if len(rows_R) else torch.zeros_like(seeds[:1])
        real_RS = real_tokens(trace.context.position_ids)[read_R]
        x_RSD = only(real_RS, state[read_R])
        if direction_SD is None:
            part_RSD = v_RSD = form.draw(seeds[read_R], x_RSD, real_RS)
        else:
            part_RSD = only(real_RS, direction_SD.expand_as(x_RSD))
            v_RSD = unit_rows(part_RSD)
        with in_evaluation(model.model):
            values_R, image_RSD = form.measure(core_step(model, trace, loops, read_R), x_RSD, v_RSD)
        if self._images is not None:
            # J of the direction itself, of which a short row measured its own part at unit length.
            self._images += (image_RSD * row_norms(part_RSD))[: len(rows_R)].sum(0)
        return values_R[: len(rows_R)]

    def _kept_direction(self, form: AnyProbe, state: Tensor) -> Tensor:
        """The warm direction, and a place for this step's images, also where no row of this process is chosen."""
        like = at_least_float32(state[:1])
        if self.direction is None:
            self.direction = form.draw(torch.zeros(1, dtype=torch.int64), like)[0]
        self.direction = self.direction.to(like.device)
        if self.direction.shape != like.shape[1:]:
            raise ValueError(
                f"the warm direction is {list(self.direction.shape)} but the rows are {list(like.shape[1:])}; "
                "warm=True needs rows of one length"
            )
        if self._images is None:
            self._images = torch.zeros_like(self.direction)
        return self.direction


def _make_room(term: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A buffer of the saved direction's size, which a term that has seen no batch does not know."""
    if prefix + "direction" in state_dict:
        term.direction = torch.empty_like(state_dict[prefix + "direction"])


def _is_warm(form: AnyProbe) -> bool:
    return isinstance(form, JacobianVector | FiniteDifference) and form.warm
