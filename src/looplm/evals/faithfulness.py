"""Faithfulness of the loop (Ouro, section 7.2): how answers change by loop, and when they can be foretold."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
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
from looplm.data.tokenizer import padding_id
from looplm.evals.asking import text_ids
from looplm.evals.depths import fixed_depths
from looplm.evals.pairs import PairSet, Question
from looplm.evals.probes import Curve, Place, Probing, one_sided, probe_curve
from looplm.evals.progress import Advance, each_of, unheard
from looplm.evals.results import Evaluation, Item, Score, averages, hashed_ids
from looplm.evals.subject import ModelSettings, open_subject
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
    question: Question | None = None, batch_size: int = 16, layers: bool = False, advance: Advance = unheard,
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
        advance("pairs read", min(start + batch_size, len(order)), len(order))
    return Reading(
        yes=torch.cat(yes).cpu().numpy()[back],
        same=np.array([pair.same for pair in pairs.pairs]),
        states={place: torch.cat([each[place] for each in states]).numpy()[back] for place in states[0]},
    )


def faithfulness(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, pairs: PairSet, loops: int | None = None,
    question: Question | None = None, batch_size: int = 16, probing: Probing | None = None, marks: bool = False,
    advance: Advance = unheard,
) -> Faithfulness:  # fmt: skip
    """Answers by loop, their agreement, and probes that foretell the answer of every loop from all visits up to it.

    The last loop's is the model's own final answer. `marks` adds probes for how the pairs are marked.
    """
    loops = model.config.loops if loops is None else loops
    found = read_answers(model, tokenizer, pairs, loops, question, batch_size, layers=True, advance=advance)
    targets = {f"answer at loop {loop}": (found.yes[:, loop - 1], loop) for loop in range(1, loops + 1)}
    if marks:
        targets["the mark"] = (found.same, loops)
    probing = probing or Probing()
    reasons = {name: one_sided(target, probing) for name, (target, _) in targets.items()}
    probed, possible = [], [name for name in targets if reasons[name] is None]
    told = each_of(len(possible), "curves of probes", advance)
    for name in possible:
        target, until = targets[name]
        states = {place: state for place, state in found.states.items() if place[0] <= until}
        probed.append(probe_curve(states, target, name, probing))
        told(name)
    return Faithfulness(
        source=pairs.source,
        question=question or pairs.question,
        agreement=agreement_of(found.yes, found.same),
        ids=tuple(hashed_ids(f"{pair.first}\n{pair.second}" for pair in pairs.pairs)),
        same=tuple(found.same.tolist()),
        answers=tuple(map(tuple, found.yes.T.tolist())),
        curves=tuple(probed),
        unprobed={name: reason for name, reason in reasons.items() if reason is not None},
    )


def as_evaluation(
    found: Faithfulness, settings: Mapping[str, Any], costs: Mapping[str, Mapping[str, float]] | None = None
) -> Evaluation:  # fmt: skip
    """The result file's form: accuracy and agreement with every loop as scores by loop, with every item's answer.

    The ROC AUC of probes are scores, too, at depths called "loop 2 layer 1", with the ends of their intervals.
    settings, costs: what else decides the numbers, and what they cost (`looplm.evals.accounting.costs_of`).
    """
    task, by_item = f"paraphrases: {found.source}", list(zip(*found.answers, strict=True))
    items = {
        f"loops={loop}": [
            Item(id=id, metrics=_metrics(loop, answers, same))
            for id, answers, same in zip(found.ids, by_item, found.same, strict=True)
        ]
        for loop in range(1, len(found.answers) + 1)
    }
    scores = [score for depth, held in items.items() for score in averages(task, depth, held, held[0].metrics)]
    return Evaluation(
        settings={**settings, "question": asdict(found.question)}, scores=[*scores, *_probe_scores(found)],
        items={task: items}, costs=costs or {},
    )  # fmt: skip


def run_faithfulness(
    asked: ModelSettings, pairs: PairSet, *, batch_size: int = 16, probing: Probing | None = None,
    advance: Advance = unheard,
) -> tuple[Faithfulness, Evaluation]:  # fmt: skip
    """`faithfulness` of a checkpoint with as many loops as the one depth that is asked for, and its result.

    Raises:
        ValueError: for several depths or an exit rule, or as `open_subject` and `faithfulness` do.
    """
    if len(asked.loops) > 1 or asked.exits:
        raise ValueError("faithfulness reads every loop up to one count; give one number of loops and no exit rule")
    subject, probing = open_subject(asked), probing or Probing()
    found = faithfulness(
        subject.model, subject.tokenizer, pairs, subject.loops, batch_size=batch_size, probing=probing, marks=True,
        advance=advance,
    )  # fmt: skip
    loops = replace(subject, depths=tuple(fixed_depths(range(1, subject.loops + 1))))
    settings = {"pairs": len(pairs.pairs), "probing": asdict(probing), "unprobed": dict(found.unprobed)}
    return found, loops.result(as_evaluation(found, settings))


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
    rows = [text_ids(tokenizer, question.text(pair)) for pair in pairs.pairs]
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


def _metrics(loop: int, answers: Sequence[bool], same: bool) -> dict[str, float]:
    """Of one item at one loop: right, yes, and as at every loop, which is a row of the agreement matrix."""
    yes = answers[loop - 1]
    alike = {f"as at loop {other}": float(yes == answer) for other, answer in enumerate(answers, start=1)}
    return {"acc": float(yes == same), "yes": float(yes), **alike}


def _probe_scores(found: Faithfulness) -> list[Score]:
    return [
        Score(
            task=f"probes for {curve.target}", depth=f"loop {probe.loop} layer {probe.layer}", metric=metric,
            value=value, stderr=None, items=len(found.ids),
        )
        for curve in found.curves
        for probe in curve.probes
        for metric, value in (("roc_auc", probe.auc), ("roc_auc/low", probe.low), ("roc_auc/high", probe.high))
    ]  # fmt: skip
