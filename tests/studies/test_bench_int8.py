"""The benchmark of int8 weights and `looplm generate --int8`: every number counted again by plain calls."""

import copy
import json
import sys

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

import looplm
from conftest import random_ids, tiny_config, tiny_model
from looplm.cli.main import app
from looplm.data.tokenizer import train_tokenizer
from looplm.engine import Engine, SamplingParams
from looplm.models.int8 import held_bytes
from looplm.studies.bench_int8 import Int8Problem, bench_int8, compare_by_loops, drift_growth


@torch.no_grad()
def test_every_loop_is_compared():
    model, text = tiny_model(), random_ids(11, 13)
    held = looplm.quantize_int8(copy.deepcopy(model))
    rows = compare_by_loops(model, held, text, 5)
    assert [row.loop for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        ours, theirs = (one(text, loops=row.loop).logits[:, :-1].flatten(0, 1).double() for one in (model, held))
        targets = text[:, 1:].flatten()
        losses, int8_losses = (F.cross_entropy(logits, targets, reduction="none") for logits in (ours, theirs))
        assert row.loss == pytest.approx(float(losses.mean()), abs=1e-5)
        assert row.int8_loss == pytest.approx(float(int8_losses.mean()), abs=1e-5)
        assert row.difference == pytest.approx(float((int8_losses - losses).mean()), abs=1e-5)
        error = float((int8_losses - losses).std()) / len(targets) ** 0.5
        assert row.standard_error == pytest.approx(error, rel=1e-3)
        assert row.changed == pytest.approx(float((ours.argmax(-1) != theirs.argmax(-1)).double().mean()))
        assert row.drift == pytest.approx(float((theirs - ours).norm() / ours.norm()), rel=1e-3)
        assert row.drift > 1e-4
    assert any(row.changed > 0 for row in rows)
    assert drift_growth(rows) == rows[4].drift / rows[0].drift


def test_a_model_does_not_differ_from_itself():
    rows = compare_by_loops(tiny_model(), tiny_model(), random_ids(2, 9), 2)
    assert all((row.difference, row.standard_error, row.changed, row.drift) == (0, 0, 0, 0) for row in rows)
    assert drift_growth(rows) == 0


def test_both_models_are_timed_and_weighed_and_the_given_one_is_left_alone():
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    _, (ours, theirs) = bench_int8(model, random_ids(3, 24), Int8Problem(loops=1, tokens=2, rows=3), repeats=1)
    assert (ours.weights, theirs.weights) == ("float32", "int8")
    assert ours.core_bytes == held_bytes(model.model.core)
    assert theirs.core_bytes == held_bytes(looplm.quantize_int8(copy.deepcopy(model)).model.core)
    assert min(ours.one_row, ours.all_rows, theirs.one_row, theirs.all_rows) > 0
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    tokenizer = train_tokenizer(["some text to learn from"], 300)
    torch.manual_seed(0)
    looplm.save(looplm.LoopLMForCausalLM(tiny_config(vocab_size=len(tokenizer))), folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_generate_rounds_the_weights(checkpoint):
    made = json.loads(run("generate", checkpoint, "some", "--int8", "--max-tokens", 12, "--json").output)
    model, tokenizer = looplm.quantize_int8(looplm.load(checkpoint)), looplm.load_tokenizer(checkpoint)
    (done,) = Engine(model, tokenizer).generate(["some"], SamplingParams(max_tokens=12))
    assert made["tokens"] == done.token_ids
    told = run("generate", checkpoint, "some", "--int8", "--max-tokens", 12)
    assert told.output.startswith("some" + done.text)


def test_bench_int8_prints_json_and_tables(checkpoint, text):
    arguments = ("bench", "int8", checkpoint, text, "--tokens", 2, "--rows", 2, "--repeats", 1)
    found = json.loads(run(*arguments, "--text-tokens", 512, "--json").output)
    assert [row["loop"] for row in found["rows"]] == [1, 2, 3, 4, 5, 6]
    assert found["drift_growth"] == found["rows"][-1]["drift"] / found["rows"][0]["drift"]
    assert [row["weights"] for row in found["weights"]] == ["float32", "int8"]
    told = run(*arguments, "--loops", 1).output
    assert "drift of the logits: 1.00 x from loop 1 to loop 1, no more than linear" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "int8", "CHECKPOINT", "TEXT", "--rows", "999"), "999 rows of at least 24"),
        (("bench", "int8", "CHECKPOINT", "TEXT", "--text-tokens", "20"), "1 rows of 20 tokens"),
        (("bench", "int8", "CHECKPOINT", "/nowhere"), "'/nowhere' does not exist"),
        (("bench", "int8", "CHECKPOINT", "TEXT", "EXTRA"), "need the 'int8' extra"),
        (("generate", "CHECKPOINT", "x", "--int8", "EXTRA"), "pip install 'looplm[int8]'"),
    ],
)
def test_mistakes_end_in_one_line(checkpoint, text, monkeypatch, arguments, message):
    if "EXTRA" in arguments:
        monkeypatch.setitem(sys.modules, "torchao.quantization.quant_api", None)
    places = {"CHECKPOINT": checkpoint, "TEXT": text}
    done = run(*(places.get(argument, argument) for argument in arguments if argument != "EXTRA"))
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert message in done.output
