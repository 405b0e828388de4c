"""Benchmark: int8 weights against the float ones by loops, in loss, choices, bytes and the engine's tokens a second."""

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.engine import Engine, SamplingParams
from looplm.models import LoopLMForCausalLM, quantize_int8
from looplm.models.int8 import held_bytes
from looplm.studies.timing import seconds_in_turn

_PROMPT = 24  # tokens of a prompt
_ROWS = 8  # of text at once: the states of all their loops are held


@dataclass(frozen=True, kw_only=True)
class Int8Problem:
    """Losses at loops 1 to `loops`; completions of `tokens` tokens, one at a time and `rows` at once."""

    loops: int
    tokens: int = 64
    rows: int = 8

    def __post_init__(self) -> None:
        for name in ("loops", "tokens", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class LoopRow:
    """Both models, read at one loop.

    loss, int8_loss: nats a token · difference: int8 less float, with its standard error over tokens
    changed: share of tokens whose most likely successor is another · drift: ||int8 logits - logits|| / ||logits||.
    """

    loop: int
    loss: float
    int8_loss: float
    difference: float
    standard_error: float
    changed: float
    drift: float


@dataclass(frozen=True, kw_only=True)
class WeightsRow:
    """One model: the bytes of its core as held, and the engine's tokens a second with one row and with all."""

    weights: str
    core_bytes: int
    one_row: float
    all_rows: float


def bench_int8(
    model: LoopLMForCausalLM, text: Tensor, problem: Int8Problem, repeats: int
) -> tuple[list[LoopRow], list[WeightsRow]]:  # fmt: skip
    """The model against its int8 copy on text [B, S], whose rows' beginnings are what the engine continues.

    Raises:
        ValueError: for a text of too few or too short rows, and as `quantize_int8`.
    """
    if len(text) < problem.rows or text.shape[1] < _PROMPT:
        raise ValueError(
            f"the text makes {len(text)} rows of {text.shape[1]} tokens; "
            f"{problem.rows} rows of at least {_PROMPT} are asked for: give more text, or fewer rows"
        )
    models = {str(model.dtype).removeprefix("torch."): model, "int8": quantize_int8(copy.deepcopy(model))}
    return compare_by_loops(*models.values(), text, problem.loops), _weights(models, text, problem, repeats)


@torch.no_grad()
def compare_by_loops(
    model: LoopLMForCausalLM, rounded: LoopLMForCausalLM, text: Tensor, loops: int
) -> list[LoopRow]:  # fmt: skip
    """Two models on text [B, S], every token with a successor, read at loops 1 to `loops`."""
    parts = [_compare(model, rounded, part, loops) for part in text.split(_ROWS)]
    found = []
    for loop, columns in enumerate(zip(*parts, strict=True), start=1):
        loss, int8_loss, changed, moved, size = torch.cat(columns, dim=1).double()
        difference = int8_loss - loss
        error = difference.std() / len(difference) ** 0.5
        found.append(
            LoopRow(
                loop=loop, loss=float(loss.mean()), int8_loss=float(int8_loss.mean()),
                difference=float(difference.mean()), standard_error=float(error), changed=float(changed.mean()),
                drift=float((moved.sum() / size.sum()).sqrt()),
            )
        )  # fmt: skip
    return found


def drift_growth(rows: Sequence[LoopRow]) -> float:
    """The drift at the last loop over that at the first: as many as there are loops if each adds as much again."""
    return rows[-1].drift / max(rows[0].drift, 1e-12)


def _compare(model: LoopLMForCausalLM, rounded: LoopLMForCausalLM, rows: Tensor, loops: int) -> list[Tensor]:
    """At every loop [5, N]: both losses, whether the choice changed, and squared lengths of difference and logits."""
    traces = [one.model(rows, loops=loops, keep_loops="all", use_cache=False) for one in (model, rounded)]
    targets = rows[:, 1:].flatten()
    found = []
    for loop in range(1, loops + 1):
        ours, theirs = (
            one.logits_at(trace, loop)[:, :-1].flatten(0, 1).float()
            for one, trace in zip((model, rounded), traces, strict=True)
        )
        losses = [F.cross_entropy(logits, targets, reduction="none") for logits in (ours, theirs)]
        changed = (ours.argmax(-1) != theirs.argmax(-1)).float()
        found.append(torch.stack([*losses, changed, (theirs - ours).square().sum(-1), ours.square().sum(-1)]))
    return found


def _weights(
    models: dict[str, LoopLMForCausalLM], text: Tensor, problem: Int8Problem, repeats: int
) -> list[WeightsRow]:  # fmt: skip
    prompts = text[: problem.rows, :_PROMPT].tolist()
    params = SamplingParams(max_tokens=problem.tokens, ignore_eos=True)
    ways = {}
    for name, model in models.items():
        engine = Engine(model, max_rows=problem.rows, max_length=_PROMPT + problem.tokens)
        ways[f"{name}, one row"] = partial(_complete, engine, prompts[:1], params)
        ways[f"{name}, all rows"] = partial(_complete, engine, prompts, params)
    seconds = {name: statistics.median(found) for name, found in seconds_in_turn(ways, repeats).items()}
    return [
        WeightsRow(
            weights=name, core_bytes=held_bytes(model.model.core),
            one_row=problem.tokens / seconds[f"{name}, one row"],
            all_rows=problem.tokens * problem.rows / seconds[f"{name}, all rows"],
        )
        for name, model in models.items()
    ]  # fmt: skip


def _complete(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    engine.forget_prefixes()
    for done in engine.generate(prompts, params):
        assert done.error is None, done.error
