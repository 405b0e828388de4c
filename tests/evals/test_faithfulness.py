"""Agreement and probes on models whose answers are known, and against plain calls of the model."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch import nn

from conftest import random_ids, tiny_model
from looplm.analysis.capture import layers_recorded
from looplm.data.tokenizer import word_tokenizer
from looplm.evals.accounting import costs_of
from looplm.evals.faithfulness import (
    agreement_figure,
    as_evaluation,
    faithfulness,
    probes_figure,
    read_answers,
    step_agreement,
)
from looplm.evals.pairs import Pair, PairSet, Question
from looplm.evals.probes import Probing, probe_curve, resampled_interval
from looplm.evals.results import read_evaluation, write_evaluation

QUESTION = Question(template="{first}{second}?", yes="y", no="n")


class TableBlock(nn.Module):
    """A layer that knows its answers: the first token says which item it is, a table which sign the last one gets."""

    def __init__(self, layer, answers, seen):
        super().__init__()
        self.layer, self.answers, self.seen = layer, answers, seen

    def forward(self, x, loop, context):
        items = x[:, 0, 1].round().long()
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(10 * loop + self.layer))
        noise[..., :2] = 0
        x = x + noise
        sign = torch.where(self.answers[items, loop - 1], 1.0, -1.0) * ((loop, self.layer + 1) >= self.seen)
        x[:, 1:, 0] = sign[:, None]
        return x


def knowing_model(answers, seen=(1, 1)):
    """Answers [N, T] at every loop; channel 0 holds them from the visit `seen` (loop, layer) on, and nothing before."""
    tokenizer = word_tokenizer([*(f"<{item}>" for item in range(len(answers))), "a", "b", "?", "y", "n"])
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=16, loops=answers.shape[1], norm_in_loop=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        for item in range(len(answers)):
            model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(f"<{item}>"), 1] = item
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("y"), 0] = 1
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("n"), 0] = -1
    model.model.core = nn.ModuleList(TableBlock(layer, answers, seen) for layer in range(2))
    return model, tokenizer


def numbered(marks):
    """A pair for each mark, of different lengths."""
    pairs = (Pair(first=f"<{i}>", second="ab" * (i % 3) + "a", same=bool(mark)) for i, mark in enumerate(marks))
    return PairSet(source="numbers", question=QUESTION, pairs=tuple(pairs))


def test_agreement_of_three_loops_by_hand():
    """Loops 1 and 2 agree on items 0 and 2, 1 and 3 on item 0 alone, 2 and 3 on items 0, 1 and 3."""
    answers = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]]).bool()
    model, tokenizer = knowing_model(answers)
    found = step_agreement(model, tokenizer, numbered([1, 0, 0, 0]), batch_size=3)
    assert found.shares == ((1.0, 0.5, 0.25), (0.5, 1.0, 0.75), (0.25, 0.75, 1.0))
    assert found.yes == (0.5, 0.5, 0.75)
    assert found.accuracy == (0.75, 0.75, 0.5)
    assert found.items == 4


@pytest.mark.parametrize("shape", [{}, {"prelude_layers": 1, "coda_layers": 1}, {"rope": "learned"}])
@torch.no_grad()
def test_one_forward_reads_what_separate_calls_at_every_depth_say(shape):
    tokenizer = word_tokenizer([f"<{word}>" for word in range(40)] + ["?", "y", "n"])
    model = tiny_model(vocab_size=len(tokenizer), **shape)
    words = random_ids(9, 6, vocab=40).tolist()
    texts = [["".join(f"<{word}>" for word in row[: 1 + i % 5]) for row in words] for i in range(2)]
    pairs = PairSet(
        source="words",
        question=QUESTION,
        pairs=tuple(Pair(first=a, second=b * (1 + len(a) % 3), same=True) for a, b in zip(*texts, strict=True)),
    )
    found = read_answers(model, tokenizer, pairs, loops=4, batch_size=4, layers=True)
    yes_id, no_id = QUESTION.answer_ids(tokenizer)
    for row, pair in enumerate(pairs.pairs):
        ids = tokenizer(QUESTION.text(pair), return_tensors="pt")["input_ids"]
        logits = [model(ids, loops=loops).logits[0, -1] for loops in range(1, 5)]
        assert found.yes[row].tolist() == [bool(each[yes_id] > each[no_id]) for each in logits]
        out = model.model(ids, loops=4, output_hidden_states=True, use_cache=False)
        _, *visits = out.hidden_states  # by transformers' recorder, which puts the hidden state for the last visit
        places = list(found.states)
        for place, visit in zip(places[:-1], visits, strict=False):
            assert found.states[place][row] == pytest.approx(visit[0, -1].numpy(), abs=1e-5), place
        last = model.model.norm(torch.tensor(found.states[places[-1]][row]))
        assert last.numpy() == pytest.approx(out.states[4][0, -1].numpy(), abs=1e-5)
    prelude = model.config.prelude_layers
    in_order = [(0, 1)] * prelude + [(loop, prelude + layer) for loop in range(1, 5) for layer in (1, 2)]
    assert list(found.states) == in_order


def test_probes_find_the_answer_from_the_visit_on_that_shows_it():
    answers = torch.rand(200, 2, generator=torch.Generator().manual_seed(3)) < 0.5
    model, tokenizer = knowing_model(answers, seen=(2, 1))
    found = faithfulness(model, tokenizer, numbered(answers[:, 1]), marks=True, probing=Probing(seeds=3))
    assert [curve.target for curve in found.curves] == ["answer at loop 2", "the mark"]
    assert found.unprobed == {"answer at loop 1": "the rarer answer is given 0 times in 200, not 7"}
    for curve in found.curves:
        assert [(probe.loop, probe.layer) for probe in curve.probes] == [(1, 1), (1, 2), (2, 1), (2, 2)]
        assert curve.positive == pytest.approx(answers[:, 1].float().mean().item())
        for probe in curve.probes[:2]:
            assert 0.35 < probe.auc < 0.65
            assert probe.low < 0.5 < probe.high
        assert [probe.by_seed for probe in curve.probes[2:]] == [(1.0, 1.0, 1.0)] * 2
        assert [(probe.low, probe.high) for probe in curve.probes[2:]] == [(1.0, 1.0)] * 2
    assert found.agreement.accuracy[1] == 1.0
    assert json.loads(json.dumps(asdict(found)))["agreement"]["shares"][0][0] == 1.0


def test_a_curve_sees_no_later_loop():
    answers = torch.rand(60, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    model, tokenizer = knowing_model(answers)
    found = faithfulness(model, tokenizer, numbered(answers[:, 0]), probing=Probing(seeds=2))
    assert [len(curve.probes) for curve in found.curves] == [2, 4, 6]
    figure = probes_figure(found.curves)
    marks = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert [line.get_xdata()[0] for line in marks] == [2.5, 4.5]
    heights = [line.get_ydata() for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    for curve, line in zip(found.curves, heights, strict=True):
        assert list(line) == pytest.approx([probe.auc for probe in curve.probes])


def test_an_auc_is_what_scikit_learn_gives_on_features_standardised_by_hand():
    draw = np.random.default_rng(0)
    target = draw.random(80) < 0.4
    features = draw.normal(size=(80, 5)) * [1, 100, 0.01, 1, 1] + target[:, None] * [1, 0, 0, 0, 0]
    (probe,) = probe_curve({(1, 1): features}, target, "it", Probing(seeds=2, held_out=0.25, strength=0.5)).probes
    for seed, auc in enumerate(probe.by_seed):
        train, test = train_test_split(np.arange(80), test_size=0.25, random_state=seed, stratify=target)
        scaled = (features - features[train].mean(0)) / features[train].std(0)
        fitted = LogisticRegression(C=0.5, max_iter=2000).fit(scaled[train], target[train])
        assert auc == pytest.approx(roc_auc_score(target[test], scaled[test] @ fitted.coef_[0]), abs=1e-9)
    assert probe.auc == pytest.approx(np.mean(probe.by_seed))


def test_an_interval_by_hand():
    """0.5, 0.7: mean 0.6, s^2 = 0.02, x (1/2 + 0.3/0.7), t(0.975, 1) = 12.706; then clipped to [0, 1]."""
    assert resampled_interval([0.5, 0.7], 0.3) == (0.0, 1.0)
    low, high = resampled_interval([0.58, 0.60, 0.62], 0.2)  # s = 0.02, t(0.975, 2) = 4.3027
    assert (low, high) == pytest.approx((0.6 - 4.3027 * 0.02 * (1 / 3 + 0.25) ** 0.5, 1.2 - low), abs=1e-5)


def test_answers_too_rare_for_a_probe_are_refused():
    features, target = np.zeros((20, 2)), np.arange(20) < 6
    with pytest.raises(ValueError, match="it: the rarer answer is given 6 times in 20, not 7"):
        probe_curve({(1, 1): features}, target, "it")
    assert probe_curve({(1, 1): features}, np.arange(20) < 7, "it").probes[0].auc == 0.5
    with pytest.raises(ValueError, match="seeds must be 2 or more"):
        Probing(seeds=1)


def test_a_result_file_holds_every_answer_and_its_cost(tmp_path):
    answers = torch.tensor([[1, 0], [1, 1], [0, 0]]).bool()
    model, tokenizer = knowing_model(answers)
    pairs = numbered([1, 1, 0])
    pairs = PairSet(source=pairs.source, question=pairs.question, pairs=(*pairs.pairs, pairs.pairs[0]))
    found = faithfulness(model, tokenizer, pairs)
    with pytest.raises(ValueError, match="there are no probes to draw"):
        probes_figure(found.curves)
    costs = {f"loops={loops}": costs_of(model.config, loops) for loops in (1, 2)}
    write_evaluation(tmp_path / "r.json", as_evaluation(found, {"model": "x"}, costs))
    read = read_evaluation(tmp_path / "r.json")
    assert read.settings == {"model": "x", "question": {"template": "{first}{second}?", "yes": "y", "no": "n"}}
    values = {(score.depth, score.metric): (score.value, score.items) for score in read.scores}
    assert values[("loops=1", "acc")] == (1.0, 4)
    assert values[("loops=2", "acc")] == (0.5, 4)
    assert values[("loops=1", "as at loop 2")] == (0.5, 4)
    items = read.items["paraphrases: numbers"]["loops=2"]
    assert [item.metrics["yes"] for item in items] == [0.0, 1.0, 0.0, 0.0]
    assert len({item.id for item in items}) == 4
    assert items[3].id == f"{items[0].id}-2"
    assert read.costs["loops=2"]["mean loops"] == 2


def test_a_question_beyond_the_models_positions_is_refused():
    model, tokenizer = knowing_model(torch.ones(1, 1).bool())
    pairs = PairSet(source="long", question=QUESTION, pairs=(Pair(first="<0>", second="a" * 200, same=True),))
    with pytest.raises(ValueError, match="a question of long has 202 tokens, the model 128 positions"):
        read_answers(model, tokenizer, pairs)


def test_layers_are_recorded_only_while_asked():
    model = tiny_model(prelude_layers=1)
    with layers_recorded(model, lambda output: output.sum()) as found:
        model(random_ids(1, 4), loops=2)
    assert list(found) == [(0, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
    before = dict(found)
    model(random_ids(1, 5, seed=1), loops=3)
    assert found == before


def test_the_matrix_is_drawn_as_it_is():
    answers = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 0]]).bool()
    model, tokenizer = knowing_model(answers)
    axes = agreement_figure(step_agreement(model, tokenizer, numbered([1, 1, 1, 1]))).axes[0]
    assert axes.images[0].get_array().tolist() == [[1.0, 0.5], [0.5, 1.0]]
    assert [text.get_text() for text in axes.texts] == ["100", "50", "50", "100"]
