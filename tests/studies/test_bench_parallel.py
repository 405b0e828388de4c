"""The benchmark of the parallel sampler and `looplm generate --parallel`: every number counted again by plain calls."""

import json

import pytest
import torch
from typer.testing import CliRunner

import looplm
from conftest import tiny_config, tiny_model
from looplm.cli.main import app
from looplm.data.tokenizer import train_tokenizer
from looplm.engine import ParallelSampler, ParallelSettings, SamplingParams
from looplm.studies.bench_parallel import bench_parallel

INJECTED = {"injection": "add", "coda_layers": 1, "loops": 4, "exit_gate": False}


def test_every_way_is_measured_and_judged():
    model, prompts = tiny_model(**INJECTED), [[5, 9, 2], [7, 7, 30, 4]]
    settings = [ParallelSettings(inner_loops=1, threshold=0.3), ParallelSettings(inner_loops=2, threshold=0.0)]
    rows = bench_parallel(model, prompts, 10, settings, repeats=1)
    assert [row.way for row in rows] == [
        "plain", "speculation, lossless", "one at a time, one slot", "1 inner loops, threshold 0.3",
        "2 inner loops, threshold 0",
    ]  # fmt: skip
    plain, speculation, alone, *_ = rows
    assert (plain.speedup, plain.disagreeing, plain.differing) == (1.0, 0.0, 0.0)
    assert plain.ticks == plain.core_steps == alone.ticks == alone.core_steps == 4 * 9 / 10
    assert speculation.disagreeing == 0
    for one, row in zip(settings, rows[3:], strict=True):
        sampler = ParallelSampler(model, settings=one)
        made = sampler.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
        wrong = other = 0
        for prompt, done in zip(prompts, made, strict=True):
            text = torch.tensor([[*prompt, *done.token_ids]])
            best = model(text).logits[0, len(prompt) - 1 : -1].argmax(-1)
            wrong += int((best != text[0, len(prompt) :]).sum())
            greedy = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None)
            other += int((greedy != text).sum())
        assert (row.disagreeing, row.differing) == (wrong / 20, other / 20)
        assert row.ticks == sampler.stats.ticks / 20
        assert row.core_steps == sampler.stats.core_steps / 20
    assert any(row.disagreeing > 0 for row in rows[2:]), "a random model does not settle, so something is lost"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("injected")
    tokenizer = train_tokenizer(["some text to learn from"], 300)
    torch.manual_seed(0)
    looplm.save(looplm.LoopLMForCausalLM(tiny_config(vocab_size=len(tokenizer), **INJECTED)), folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_generate_in_parallel_says_what_it_lost(checkpoint):
    made = json.loads(
        run("generate", checkpoint, "some", "--parallel", "--inner-loops", 1, "--threshold", 0.3, "--max-tokens", 12,
            "--json").output
    )  # fmt: skip
    ids = looplm.load_tokenizer(checkpoint)("some")["input_ids"]
    best = looplm.load(checkpoint)(torch.tensor([ids + made["tokens"]])).logits[0, len(ids) - 1 : -1].argmax(-1)
    wrong = [place for place, token in enumerate(made["tokens"]) if token != best[place]]
    assert made["disagreeing"] == wrong
    assert made["loops_per_token"][0] == 4
    told = run("generate", checkpoint, "some", "--parallel", "--inner-loops", 1, "--threshold", 0.3, "--max-tokens", 12)
    assert f"lossy: {len(wrong)} of them are not what plain decoding chooses" in told.output
    exact = run("generate", checkpoint, "some", "--parallel", "--loops", 2, "--max-tokens", 12, "--json")
    assert json.loads(exact.output)["loops_per_token"][0] == 2


def test_bench_parallel_prints_json(checkpoint):
    done = run("bench", "parallel", checkpoint, "--inner-loops", "2", "--thresholds", "0,0.5", "--prompts", 1,
               "--tokens", 4, "--repeats", 1, "--json")  # fmt: skip
    found = json.loads(done.output)
    assert (found["problem"]["tokens"], found["problem"]["wavefront"], len(found["rows"])) == (4, 128, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "CHECKPOINT", "x", "--parallel", "--speculate"), "leave --exit, --calibrated"),
        (("generate", "CHECKPOINT", "x", "--threshold", "0.1"), "belong to --parallel"),
        (("generate", "CHECKPOINT", "x", "--parallel", "--threshold", "-1"), "threshold=-1.0"),
        (("bench", "parallel", "CHECKPOINT", "--inner-loops", "a"), "--inner-loops 'a'"),
        (("bench", "parallel", "CHECKPOINT", "--inner-loops", "0"), "inner_loops=0"),
        (("bench", "parallel", "PLAIN"), "injection='none'"),
    ],
)
def test_mistakes_of_parallel_decoding_end_in_one_line(checkpoint, tmp_path, arguments, message):
    looplm.save(tiny_model(vocab_size=300), tmp_path)
    looplm.load_tokenizer(checkpoint).save_pretrained(tmp_path)
    done = run(*({"CHECKPOINT": checkpoint, "PLAIN": tmp_path}.get(argument, argument) for argument in arguments))
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert message in done.output
