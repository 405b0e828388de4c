"""Faithfulness of the loop (Ouro, section 7.2): how answers change by loop, and when they can be foretold."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from looplm.analysis.capture import layers_recorded
from looplm.analysis.plots import curves, matrix
from looplm.data.tokenizer import encode, padding_id
from looplm.evals.pairs import PairSet, Question
from looplm.evals.probes import Curve, Place, Probing, one_sided, probe_curve
from looplm.evals.results import Evaluation, Item, Score
from looplm.models import LoopLMForCausalLM


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one forward a batch gives of N pairs.

    yes: [N, T], whether the logit of yes is above that of no after each loop · same: [N], how the pairs are marked
    states: float32 [N, D] of the last token after every visit of a layer, by loop and layer; empty if not asked for.
    """

    yes: np.ndarray
    same: np.ndarray
    states: Mapping[Place, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The step-agreement matrix: shares[i][j] of items answer alike after loops i + 1 and j + 1.

    yes, accuracy: by loop, the share answered with yes, and as the pairs are marked.
    """

    items: int
    shares: tuple[tuple[float, ...], ...]
    yes: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """Agreement and probes on one set of pairs.

    answers: by loop and item, whether it was yes · ids: of the items · curves: a curve of probes for each answer that
    could be foretold · unprobed: why, for each that could not.
    """

    source: str
    question: Question
    agreement: Agreement
    ids: tuple[str, ...]
    same: tuple[bool, ...]
    answers: tuple[tuple[bool, ...], ...]
    curves: tuple[Curve, ...] = ()
    unprobed: Mapping[str, str] = field(default_factory=dict)


def agreement_of(yes: np.ndarray, same: np.ndarray) -> Agreement:
    """The agreement of answers [N, T] (true for yes) between loops, with marks [N]; Ouro's A[i, j] over N."""
    shares = (yes[:, :, None] == yes[:, None, :]).mean(0)
    return Agreement(
        items=len(yes),
        shares=tuple(map(tuple, shares.tolist())),
        yes=tuple(yes.mean(0).tolist()),
        accuracy=tuple((yes == same[:, None]).mean(0).tolist()),
    )


def step_agreement(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, pairs: PairSet, loops: int | None = None,
    question: Question | None = None, batch_size: int = 16,
) -> Agreement:  # fmt: skip
    """The step-agreement matrix of a model on pairs, by one forward a batch (see `read_answers`)."""
    found = read_answers(model, tokenizer, pairs, loops, question, batch_size)
    return agreement_of(found.yes, found.same)


@torch.no_grad()
def read_answers(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, pairs: PairSet, loops: int | None = None,
    question: Question | None = None, batch_size: int = 16, layers: bool = False,
) -> Reading:  # fmt: skip
    """The answer to every pair at every loop, all from one forward; with `layers`, the states behind it, too.

    Raises:
        ValueError: if a question is longer than the model's positions, or its answers start with one token.
    """
    question = question or pairs.question
    answers = torch.tensor(question.answer_ids(tokenizer), device=model.device)
    rows = _rows(model, tokenizer, pairs, question)
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))  # little padding
    back = np.argsort(order)
    yes, states = [], []
    for start in range(0, len(order), batch_size):
        batch = [rows[number] for number in order[start : start + batch_size]]
        logits, visited = _read_batch(model, batch, padding_id(tokenizer), loops, answers, layers)
        yes.append(logits[..., 0] > logits[..., 1])
        states.append(visited)
    return Reading(
        yes=torch.cat(yes).cpu().numpy()[back],
        same=np.array([pair.same for pair in pairs.pairs]),
        states={place: torch.cat([each[place] for each in states]).numpy()[back] for place in states[0]},
    )


def faithfulness(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, pairs: PairSet, loops: int | None = None,
    question: Question | None = None, batch_size: int = 16, probing: Probing | None = None, marks: bool = False,
) -> Faithfulness:  # fmt: skip
    """Answers by loop, their agreement, and probes that foretell the answer of every loop from all visits up to it.

    The last loop's is the model's own final answer. `marks` adds probes for how the pairs are marked.
    """
    loops = model.config.loops if loops is None else loops
    found = read_answers(model, tokenizer, pairs, loops, question, batch_size, layers=True)
    targets = {f"answer at loop {loop}": (found.yes[:, loop - 1], loop) for loop in range(1, loops + 1)}
    if marks:
        targets["the mark"] = (found.same, loops)
    probing = probing or Probing()
    reasons = {name: one_sided(target, probing) for name, (target, _) in targets.items()}
    probed = [
        probe_curve({place: state for place, state in found.states.items() if place[0] <= until}, target, name, probing)
        for name, (target, until) in targets.items()
        if reasons[name] is None
    ]
    return Faithfulness(
        source=pairs.source,
        question=question or pairs.question,
        agreement=agreement_of(found.yes, found.same),
        ids=tuple(_ids(pairs)),
        same=tuple(found.same.tolist()),
        answers=tuple(map(tuple, found.yes.T.tolist())),
        curves=tuple(probed),
        unprobed={name: reason for name, reason in reasons.items() if reason is not None},
    )


