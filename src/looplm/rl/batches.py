"""Rollouts as padded rows that the objective reads, with every token's weight in the step's loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from looplm.objectives.targets import Batch
from looplm.rl.rollouts import Rollout

Mean = Literal["sequence", "tokens", "constant"]
_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A rollout with its advantage, and whether it counts in the loss at all."""

    rollout: Rollout
    advantage: float
    counts: bool = True


def padded(rows: Sequence[Scored], pad: int, full_keys: bool) -> dict[str, Tensor]:
    """Right-padded rows [B, S], all but the ids aligned with the labels: the token that each position is.

    `labels`, `advantages`, `exits` (the loop that emitted the token), `sampled` (its log-probability then), `kept`
    (1 where a target counts); and, aligned with the tokens as inputs, `attention_mask`, `read` (the loop at which it
    was read) and `key_loops` (the loops whose keys it left behind). No row at all is a row of padding.

    full_keys: tokens that left early left the keys of all loops nevertheless ("recomputed").
    """
    width = max((len(one.rollout.prompt_ids) + len(one.rollout.token_ids) for one in rows), default=2)
    shape = (max(1, len(rows)), width)
    most = max((one.rollout.max_loops for one in rows), default=1)
    batch = {
        "input_ids": torch.full(shape, pad), "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, _IGNORED), "advantages": torch.zeros(shape, dtype=torch.float64),
        "exits": torch.full(shape, most), "sampled": torch.zeros(shape, dtype=torch.float64),
        "kept": torch.zeros(shape, dtype=torch.float64), "read": torch.full(shape, most),
        "key_loops": torch.full(shape, most),
    }  # fmt: skip
    for row, one in enumerate(rows):
        _fill({name: values[row] for name, values in batch.items()}, one, full_keys)
    return batch


def _fill(row: dict[str, Tensor], one: Scored, full_keys: bool) -> None:
    """Write a rollout into the rows [S] of a batch."""
    rollout, first = one.rollout, len(one.rollout.prompt_ids)
    last = first + len(rollout.token_ids)
    loops = torch.tensor(rollout.loops, dtype=torch.long)
    row["input_ids"][:last] = torch.tensor([*rollout.prompt_ids, *rollout.token_ids])
    row["attention_mask"][:last] = 1
    row["labels"][first:last] = row["input_ids"][first:last]
    row["advantages"][first:last] = one.advantage
    row["exits"][first:last] = loops
    row["sampled"][first:last] = torch.tensor(rollout.logprobs, dtype=torch.float64)
    row["kept"][first:last] = float(one.counts)
    row["read"][first - 1 : last - 1] = loops
    if not full_keys:
        row["key_loops"][first : last - 1] = loops[1:]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What means divide by: completions that count, and their tokens, of a whole step on all processes."""

    sequences: float
    tokens: float


def count(rows: Sequence[Scored], sum_over_processes: Callable[[Tensor], Tensor]) -> Counts:
    """Of all processes' rows."""
    lengths = [len(one.rollout.token_ids) for one in rows if one.counts]
    sums = torch.tensor([sum(length > 0 for length in lengths), sum(lengths)], dtype=torch.float64)
    sequences, tokens = sum_over_processes(sums).tolist()
    return Counts(sequences=sequences, tokens=tokens)


def weights(batch: Batch, mean: Mean, counts: Counts, max_tokens: int) -> Tensor:
    """What each target counts in the step's loss [B, S].

    sequence: each completion's mean, then their mean (RLTT's equation 4, GRPO) · tokens: the mean over all tokens (RLTT
    as coded, DAPO) · constant: the sum over `max_tokens` for each completion (Dr. GRPO). Where nothing counts it is 0.
    """
    kept = batch["kept"]
    if mean == "tokens":
        return kept / max(1.0, counts.tokens)
    lengths = kept.sum(1, keepdim=True).clamp(min=1) if mean == "sequence" else max_tokens
    return kept / lengths / max(1.0, counts.sequences)
