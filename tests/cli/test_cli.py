"""The command line: verbs, JSON, and one-line errors with exit code 1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import looplm
from conftest import tiny_config
from looplm.cli.main import app, main
from looplm.data.tokenizer import train_tokenizer

runner = CliRunner()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["some text to learn from"], 300)
    torch.manual_seed(0)
    model = looplm.LoopLMForCausalLM(tiny_config(vocab_size=len(tokenizer), eos_token_id=None))
    looplm.save(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


def test_the_surface_is_frozen():
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert verbs == {
        "demo", "train", "sft", "rl", "tokenize", "average", "generate", "calibrate", "info", "export", "study",
    }  # fmt: skip
    groups = {group.name: group.typer_instance.registered_commands for group in app.registered_groups}
    assert set(groups) == {"bench", "eval"}
    evaluations = {command.name for command in groups["eval"]}
    assert evaluations == {
        "run", "tasks", "compare", "parity", "loops", "code", "reason", "safety", "mt-bench", "faithful",
        "smollm2",
    }  # fmt: skip
    for verb in (*verbs, "bench", "bench head-loss", "bench jsrr", "eval", *(f"eval {name}" for name in evaluations)):
        assert run(*verb.split(), "--help").exit_code == 0


def test_info_of_a_preset_and_of_checkpoints(checkpoint, ouro_folder):
    found = json.loads(run("info", "ouro_1_4b", "--json", "--loops", "4,8").output)
    assert found["parameters"] == 1_434_652_673
    assert [row["kv_bytes_per_token_bf16"] for row in found["cost"]] == [768 * 1024, 1536 * 1024]
    assert json.loads(run("info", ouro_folder, "--json").output)["layout"] == "ouro"
    table = run("info", checkpoint)
    assert table.exit_code == 0
    assert "core_layers=2" in table.output


def test_generate_equals_the_library(checkpoint):
    tokenizer = looplm.data.tokenizer.load_tokenizer(checkpoint)
    ids = tokenizer("some", return_tensors="pt")["input_ids"]
    wanted = looplm.load(checkpoint).generate(ids, max_new_tokens=5, loops=2, do_sample=False)[0, ids.shape[1] :]
    made = json.loads(run("generate", checkpoint, "some", "--loops", 2, "--max-tokens", 5, "--json").output)
    assert made["tokens"] == wanted.tolist()
    assert made["loops_per_token"] == [2] * 5
    exits = json.loads(run("generate", checkpoint, "some", "--exit", 0.5, "--max-tokens", 5, "--json").output)
    assert len(exits["loops_per_token"]) == 5
    assert set(exits["loops_per_token"]) <= {1, 2, 3}
    full = json.loads(run("generate", checkpoint, "some", "--exit", 1, "--max-tokens", 5, "--json").output)
    plain = json.loads(run("generate", checkpoint, "some", "--max-tokens", 5, "--json").output)
    assert full["tokens"] == plain["tokens"]
    assert full["loops_per_token"] == [3] * 5
    sampled = [run("generate", checkpoint, "some", "--temperature", 1, "--seed", s, "--json").output for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize("arguments", [(), ("--exit", 1), ("--exit", 0.5)])
def test_generate_stops_at_the_tokenizers_end(checkpoint, tmp_path, arguments):
    """On every path, though neither config names it."""
    model, tokenizer = looplm.load(checkpoint), looplm.load_tokenizer(checkpoint)
    first = json.loads(run("generate", checkpoint, "some", *arguments, "--max-tokens", 1, "--json").output)["tokens"][0]
    looplm.save(model, tmp_path)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    tokenizer.save_pretrained(tmp_path)
    made = json.loads(run("generate", tmp_path, "some", *arguments, "--max-tokens", 5, "--json").output)
    assert made["tokens"] == [first]


def test_export_and_back(checkpoint, tmp_path):
    out = tmp_path / "ouro"
    assert run("export", checkpoint, out).exit_code == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "ouro"
    ids = looplm.data.tokenizer.load_tokenizer(out)("some", return_tensors="pt")["input_ids"]
    assert looplm.load(out)(ids).logits.equal(looplm.load(checkpoint)(ids).logits)
    assert "is not empty" in run("export", checkpoint, out).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "nowhere"), "'nowhere' is neither a folder nor a hub id"),
        (("info", "ouro_1_4b", "--loops", "a,b"), "--loops 'a,b'"),
        (("info", "ouro_1_4b", "--loops", "0"), "--loops '0'"),
        (("train", "nope"), "no recipe 'nope'"),
        (("train", "mini_stage1", "stepz=1"), "unknown key 'stepz'"),
        (("demo", "--text", "/nowhere", "--out", "/tmp/looplm-none"), "the text '/nowhere' does not exist"),
        (("generate", "CHECKPOINT", ""), "the prompt is empty"),
        (("generate", "CHECKPOINT", "x", "--loops", "0"), "loops=0 must be"),
        (("generate", "CHECKPOINT", "to \udcff"), "the text has half a character (a lone surrogate) at place 3"),
        (("generate", "OURO", "x"), "has no tokenizer.json"),
        (("generate", "GPT2", "x"), "model_type='gpt2'"),
    ],
)
def test_mistakes_end_in_one_line(checkpoint, ouro_folder, tmp_path, arguments, message):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    places = {"CHECKPOINT": checkpoint, "OURO": ouro_folder, "GPT2": tmp_path}
    done = run(*(places.get(argument, argument) for argument in arguments))
    assert done.exit_code == 1
    assert message in done.output
    assert done.output.startswith("looplm: ")
    assert done.output.count("\n") == 1
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x"], "Missing argument"),
        (["generate", "x", "y", "--exit", "2"], "Invalid value for '--exit'"),
        (["generate", "x", "y", "--lops", "2"], "No such option"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["generate", "x", "y", "--seed", "9" * 30], "Invalid value for '--seed'"),
    ],
)
def test_usage_mistakes_end_in_one_line_too(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["looplm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("looplm: ")
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "extra", "verb"),
    [
        ("omegaconf", "train", "train"),
        ("tensorboard", "train", "train"),
        ("matplotlib", "studies", "demo"),
        ("lm_eval", "eval", "eval"),
    ],
)
def test_a_missing_extra_is_named(module, extra, verb):
    program = f"import sys; sys.modules[{module!r}] = None; from looplm.cli.main import main; main()"
    usual = {"train": "train nope", "demo": "demo --text /nowhere", "eval": "eval m --tasks piqa"}
    arguments = usual[verb].split()
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"needs the '{extra}' extra: pip install 'looplm[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "mini_stage1", "stepz=1"], "looplm: recipe mini_stage1: unknown key 'stepz'"),
        (["train"], "looplm: Missing argument 'recipe'. (see --help)"),
        (["alone"], "looplm: rank 1: the disk of one node is full"),
    ],
)
def test_several_processes_say_a_mistake_once(arguments, line):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d",
        "--rdzv_endpoint", "127.0.0.1:0", str(Path(__file__).parent / "distributed_verb.py"), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    said = [one for one in done.stderr.splitlines() if one.startswith("looplm: ")]
    assert said == [line]
    assert done.returncode != 0
