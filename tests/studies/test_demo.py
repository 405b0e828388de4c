"""The demo's measurements on models whose answers are known, and a whole run in miniature."""

import json

import pytest
import torch

from conftest import tiny_config
from looplm import LoopLMForCausalLM, load
from looplm.data.tokenizer import load_tokenizer, train_tokenizer
from looplm.studies.bench_head_loss import bench_head_loss
from looplm.studies.demo import demo_recipes, run_demo
from looplm.studies.depth_probe import held_out_questions, probe_questions
from looplm.tasks import Compose


def test_held_out_questions_are_the_facts_and_the_left_out():
    task = Compose(held_out=0.2)
    questions = held_out_questions(task)
    assert (len(questions[1]), len(questions[2])) == (12 * 3, 12 * 9)
    trained = {task.example(seed).prompt for seed in range(20000)}
    for hops in (3, 4):
        assert 0.1 * 12 * 3**hops < len(questions[hops]) < 0.3 * 12 * 3**hops
        assert not {example.prompt for example in questions[hops]} & trained


@torch.no_grad()
def test_the_probe_reads_what_the_model_says_at_each_loop():
    task = Compose(entities=4, relations=2, held_out=0.5)
    tokenizer = train_tokenizer(["x"], 300, task.words())
    torch.manual_seed(0)
    model = LoopLMForCausalLM(tiny_config(vocab_size=len(tokenizer))).eval()
    probe = probe_questions(model, tokenizer, task, 3)
    row = 0
    for hops, examples in held_out_questions(task).items():
        for example in examples:
            ids = tokenizer(example.prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
            for loop in (1, 2, 3):
                out = model(ids, loops=loop)
                said = tokenizer.decode([int(out.logits[0, -1].argmax())])
                assert probe.correct[row, loop - 1] == (said == example.answer)
                torch.testing.assert_close(probe.gate_logits[row, loop - 1], out.gate_logits[0, -1, loop - 1])
            assert probe.hops[row] == hops
            row += 1
    assert row == len(probe.correct)
    assert probe.weights.sum() == pytest.approx(1)
    for hops in (1, 2, 3, 4):
        assert probe.weights[probe.hops == hops].sum() == pytest.approx(0.25)
        wanted = probe.correct[probe.hops == hops].double().mean(0).tolist()
        assert probe.accuracy_by_hops()[str(hops)] == pytest.approx(wanted)


def test_overrides_reach_both_stages_where_they_must(tmp_path):
    first, second = demo_recipes(tmp_path, None, ("seed=3", "data.rows=5", "steps=7"))
    assert (first.seed, second.seed) == (3, 3)
    assert (first.data, first.steps) == (second.data, 7)
    assert second.steps != 7
    assert second.init_from == first.out


def test_a_whole_demo_in_miniature(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("A loop thinks again before it answers. " * 400)
    small = (
        "steps=4",
        "model.hidden_size=16",
        "model.intermediate_size=16",
        "data.length=32",
        "data.rows=3",
    )
    out = tmp_path / "demo"
    assert run_demo(out, str(text), (*small, "data.sources.compose.held_out_questions=16"))
    printed = capsys.readouterr().out
    for line in ("1 hop", "4 hops", "text loss", "Stage I exits", "Stage II exits", "report.html"):
        assert line in printed
    result = json.loads((out / "demo.json").read_text())
    assert len(result["accuracy_by_loop"]) == len(result["text_loss_by_loop"]) == 8
    assert [p["mean_loops"] for p in result["fixed_depth"]] == [1, 2, 3, 4]
    assert result["fixed_depth"][-1]["accuracy"] == pytest.approx(result["exit_curves"]["Stage I"][-1]["accuracy"])
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "viewport" in page
    assert load(out / "model").config.loops == 4
    assert len(load_tokenizer(out / "model")) == load(out / "model").config.vocab_size
    assert not list((out / "model").glob("trainer*"))


def test_the_benchmark_measures_both_methods():
    chunked, plain = bench_head_loss(tokens=64, width=8, vocab=2048, loops=4, repeats=1)
    assert (chunked.method, plain.method) == ("chunked", "plain")
    assert plain.peak_bytes > 4 * 64 * 2048 * 4
    assert 64 * 2048 * 4 < chunked.peak_bytes < plain.peak_bytes / 2
    assert min(chunked.seconds, plain.seconds) > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sources.text=null", "leave both in data.sources"),
        ("loops=1", "loops of at least 2"),
        ("out=x", "use --out"),
        ("data.sources.compose.task.max_hops=8", "at most 6 hops"),
        ("data.sources.compose.task.held_out=0.00001", "no 3-hop question is held out"),
        ("stepz=1", "unknown key 'stepz'"),
    ],
)
def test_what_cannot_be_shown_is_said_before_training(tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        run_demo(tmp_path / "demo", None, (override,))
    assert not (tmp_path / "demo").exists()


def test_a_demo_in_a_folder_with_an_awkward_name(tmp_path):
    first, second = demo_recipes(tmp_path / "d #1: x", "2024")
    assert first.out == str(tmp_path / "d #1: x" / "stage1")
    assert second.init_from == first.out
    assert first.data.sources["text"].path == second.data.sources["text"].path == "2024"