def as_evaluation(
    found: Faithfulness, settings: Mapping[str, Any], costs: Mapping[str, Mapping[str, float]] | None = None
) -> Evaluation:  # fmt: skip
    """The result file's form: accuracy and agreement with the last loop as scores by loop, with every item's answer.

    settings, costs: what else decides the numbers, and what they cost (`looplm.evals.accounting.costs_of`).
    """
    last = found.answers[-1]
    items = {
        f"loops={loop}": [
            Item(id=id, metrics={"acc": float(yes == same), "yes": float(yes), "as the last loop": float(yes == final)})
            for id, yes, same, final in zip(found.ids, answers, found.same, last, strict=True)
        ]
        for loop, answers in enumerate(found.answers, start=1)
    }
    task = f"paraphrases: {found.source}"
    decided = {**settings, "question": asdict(found.question)}
    scores = [_score(task, depth, metric, held) for depth, held in items.items() for metric in held[0].metrics]
    return Evaluation(settings=decided, scores=scores, items={task: items}, costs=costs or {})


def agreement_figure(agreement: Agreement) -> Figure:
    """The matrix as a heat map, in per cent (Ouro, Figure 9, right)."""
    return matrix(agreement.shares, "share of equal answers", "loop")


def probes_figure(curves_found: Sequence[Curve]) -> Figure:
    """ROC AUC by visit, a line for each answer, dotted lines between loops (Ouro, Figure 9, left).

    Bands reach from the lowest seed to the highest.

    Raises:
        ValueError: if there is no curve, as where a model gives one answer to all.
    """
    if not curves_found:
        raise ValueError("there are no probes to draw: every answer was too one-sided (see `unprobed`)")
    longest = max(curves_found, key=lambda curve: len(curve.probes)).probes
    ends = [place for place, (probe, following) in enumerate(pairwise(longest), 1) if probe.loop != following.loop]
    lines = {
        curve.target: [
            [(float(place), auc) for place, auc in enumerate(seed, start=1)]
            for seed in zip(*(probe.by_seed for probe in curve.probes), strict=True)
        ]
        for curve in curves_found
    }
    return curves(lines, "visits of a layer", "ROC AUC", marks=[end + 0.5 for end in ends])


def _rows(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, pairs: PairSet, question: Question
) -> list[list[int]]:  # fmt: skip
    rows = encode(tokenizer, [question.text(pair) for pair in pairs.pairs])
    longest, positions = max(map(len, rows)), model.config.max_position_embeddings
    if longest > positions:
        raise ValueError(
            f"a question of {pairs.source} has {longest} tokens, the model {positions} positions; leave long pairs out"
        )
    return rows


def _read_batch(
    model: LoopLMForCausalLM, batch: list[list[int]], pad: int, loops: int | None, answers: Tensor, layers: bool
) -> tuple[Tensor, dict[Place, Tensor]]:  # fmt: skip
    """Logits of the two answers [B, T, 2], and states [B, D] by visit.

    Padding stands on the right, where no earlier token sees it.
    """
    ids = pad_sequence([torch.tensor(row) for row in batch], batch_first=True, padding_value=pad).to(model.device)
    rows = torch.arange(len(batch), device=model.device)
    last = torch.tensor([len(row) - 1 for row in batch], device=model.device)
    recording = layers_recorded(model, lambda output: output[rows, last].float().cpu()) if layers else nullcontext({})
    with recording as states:
        out = model.model(ids, loops=loops, keep_loops="all", use_cache=False)
    hidden = torch.stack([model.hidden_at(out, loop)[rows, last] for loop in sorted(out.states)], dim=1)
    return model.lm_head(hidden)[..., answers].float(), states


def _ids(pairs: PairSet) -> list[str]:
    """A name for each pair that does not depend on which others are there, but for repetitions."""
    seen: Counter[str] = Counter()
    names = []
    for pair in pairs.pairs:
        name = hashlib.sha256(f"{pair.first}\n{pair.second}".encode()).hexdigest()[:16]
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def _score(task: str, depth: str, metric: str, items: Sequence[Item]) -> Score:
    values = [item.metrics[metric] for item in items]
    stderr = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return Score(task=task, depth=depth, metric=metric, value=float(np.mean(values)), stderr=stderr, items=len(values))
