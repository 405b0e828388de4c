"""What the addition study reads off a model: accuracy by loops, and where the loops take its state."""

from itertools import pairwise
from math import log

import torch

from looplm.analysis.capture import Visit, walk
from looplm.analysis.spectral import spectral_radius
from looplm.analysis.trajectories import fixed_point_residual, principal_plane
from looplm.data.tokenizer import encode
from looplm.studies.answers import answered_at
from looplm.studies.study import Outcome, Points
from looplm.studies.trained import Run
from looplm.tasks import Addition
from looplm.training.data_recipe import TaskSource

TRAINED = 4
LOOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1000, 2000, 4000)
_TOLD = (1, 4, 16, 64, 512, 4000)
_COUNTED = 512
_FAR = 64  # where states are looked at closely
_TEST_SEED = 2 * 10**9  # past those of training and its held-out rows
_WATCHED, _PROBED = 16, 4  # questions whose states are followed, and whose Jacobians are taken


def measure(run: Run, deepest: int, questions: int) -> Outcome:
    """Accuracy on held-out pairs at `LOOPS` up to `deepest`, and the states of some of them on the way."""
    source = run.recipe.data.sources["addition"]
    assert isinstance(source, TaskSource)
    assert isinstance(source.task, Addition)
    task = Addition(digits=source.task.digits, held_out=source.task.held_out, split="test")
    examples = [task.example(seed) for seed in range(_TEST_SEED, _TEST_SEED + questions)]
    loops = [loop for loop in LOOPS if loop <= deepest]
    right = answered_at(run.model, run.tokenizer, examples, loops).double().mean(0).tolist()
    accuracy = [(float(loop), value) for loop, value in zip(loops, right, strict=True)]
    states = follow(run, [example.prompt + example.answer for example in examples], loops)
    return Outcome(
        values={
            **{f"at {loop:,}": value for loop, value in zip(loops, right, strict=True) if loop in _TOLD},
            "at the deepest": right[-1],
            **summary(accuracy),
            **states.values,
        },
        series={"accuracy": accuracy, **states.series},
    )


def summary(accuracy: Points) -> dict[str, float]:
    """What a curve of accuracy by loops comes to, from the trained loops on.

    fall: the peak less the worst. holds to: the last loops before it first lies over a point under the peak, 0 if it
    does at once, or if the peak itself is under a half. area: the mean over the logarithm of the loops up to 512.
    """
    peak = max(value for _, value in accuracy)
    later = [(loop, value) for loop, value in accuracy if loop >= TRAINED]
    held = 0.0
    for loop, value in later:
        if peak < 0.5 or value < peak - 0.01:
            break
        held = loop
    counted = [(log(loop), value) for loop, value in later if loop <= _COUNTED]
    area = sum((y0 + y1) / 2 * (x1 - x0) for (x0, y0), (x1, y1) in pairwise(counted))
    return {
        "peak": peak,
        "fall": peak - min(value for _, value in later),
        "holds to": held,
        "area": area / (counted[-1][0] - counted[0][0]),
    }


@torch.no_grad()
def follow(run: Run, texts: list[str], loops: list[int]) -> Outcome:
    """Norms and residuals of the states at `loops`, spectral radii at two of them, and one question's path.

    Only texts as long as the first are followed.
    """
    tokens = encode(run.tokenizer, texts)
    ids = torch.tensor([row for row in tokens if len(row) == len(tokens[0])][:_WATCHED])
    far = min(_FAR, loops[-1])
    norms: Points = []
    residuals: Points = []
    path, radii = [], {}
    for visit in walk(run.model, ids, loops[-1]):
        if visit.loop <= far:
            path.append(visit.state[0].flatten())
        if visit.loop in (TRAINED, far):
            radii[visit.loop] = _radius(visit)
        if visit.loop in loops:
            norms.append((float(visit.loop), visit.state.norm(dim=-1).mean().item()))
            residual = fixed_point_residual(visit.step, visit.state)
            residuals.append((float(visit.loop), residual.mean().item()))
    states = torch.stack(path)
    norm_at, residual_at = dict(norms), dict(residuals)
    return Outcome(
        values={
            "norm growth": norm_at[far] / norm_at[TRAINED],
            **{f"radius at {loop}": value for loop, value in radii.items()},
            **{f"residual at {loop}": residual_at[loop] for loop in (TRAINED, far)},
        },
        series={
            "state norm": norms,
            "residual": residuals,
            "path": [(x, y) for x, y in principal_plane(states).project(states).tolist()],
        },
    )


def _radius(visit: Visit) -> float:
    """The mean spectral radius of the loop's Jacobian at the states of a few questions, each with all its tokens."""
    state = visit.state[:_PROBED]
    context = visit.out.context.rows(torch.arange(len(state)))
    inputs = visit.out.inputs[: len(state)]
    found = spectral_radius(lambda moved: visit.model.model.step(moved, inputs, visit.loop + 1, context), state)
    return found.value.mean().item()
