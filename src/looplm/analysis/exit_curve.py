"""Accuracy against mean loops: the curve that an exit threshold traces, beside the points of fixed depth."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from looplm.models.exits import exit_loops

THRESHOLDS = (0.0, 0.001, 0.002, 0.005, 0.01, *(round(0.02 * i, 2) for i in range(1, 50)), 0.99, 0.995, 0.999, 1.0)


@dataclass(frozen=True, kw_only=True)
class DepthPoint:
    """Accuracy at a mean number of loops."""

    mean_loops: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class ExitPoint(DepthPoint):
    """What leaving at threshold `q` reaches."""

    q: float


def fixed_depth_points(correct: Tensor, weights: Tensor) -> list[DepthPoint]:
    """The accuracy of every fixed depth: `correct` [N, T] says which loops answer right, `weights` [N] sum to 1."""
    accuracies = weights @ correct.double()
    return [DepthPoint(mean_loops=loop, accuracy=accuracy) for loop, accuracy in enumerate(accuracies.tolist(), 1)]


def exit_curve(
    gate_logits: Tensor, correct: Tensor, weights: Tensor, thresholds: Sequence[float] = THRESHOLDS
) -> list[ExitPoint]:
    """The points that leaving by CDF >= q reaches; gate logits [N, T] at the token that gives the answer."""
    points = []
    for q in thresholds:
        chosen = exit_loops(gate_logits, q)
        right = correct.gather(-1, chosen[:, None] - 1).squeeze(-1)
        mean_loops, accuracy = (float(weights @ values.double()) for values in (chosen, right))
        points.append(ExitPoint(mean_loops=mean_loops, accuracy=accuracy, q=q))
    return points


def oracle_exits(correct: Tensor, stays: bool) -> Tensor:
    """The loops [N] at which one who knows the answers would leave: the first of `correct` [N, T] that is right.

    stays: right from there to the last loop, so that no accuracy is gained over all loops but by leaving early what is
    wrong at the last. Where no loop will do, the first costs least.
    """
    good = correct.flip(-1).long().cumprod(-1).flip(-1) if stays else correct.long()
    return torch.where(good.any(-1), good.argmax(-1) + 1, 1)


def height_over_fixed(curve: Sequence[DepthPoint], fixed: Sequence[DepthPoint]) -> float:
    """How far the curve passes over the fixed-depth point that it clears least (negative: under it).

    Between its points the curve is a straight line, which drawing one of two thresholds at random reaches.
    """
    ordered = sorted(curve, key=lambda point: (point.mean_loops, point.accuracy))
    depths, accuracies = [p.mean_loops for p in ordered], [p.accuracy for p in ordered]
    return min(float(np.interp(point.mean_loops, depths, accuracies)) - point.accuracy for point in fixed)


def worst_gap(curve: Sequence[DepthPoint], fixed: Sequence[DepthPoint]) -> float:
    """The lowest height of the curve over the straight lines between fixed-depth points (negative: below them)."""
    depths, accuracies = [p.mean_loops for p in fixed], [p.accuracy for p in fixed]
    return min(point.accuracy - float(np.interp(point.mean_loops, depths, accuracies)) for point in curve)
