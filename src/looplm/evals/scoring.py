"""Log-likelihoods of continuations at every asked depth, read from one forward at the deepest."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from looplm.engine.traced import TracedPlaces
from looplm.evals.depths import Depth
from looplm.evals.progress import Advance, unheard
from looplm.models import LoopLMForCausalLM
from looplm.models.precision import at_least_float32

_LOGITS = 2**26  # held at once, unless one row has more


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Token ids of a context, and of the continuation that is scored; neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens that a model reads to score it: all but the last."""
        return len(self.context) + len(self.continuation) - 1


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """Nats of a continuation, whether greedy decoding gives it, and the loops that its tokens were read at."""

    logprob: float
    greedy: bool
    loops: float


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One input, and the pairs that are read from it: their indices, and their tokens, which end where it ends."""

    tokens: tuple[int, ...]
    pairs: list[tuple[int, tuple[int, ...]]]

    @property
    def first(self) -> int:
        """The first place that is read."""
        return len(self.tokens) - max(len(continuation) for _, continuation in self.pairs)


@torch.no_grad()
def likelihoods(
    model: LoopLMForCausalLM, pairs: Sequence[Pair], depths: Sequence[Depth], batch_size: int, max_length: int,
    advance: Advance = unheard,
) -> list[list[Likelihood]]:  # fmt: skip
    """For every pair, what each of `depths` gives; all come of one forward of as many loops as the deepest asks.

    What is longer than `max_length` loses its beginning. Tokens of a context are at all loops, as in prefill, so under
    an exit rule only what is read leaves early. Pairs that differ in their last token alone share a row.

    Raises:
        ValueError: for an empty context or continuation, or one longer than `max_length`; where the model gives no
            number, as it may far beyond the depth that it was trained at.
    """
    found: list[list[Likelihood]] = [[] for _ in pairs]
    deepest = max(depth.loops for depth in depths)
    queue, done = _rows(pairs, max_length), 0
    what = f"rows scored at {depths[0].name}" if len(depths) == 1 else f"rows scored at {len(depths)} depths"
    for rows in _batches(queue, batch_size, model.config.vocab_size):
        tokens = [torch.tensor(row.tokens, device=model.device) for row in rows]
        places = torch.zeros(len(rows), len(rows[0].tokens), dtype=torch.bool, device=model.device)
        for number, row in enumerate(rows):
            places[number, row.first : len(row.tokens)] = True
        # Causal attention never sees what fills up a row at its end.
        trace = model.model(pad_sequence(tokens, batch_first=True), loops=deepest, keep_loops="all", use_cache=False)
        for depth in depths:
            seen = TracedPlaces(model, trace, places, depth.loops)
            exits = seen.exits(depth.policy)
            for index, told in _told(rows, exits, _read(seen, exits)):
                if math.isnan(told.logprob):
                    raise ValueError(f"the model's likelihoods are not numbers at {depth.name}; leave that depth out")
                found[index].append(told)
        done += len(rows)
        advance(what, done, len(queue))
    return found


def _rows(pairs: Sequence[Pair], max_length: int) -> list[_Row]:
    rows: dict[tuple[int, ...], _Row] = {}
    for index, pair in enumerate(pairs):
        if not pair.context or not pair.continuation:
            raise ValueError("a context and its continuation need at least one token each")
        if len(pair.continuation) > max_length:
            raise ValueError(
                f"a continuation of {len(pair.continuation)} tokens is longer than max_length={max_length}"
            )
        tokens = (pair.context + pair.continuation)[-max_length - 1 : -1]
        rows.setdefault(tokens, _Row(tokens=tokens, pairs=[])).pairs.append((index, pair.continuation))
    return sorted(rows.values(), key=lambda row: (-len(row.tokens), row.tokens))


def _batches(rows: Sequence[_Row], batch_size: int, vocab: int) -> Iterator[list[_Row]]:
    """At most `batch_size` rows at once, the longest first, and no more than `_LOGITS` logits."""
    batch: list[_Row] = []
    read = 0
    for row in rows:
        places = len(row.tokens) - row.first
        if batch and (len(batch) == batch_size or (read + places) * vocab > _LOGITS):
            yield batch
            batch, read = [], 0
        batch.append(row)
        read += places
    if batch:
        yield batch


def _read(seen: TracedPlaces, exits: Tensor) -> Tensor:
    """The log-probabilities [N, V] of every place, read at its own loop."""
    logits = None
    for loop in exits.unique().tolist():
        here = seen.logits(loop)[1]
        logits = here if logits is None else torch.where((exits == loop)[:, None], here, logits)
    assert logits is not None
    return at_least_float32(logits).log_softmax(-1)


def _told(rows: Sequence[_Row], exits: Tensor, log_p: Tensor) -> Iterator[tuple[int, Likelihood]]:
    end = 0
    for row in rows:
        end += len(row.tokens) - row.first
        for index, continuation in row.pairs:
            mine, ids = slice(end - len(continuation), end), torch.tensor(continuation, device=log_p.device)
            yield index, Likelihood(
                logprob=float(log_p[mine].gather(-1, ids[:, None]).sum()),
                greedy=bool(log_p[mine].argmax(-1).equal(ids)),
                loops=math.fsum(exits[mine].tolist()) / len(continuation),
            )  # fmt: skip
