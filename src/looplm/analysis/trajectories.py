"""Where loops take a state: its path in a plane, its movement by loop, the kind of its end, and other starts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("fixed point", "orbit", "slider", "other")


@dataclass(frozen=True, kw_only=True)
class Plane:
    """The two directions along which states vary most (Huginn, arXiv 2502.05171, Figures 11 and 12).

    centre [D] · axes [2, D], orthonormal · shares [2]: the part of the variance along each.
    """

    centre: Tensor
    axes: Tensor
    shares: Tensor

    def project(self, states: Tensor) -> Tensor:
        """The coordinates [..., 2] of states [..., D]."""
        return (states - self.centre) @ self.axes.T


def principal_plane(states: Tensor) -> Plane:
    """The plane of states [..., D], of one trajectory or of several together.

    Raises:
        ValueError: if there are fewer than 3 states or 2 dimensions.
    """
    points = states.reshape(-1, states.shape[-1])
    if len(points) < 3 or points.shape[-1] < 2:
        raise ValueError(f"states of shape {list(states.shape)} span no plane; give 3 states of 2 dimensions or more")
    centre = points.mean(0)
    _, sizes, axes = torch.linalg.svd(points - centre, full_matrices=False)
    variances = sizes.square()
    whole = variances.sum().clamp(min=torch.finfo(points.dtype).tiny)
    return Plane(centre=centre, axes=axes[:2], shares=variances[:2] / whole)


def step_norms(states: Tensor) -> Tensor:
    """||h_(t+1) - h_t|| [T - 1, ...] of states [T, ..., D]."""
    return (states[1:] - states[:-1]).norm(dim=-1)


def relative_steps(states: Tensor) -> Tensor:
    """||h_(t+1) - h_t|| / ||h_(t+1)|| [T - 1, ...] of states [T, ..., D]."""
    return step_norms(states) / states[1:].norm(dim=-1).clamp(min=torch.finfo(states.dtype).tiny)


def distance_to_last(states: Tensor) -> Tensor:
    """||h_t - h_T|| [T, ...] of states [T, ..., D]: how far each loop is from where the trajectory ends."""
    return (states - states[-1]).norm(dim=-1)


def fixed_point_residual(phi: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
    """||phi(h) - h|| / ||h|| [...] of a state [..., D]: 0 at a fixed point."""
    return (phi(state) - state).norm(dim=-1) / state.norm(dim=-1).clamp(min=torch.finfo(state.dtype).tiny)


def spread_of_starts(states: Tensor) -> Tensor:
    """How far trajectories [K, T, ..., D] from K starts are apart, relative to their size [T, ...].

    sqrt(mean ||h - h'||^2 over pairs / mean ||h||^2): 0 where they met (path independence), sqrt(2) for unrelated ones.

    Raises:
        ValueError: if there are fewer than two starts.
    """
    starts = len(states)
    if starts < 2:
        raise ValueError("one start has no other to be apart from; give 2 or more")
    pairs = 2 * starts / (starts - 1) * (states - states.mean(0)).square().sum(-1).mean(0)
    size = states.square().sum(-1).mean(0)
    return (pairs / size.clamp(min=torch.finfo(states.dtype).tiny)).sqrt()


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """What a trajectory's second half must show to be a fixed point, an orbit or a slider, in this order.

    A **fixed point**: the steps of its last half are on average below `still` of the state's norm, or at most `shrink`
    times those of its first half. Steps that fall as 1 / t^2 just halve, so faster ones add up to a bounded way.
    An **orbit**: after some lag p of at most half its length it comes back: the mean of ||h_(t+p) - h_t|| is at most
    `returns` times that at the lag below p where it is largest. A **slider**: it goes straight on: its ends are at
    least `straight` times as far apart as its path is long. All else (wandering, chaos, periods too long to be seen,
    drifting orbits) is **other**. An arc of under 0.44 of a turn is taken for a slider, since no more of it was seen;
    a spiral that closes by less than half in a quarter of the loops is an orbit; going on slower than `still` is rest;
    and what is not finite is other.
    """

    still: float = 1e-3
    shrink: float = 0.5
    returns: float = 0.3
    straight: float = 0.7

    def __post_init__(self) -> None:
        for name in ("still", "shrink", "returns", "straight"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")


def classify(states: Tensor, criteria: Criteria | None = None) -> Tensor:
    """Which of `KINDS` each trajectory of states [T, ..., D] is, as an index [...] (Huginn, Figure 12).

    Raises:
        ValueError: for fewer than 16 states, whose second half is too short to tell.
    """
    if len(states) < 16:
        raise ValueError(f"{len(states)} states are too few to tell kinds of trajectories apart; give 16 or more")
    criteria = criteria or Criteria()
    tail = states[len(states) // 2 :]
    kinds = torch.full(states.shape[1:-1], KINDS.index("other"))
    kinds[_straightness(tail) >= criteria.straight] = KINDS.index("slider")
    kinds[_return(tail) <= criteria.returns] = KINDS.index("orbit")
    relative, shrink = _rest(tail)
    kinds[(relative < criteria.still) | (shrink <= criteria.shrink)] = KINDS.index("fixed point")
    return kinds


def shares(kinds: Tensor) -> dict[str, float]:
    """What part of the trajectories is of each kind."""
    return {kind: (kinds == index).double().mean().item() for index, kind in enumerate(KINDS)}


def _rest(tail: Tensor) -> tuple[Tensor, Tensor]:
    """The mean relative step [...] of the tail's second half, and its mean step over that of the first half."""
    steps = step_norms(tail)
    half = len(steps) // 2
    early, late = steps[:half].mean(0), steps[half:].mean(0)
    return relative_steps(tail)[half:].mean(0), late / early.clamp(min=torch.finfo(tail.dtype).tiny)


def _straightness(tail: Tensor) -> Tensor:
    """The distance of the ends over the length of the path [...]."""
    return (tail[-1] - tail[0]).norm(dim=-1) / step_norms(tail).sum(0).clamp(min=torch.finfo(tail.dtype).tiny)


def _return(tail: Tensor) -> Tensor:
    """The least, over lags of 2 or more, of the mean distance at a lag over the largest at a shorter one [...]."""
    lags = range(1, len(tail) // 2 + 1)
    apart = torch.stack([(tail[lag:] - tail[:-lag]).norm(dim=-1).mean(0) for lag in lags])
    largest = apart.cummax(0).values[:-1].clamp(min=torch.finfo(tail.dtype).tiny)
    return (apart[1:] / largest).amin(0)
