"""Capo's bits per parameter on models whose knowledge is known, and its sizes."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from looplm.data.tokenizer import word_tokenizer
from looplm.studies.capo import DOCUMENT, PAPER_SIZES, SIZES, CapoStudy, Size, capacity, job, nats
from looplm.studies.study import Outcome
from looplm.tasks import Capo
from looplm.training.opening import open_run

TASK = Capo(people=40, first=4, middle=5, last=6)


class Knowing:
    """Gives each next token the logarithm of its frequency among the people who share the tokens before it."""

    def __init__(self, ids, words):
        self.ids, self.words = ids, words

    def __call__(self, ids):
        logits = torch.full((*ids.shape, self.words), -1e9)
        for row, tokens in enumerate(ids):
            for place in range(len(tokens)):
                alike = self.ids[(self.ids[:, : place + 1] == tokens[: place + 1]).all(-1)]
                for token, count in zip(*alike[:, place + 1].unique(return_counts=True), strict=True):
                    logits[row, place, token] = math.log(count)
        return SimpleNamespace(logits=logits)


class Ignorant:
    """Knows the fields and their order, and nothing of anyone."""

    def __init__(self, tokenizer):
        words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        fields = ["first", "middle", "last", "month", "day", "year", "city", "university", "major", "company", "gender"]
        held = [[word.strip("<>").rstrip("0123456789") == field for word in words] for field in fields]
        self.logits = torch.tensor(held).double().log().clamp(min=-1e9)

    def __call__(self, ids):
        return SimpleNamespace(logits=self.logits.expand(len(ids), -1, -1))


def test_all_is_known_and_nothing_is_known():
    tokenizer = word_tokenizer(TASK.words())
    biographies = [TASK.person(number).prompt + TASK.person(number).answer for number in range(40)]
    ids = torch.tensor(tokenizer(biographies)["input_ids"])
    assert ids.shape == (40, DOCUMENT)
    name, attributes = nats(Knowing(ids, len(tokenizer)), tokenizer, TASK)
    assert name == pytest.approx(math.log(40), abs=1e-5)
    assert attributes == pytest.approx(0, abs=1e-5)
    expected = 40 * (math.log2(4 * 5 * 6 / 40) + math.log2(2 * 12 * 28 * 50**4 * 25)) / 1000
    assert capacity(TASK, name, attributes, 1000) == pytest.approx(expected, abs=1e-5)
    name, attributes = nats(Ignorant(tokenizer), tokenizer, TASK)
    assert name == pytest.approx(math.log(120))
    assert attributes == pytest.approx(math.log(2 * 12 * 28 * 50**4 * 25))
    assert capacity(TASK, name, attributes, 1000) == pytest.approx(0, abs=1e-9)


def test_each_bracket_is_at_least_nothing():
    assert capacity(TASK, 100.0, 0.0, 1000) == pytest.approx(40 * TASK.attribute_bits / 1000)
    assert capacity(TASK, 0.0, 100.0, 1000) == pytest.approx(40 * TASK.name_bits / 1000)
    assert capacity(TASK, 100.0, 100.0, 1000) == 0


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_people_overfill_the_model_and_are_seen_as_often_as_said(size):
    looped, plain = (job("capo", size, loops, 1000, 0).recipes(Path("nowhere"))[0] for loops in (4, 1))
    model = open_run(looped, None).model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    world = Capo(people=size.people)
    assert capacity(world, math.log(size.people), 0.0, parameters) == pytest.approx(2.5, rel=2e-3)
    assert float(size.name.rstrip("K")) == pytest.approx(parameters / 1000, abs=0.6)
    assert looped.steps == plain.steps
    assert looped.steps * looped.data.rows * looped.data.length / DOCUMENT / size.people == pytest.approx(
        1000, rel=1e-3
    )


def test_the_papers_sizes_have_its_numbers_of_people():
    assert [size.people for size in PAPER_SIZES] == [20_000, 100_000, 500_000]


def known(bits):
    facts = {"parameters": 9_000, "exposures": 300.0}
    return Outcome(values={"bits per parameter": bits}, series={"training": [(30.0, 0.0), (300.0, bits)]}, facts=facts)


@pytest.mark.parametrize(
    ("looped", "equal", "above_one"), [(1.4, True, True), (1.2, False, True), (0.99, False, False)]
)
def test_verdicts(looped, equal, above_one):
    results = {"9K, 1 loop": [known(1.4), known(1.6)], "9K, 4 loops": [known(looped)]}
    same, over = CapoStudy().verdicts(results)
    assert (same.holds, over.holds) == (equal, above_one)
    assert same.effect == pytest.approx(100 * (looped / 1.5 - 1))
    assert over.effect == min(1.4, looped)
    assert set(CapoStudy().figures(results)) == {"size", "training"}


def test_a_run_that_was_too_short_is_said_to_be():
    results = {
        f"9K, {loops}{length}": [known(bits)]
        for loops, found in (("1 loop", (0.6, 1.2, 1.4, 1.45)), ("4 loops", (0.3, 0.8, 1.2, 1.44)))
        for length, bits in zip((", 100 exposures", ", 300 exposures", "", ", 3,000 exposures"), found, strict=True)
    }
    *_, plain, looped = verdicts = CapoStudy().verdicts(results)
    assert (plain.holds, looped.holds) == (True, False)
    assert looped.effect == pytest.approx(20)
    assert [verdict.holds for verdict in verdicts[:4]] == [False, True, True, True]
    assert set(CapoStudy().figures(results)) == {"size", "training", "exposures"}


def test_a_run_is_measured_at_its_checkpoints_and_at_the_end(tmp_path):
    size = Size(name="tiny", width=8, layers=1, inner=16, heads=2, people=16)
    outcome = job("capo", size, 1, 60, 0)(tmp_path)  # 20 steps of 48 biographies
    exposures = [exposure for exposure, _ in outcome.series["training"]]
    assert exposures == pytest.approx([6.0 * part for part in range(1, 11)])
    assert outcome.series["training"][-1][1] == outcome.values["bits per parameter"]
    assert outcome.values["ceiling"] == pytest.approx(
        16 * (math.log2(250_000 / 16) + Capo().attribute_bits) / outcome.facts["parameters"]
    )
    assert outcome.values["bits of a name"] < math.log2(250_000 / 16)
    assert outcome.facts["exposures"] == 60
