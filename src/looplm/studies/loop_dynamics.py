"""What the loop of a trained model does on held-out text: where tokens leave it, and where its states go."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from looplm.analysis.capture import Visit, walk
from looplm.analysis.spectral import spectral_radius
from looplm.analysis.trajectories import (
    KINDS,
    classify,
    distance_to_last,
    principal_plane,
    relative_steps,
    shares,
    spread_of_starts,
)
from looplm.engine import Engine, LogitsKL, SamplingParams
from looplm.models import LoopLMForCausalLM
from looplm.studies.study import Outcome, Points

KL = 5e-4  # Huginn's, in nats (arXiv 2502.05171, Figure 10)
_PROMPT = 16


@dataclass(frozen=True, kw_only=True)
class Look:
    """How much is looked at.

    rows, tokens: of the text whose states are followed · starts: random start states of each
    follow: loops followed, times the trained count · shown: tokens of the heat map, from the middle of the first row
    prompts, completion: of the text made to see where tokens leave, with at most `leave` times the trained count
    products: Jacobian-vector products for the spectral radius.
    """

    rows: int = 4
    tokens: int = 64
    starts: int = 5
    follow: int = 8
    shown: int = 24
    prompts: int = 32
    completion: int = 32
    leave: int = 4
    products: int = 60

    def __post_init__(self) -> None:
        if self.follow < 4 or self.starts < 2:
            raise ValueError(f"follow={self.follow}, starts={self.starts}: follow must be 4 or more, starts 2 or more")


def dynamics(model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerFast, text: Tensor, look: Look) -> Outcome:
    """Exits by the KL rule with and without a warm start, and the states' ends, on text [B, S] (Figures 10 to 12)."""
    ids = text[: look.rows, : look.tokens]
    loops = max(16, look.follow * model.config.loops)
    from_each = [_followed(model, ids, loops, seed) for seed in range(look.starts)]
    states, last = from_each[0]
    kinds = classify(states[1:])
    spread = spread_of_starts(torch.stack([states for states, _ in from_each])).mean(-1)
    radius = spectral_radius(last.step, last.state, products=look.products)
    exits = {name: _exits(model, text, look, warm) for name, warm in (("plain", False), ("continuous", True))}
    heat, shown = _heat(states, ids.shape[1], look.shown)
    return Outcome(
        values={
            **{f"{kind} share": share for kind, share in shares(kinds).items()},
            "last relative step": relative_steps(states)[-1].mean().item(),
            "spread of starts": spread[-1].item(),
            "spectral radius": radius.value.mean().item(),
            **{f"KL exit, {name}": sum(found) / len(found) for name, found in exits.items()},
        },
        series={
            "spread of starts": _points(spread),
            **{f"exits, {name}": _histogram(found, look.leave * model.config.loops) for name, found in exits.items()},
            **heat,
            **_paths(states[1:], kinds),
        },
        facts={"shown tokens": [tokenizer.decode([token]) for token in ids[0, shown].tolist()]},
    )


@torch.no_grad()
def _followed(model: LoopLMForCausalLM, ids: Tensor, loops: int, seed: int) -> tuple[Tensor, Visit]:
    """The states [1 + loops, B S, D] from a start on, and the last visit."""
    states, visit = [], None
    for visit in walk(model, ids, loops, state_seed=seed):
        if not states:
            states.append(visit.before.flatten(0, 1))
        states.append(visit.state.flatten(0, 1))
    assert visit is not None
    return torch.stack(states), visit


def _exits(model: LoopLMForCausalLM, text: Tensor, look: Look, warm: bool) -> list[int]:
    """The loops of the tokens made after prompts from all over the text, sampled at temperature 1.

    The first of each completion is left out: no token was made before it whose state it could start from.
    """
    stream = text.flatten().tolist()
    stride = len(stream) // look.prompts
    prompts = [stream[stride * number : stride * number + _PROMPT] for number in range(look.prompts)]
    engine = Engine(
        model, depth=LogitsKL(KL), loops=look.leave * model.config.loops, max_length=_PROMPT + look.completion,
        compiled=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=look.completion, temperature=1.0, ignore_eos=True)
    return [loops for done in engine.generate(prompts, params, warm_start=warm) for loops in done.loops[1:]]


def _heat(states: Tensor, length: int, count: int) -> tuple[dict[str, Points], slice]:
    """||h_t - h_T|| / ||h_T|| of tokens amid the first row by loop, over the first half of the loops followed."""
    first = max(0, (length - count) // 2)
    shown = slice(first, first + count)
    row = states[1:, :length][:, shown]
    apart = distance_to_last(row) / row[-1].norm(dim=-1)
    half = apart[: len(apart) // 2]
    return {f"distance, token {number:02d}": _points(half[:, number], 1) for number in range(half.shape[1])}, shown


def _paths(states: Tensor, kinds: Tensor) -> dict[str, Points]:
    """The coordinates, in its plane, of the first token of every kind that there is."""
    found: dict[str, Points] = {}
    for index, kind in enumerate(KINDS):
        tokens = (kinds == index).nonzero().flatten().tolist()
        if tokens:
            path = states[:, tokens[0]]
            axes = principal_plane(path).project(path).unbind(-1)
            found |= {f"path, {kind}, axis {number}": _points(axis, 1) for number, axis in enumerate(axes, start=1)}
    return found


def _histogram(loops: Sequence[int], most: int) -> Points:
    return [(float(loop), loops.count(loop) / len(loops)) for loop in range(1, most + 1)]


def _points(values: Tensor, first: int = 0) -> Points:
    return [(float(index), value) for index, value in enumerate(values.tolist(), start=first)]
