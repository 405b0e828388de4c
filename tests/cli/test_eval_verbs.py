"""The verbs of `looplm eval`, each from its arguments to its file, on models whose answers are known."""

import json
import math
import shutil
import sys

import pytest
import torch
from spelling_models import saved, speller, write_lines
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import looplm
from conftest import tiny_config, tiny_model
from harness_tasks import character_tokenizer
from looplm.cli.main import app, main
from looplm.data.tokenizer import train_tokenizer
from looplm.engine import FixedLoops, SamplingParams
from looplm.evals import run as evals_run
from looplm.evals import sandbox
from looplm.evals.benchmarks import benchmark_names, offline_tasks, tasks_of
from looplm.evals.depths import fixed_depths
from looplm.evals.harness import Protocol, evaluate
from looplm.evals.lm import Reader
from looplm.evals.own_tasks import OWN
from looplm.evals.results import read_evaluation
from looplm.evals.sandbox import Verdict
from looplm.evals.statistics import paired_t
from stub_judge import judging

runner = CliRunner()
TREES = ["ash", "elm", "fir", "oak"]
BOX = r"\boxed{7}"


def run(*arguments):
    return runner.invoke(app, ["eval", *(str(argument) for argument in arguments)])


def done(*arguments):
    """What a verb that succeeds prints on stdout."""
    found = run(*arguments)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights, every character a token, with a chat template."""
    random = tiny_model(vocab_size=98, max_position_embeddings=512)
    return saved(tmp_path_factory.mktemp("model"), random, character_tokenizer())


@pytest.fixture(scope="module")
def boxer(tmp_path_factory):
    """Answers every question with a boxed 7, as text and after the template's "<assistant>"."""
    return speller(tmp_path_factory.mktemp("boxer"), BOX, after=">")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    choices = {"text": TREES, "label": list("ABCD")}
    rows = [
        {"id": f"q{n}", "question": f"Which tree {n}?", "choices": choices, "answerKey": "ABCD"[n % 4]}
        for n in range(6)
    ]
    write_lines(folder / "arc_easy/test.jsonl", rows)
    write_lines(
        folder / "gsm8k/test.jsonl",
        [{"question": f"What is {n} + 1?", "answer": f"So <<{n}+1={n + 1}>>.\n#### {n + 1}"} for n in range(5, 8)],
    )
    story = {"Body": "Ann has 3 pens", "Question": "How many with 4 more?", "Answer": 7.0, "ID": "chal-1"}
    write_lines(folder / "svamp/test.jsonl", [story, {**story, "Body": "Ann has 2 pens", "Answer": 6.0}])
    write_lines(
        folder / "lambada_openai/test.jsonl", [{"text": f"She saw {n} trees and liked the trees"} for n in range(4)]
    )
    debt = {"sentence": "Ann paid Bea as _ was in debt.", "option1": "Ann", "option2": "Bea"}
    write_lines(folder / "winogrande/validation.jsonl", [{**debt, "answer": answer} for answer in "12"])
    baking = {"activity_label": "Baking", "ctx_a": "A woman bakes.", "ctx_b": "she", "endings": TREES}
    write_lines(folder / "hellaswag/validation.jsonl", [{"ind": n, "label": str(n), **baking} for n in range(2)])
    for task in tasks_of("mmlu_other"):
        subject = task.removeprefix("mmlu_")
        write_lines(folder / f"mmlu/{subject}/test.jsonl", [
            {"question": f"{subject} {n}?", "subject": subject, "choices": list("wxyz"), "answer": n} for n in range(2)
        ])  # fmt: skip
    return folder


# Tasks, and what is read of their results ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(model, data, tmp_path_factory):
    """One run that other tests read: its file, and what it printed."""
    file = tmp_path_factory.mktemp("results") / "run.json"
    tasks = "arc_easy,gsm8k_cot_zeroshot,mmlu_other,lambada_openai"
    found = run(
        model, "--tasks", tasks, "--data", data, "--shots", 0, "--loops", "3,1,2", "--exit", "q=0.5", "--out", file,
        "--max-length", 400, "--against", f"Qwen3-1.7B,{model}", "--json",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    return file, found


def test_a_run_is_the_library_s_own_and_says_all_that_decided_it(result, model, data):
    file, printed = result
    found = read_evaluation(file)
    assert json.loads(printed.stdout) == json.loads(file.read_text())
    assert list(found.items["arc_easy"]) == ["loops=1", "loops=2", "loops=3", "exit q=0.5"]
    reader = Reader(
        model=looplm.load(model), tokenizer=looplm.load_tokenizer(model), depths=fixed_depths([1, 2, 3]),
        max_length=400, seed=1234,
    )  # fmt: skip
    scores, items = evaluate(reader, offline_tasks(["arc_easy"], data, shots=0), Protocol())
    assert all(score in found.scores for score in scores)
    assert items["arc_easy"]["loops=2"] == found.items["arc_easy"]["loops=2"]
    told = found.settings
    assert (told["kv"], told["dtype"], told["max_length"], told["start_token"]) == ("full", "float32", 400, False)
    assert told["tasks"]["arc_easy"]["shots"] == 0
    costs = found.costs
    assert [costs[f"loops={loops}"]["mean loops"] for loops in (1, 2, 3)] == [1, 2, 3]
    assert costs["loops=3"][f"x {model}"] == 1
    assert 1 <= costs["exit q=0.5"]["mean loops"] <= 3
    assert costs["exit q=0.5"]["kv bytes per token"] == costs["loops=3"]["kv bytes per token"]


def test_a_group_is_the_mean_over_all_of_its_items(result):
    found = read_evaluation(result[0])
    (group,) = [score for score in found.scores if (score.task, score.depth) == ("mmlu_other", "loops=2")]
    marks = [item.metrics["acc"] for task in tasks_of("mmlu_other") for item in found.items[task]["loops=2"]]
    assert (group.items, group.value) == (26, pytest.approx(sum(marks) / 26))
    spread = sum((mark - sum(marks) / 26) ** 2 for mark in marks) / 25
    assert group.stderr == pytest.approx((spread / 26) ** 0.5)


def test_a_run_shows_that_it_moves_and_nothing_of_others_bars(result):
    lines = result[1].stderr.splitlines()
    rows = [line for line in lines if line.startswith("rows scored at 4 depths: ")]
    assert rows[-1].endswith("/".join([rows[-1].split("/")[1]] * 2))
    assert len(rows) > 5
    assert "completions at loops=2: 3/3" in lines
    assert not [line for line in lines if "it/s" in line]


def test_a_table_has_a_row_for_a_group_and_none_for_its_tasks(model, data):
    printed = done(model, "--tasks", "mmlu_other", "--data", data, "--shots", 0, "--loops", "1,2", "--limit", 1)
    assert "mmlu_other" in printed
    assert "mmlu_nutrition" not in printed
    assert "flops per token" in printed


def test_answers_in_a_cache_are_not_asked_again(model, data, tmp_path):
    arguments = (model, "--tasks", "arc_easy", "--data", data, "--cache", tmp_path / "cache", "--json")
    first, again = run(*arguments), run(*arguments)
    assert first.stdout == again.stdout
    assert "rows scored" in first.stderr
    assert "rows scored" not in again.stderr


def test_loops_say_what_each_depth_adds(result):
    found = json.loads(done("loops", result[0], "--json"))
    read = read_evaluation(result[0])
    (accuracy,) = [each for each in found["metrics"] if each["metric"] == "acc"]
    (gain,) = [
        row for row in accuracy["gains"] if row["tasks"][0] == "arc_easy" and row["depths"] == ["loops=3", "loops=2"]
    ]
    after, before = (
        [item.metrics["acc"] for item in read.items["arc_easy"][depth]] for depth in ("loops=3", "loops=2")
    )
    assert gain["interval"]["low"] == pytest.approx(paired_t(after, before).difference.low)
    groups = accuracy["categories"]["mmlu_other"]
    assert sorted(each["category"] for each in groups) == sorted(tasks_of("mmlu_other"))
    (pooled,) = [each for each in accuracy["saturations"] if each["task"] == "mmlu_other"]
    assert pooled["best"] == max(
        score.value for score in read.scores if score.task == "mmlu_other" and score.depth != "exit q=0.5"
    )
    assert {row["items"] for row in accuracy["gains"] if row["tasks"][0] == "mmlu_other"} == {26}
    (losses,) = found["losses"]
    nats = [[item.metrics["nats"] for item in read.items["lambada_openai"][depth]] for depth in losses["depths"]]
    perplexities = [score.value for score in read.scores if score.metric == "perplexity"]
    assert perplexities[:3] == pytest.approx([math.exp(sum(each) / 4) for each in nats])
    assert losses["depths"] == ["loops=1", "loops=2", "loops=3"]
    assert losses["steps"][0]["fall"]["difference"]["value"] == pytest.approx((sum(nats[0]) - sum(nats[1])) / 4)
    (perplexity,) = json.loads(done("loops", result[0], "--metric", "perplexity", "--json"))["metrics"]
    assert perplexity["saturations"] == []  # its best is its least
    printed = done("loops", result[0])
    for part in (
        "acc: what each depth adds",
        "mmlu_other by category",
        "Does the loss fall",
        "acc_norm: the first depth",
    ):
        assert part in printed
    assert "exit q=0.5" not in printed
    assert "acc_norm" not in done("loops", result[0], "--metric", "acc")


def test_two_results_are_compared_item_by_item(result, model, data, tmp_path):
    other = tmp_path / "other.json"
    done(
        model,
        "--tasks",
        "arc_easy,mmlu_other",
        "--data",
        data,
        "--shots",
        0,
        "--loops",
        2,
        "--limit",
        1,
        "--out",
        other,
    )
    rows = json.loads(done("compare", result[0], other, "--json"))
    (row,) = [row for row in rows if (row["tasks"][0], row["metric"]) == ("arc_easy", "acc")]
    assert (row["items"], row["only_a"], row["difference"]) == (1, 5, 0.0)
    (group,) = [row for row in rows if (row["tasks"][0], row["metric"]) == ("mmlu_other", "acc")]
    assert (group["items"], group["only_a"]) == (13, 13)
    printed = done("compare", result[0], other)
    for part in ("limit: null | 1", "only A has lambada_openai", "only A has arc_easy at loops=1"):
        assert part in printed
    assert "no items to pair" not in printed
    table = done("compare", result[0], result[0], "--depths", "loops=3,loops=1", "--tasks", "arc_easy", "--markdown")
    assert table.startswith("| task | depth |")
    assert "loops=3 against loops=1" in table
    assert "Settings that differ (A | B): none" in table


def test_settings_say_how_a_task_asks_and_not_where_its_functions_lie(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(evals_run, "digest", str)
    done(model, "--tasks", "winogrande,hellaswag", "--data", data, "--shots", 0, "--out", tmp_path / "r.json")
    for told in read_evaluation(tmp_path / "r.json").settings["tasks"].values():
        assert "def process_docs" in told["config"] or "def doc_to_choice" in told["config"]
        assert " at 0x" not in told["config"]
        assert "site-packages" not in told["config"]


def test_a_depth_that_is_given_twice_is_one(model, data):
    arguments = (
        model,
        "--tasks",
        "arc_easy",
        "--data",
        data,
        "--shots",
        0,
        "--loops",
        "2,2",
        "--exit",
        "q=0.5",
        "--json",
    )
    assert len(json.loads(done(*arguments, "--exit", "q=0.5"))["scores"]) == 4


def test_what_is_longer_than_the_model_reads_is_told(model, data, tmp_path):
    arguments = (model, "--tasks", "arc_easy", "--data", data, "--shots", 0, "--loops", "1,2")
    assert "lost their beginning" not in run(*arguments, "--limit", 3).stderr
    found = run(*arguments, "--limit", 3, "--max-length", 33, "--out", tmp_path / "cut.json")  # ARC's have 31 and more
    assert "looplm: 3 questions (arc_easy) are longer than the model may read" in found.stderr
    assert {item.cut for item in read_evaluation(tmp_path / "cut.json").items["arc_easy"]["loops=2"]} == {True}


def test_a_result_that_could_not_be_written_is_refused_before_the_run(data, tmp_path):
    (tmp_path / "file").touch()
    found = run("no-model", "--tasks", "arc_easy", "--data", data, "--out", tmp_path / "file/r.json")
    assert found.exit_code == 2
    assert "is no folder that can be written to" in " ".join(found.stderr.replace("│", " ").split())


def test_own_tasks_take_no_examples(model):
    found = run(model, "--tasks", "compose", "--shots", 2)
    assert (found.exit_code, found.stderr) == (
        1, "looplm: compose is asked without examples; evaluate it apart from what takes 2 shots\n",
    )  # fmt: skip


def test_end_tokens_part_the_answers_of_a_cache(model, data, tmp_path):
    """Those of generation_config.json, which are in no weight, config or tokenizer."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    ends = json.loads((other / "generation_config.json").read_text()) | {"eos_token_id": list(range(98))}
    (other / "generation_config.json").write_text(json.dumps(ends))
    for place in (model, other):
        arguments = ("--tasks", "gsm8k_cot_zeroshot", "--data", data, "--max-length", 400, "--limit", 1)
        done(place, *arguments, "--cache", tmp_path / "cache", "--out", tmp_path / f"{place.name}.json")
    tokens = [
        read_evaluation(tmp_path / f"{place.name}.json").items["gsm8k_cot_zeroshot"]["loops=3"][0].tokens
        for place in (model, other)
    ]
    assert tokens[0] > tokens[1] == 1


def test_every_benchmark_is_listed_with_its_data_or_the_way_to_it(data):
    found = {each["name"]: each for each in json.loads(done("tasks", "--data", data, "--json"))}
    assert set(found) == {*benchmark_names(), *OWN, "humaneval", "mbpp", "MRPC", "StrongREJECT"}
    easy = found["arc_easy"]["here"]
    assert (easy["items"], easy["split"], easy["licence"]) == (6, "test", "CC-BY-SA-4.0")
    assert easy["origin"] == str(data / "arc_easy/test.jsonl")
    assert found["openbookqa_open"]["here"] is None
    assert "openbookqa/additional/test.jsonl" in found["openbookqa_open"]["missing"]
    printed = done("tasks", "--data", data)
    assert "svamp_cot_zeroshot" in printed.split("Not here:")[0]
    assert "openbookqa_open (eval): " in printed.split("Not here:")[1]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    folder = tmp_path_factory.mktemp("llama")
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=98, max_position_embeddings=512, **shape, **ids))
    plain.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def test_parity_with_lm_evals_own_model(llama, data, tmp_path):
    arguments = ("parity", llama, "--tasks", "arc_easy,gsm8k_cot_zeroshot", "--data", data, "--limit", 2)
    rows = json.loads(done(*arguments, "--out", tmp_path / "p.json", "--json"))
    assert {row["task"] for row in rows} == {"arc_easy", "gsm8k_cot_zeroshot"}
    assert all(row["difference"] < 1e-6 and row["furthest"] < 1e-4 and row["items"] == 2 for row in rows)
    kept = read_evaluation(tmp_path / "p.json")
    assert {score.depth for score in kept.scores} == {"looplm", "hf", "furthest answers"}
    assert len(kept.scores) == 3 * len(rows)


# What the engine writes ----------------------------------------------------------------------------------------


def test_reasoning_is_marked_by_its_last_box_at_every_budget_and_depth(boxer, data, tmp_path):
    arguments = ("reason", boxer, data / "svamp/test.jsonl", "--budgets", "4,32", "--loops", "1,2", "--exit", "q=0.5")
    done(*arguments, "--name", "svamp", "--out", tmp_path / "r.json")
    found = read_evaluation(tmp_path / "r.json")
    values = {(s.task, s.depth, s.metric): s.value for s in found.scores}
    for depth in ("loops=1", "loops=2", "exit q=0.5"):
        assert values["svamp tokens=4", depth, "right"] == 0
        assert values["svamp tokens=32", depth, "right"] == 0.5
        assert values["svamp tokens=4", depth, "hit_limit"] == 1
        assert values["svamp tokens=32", depth, "tokens"] == len(BOX) + 1  # the end token
    assert found.costs["loops=2"]["mean loops"] == 2
    assert found.settings["checkpoint"]
    assert "svamp/test tokens=4" in done(*arguments)


@pytest.mark.parametrize(
    ("place", "right"), [("gsm8k_cot_zeroshot", 1 / 3), ("svamp_cot_zeroshot", 1 / 2), ("arc_easy", 0)]
)
def test_reasoning_over_a_benchmarks_records(boxer, data, place, right):
    found = json.loads(done("reason", boxer, place, "--data", data, "--budgets", 16, "--chat", "--json"))
    (score,) = [each for each in found["scores"] if each["metric"] == "right"]
    assert (score["task"], score["value"]) == (f"{place} tokens=16", pytest.approx(right))


def test_samples_and_several_numbers_of_examples(boxer, data, tmp_path):
    worked = write_lines(tmp_path / "w.jsonl", [{"problem": f"{n}?", "solution": rf"So \boxed{{{n}}}."} for n in "123"])
    found = json.loads(done(
        "reason", boxer, data / "gsm8k/test.jsonl", "--worked", worked, "--shots", "0,2", "--seeds", 3, "--k", "1,2",
        "--temperature", 0.01, "--budgets", 16, "--limit", 2, "--json",
    ))  # fmt: skip
    tasks = [f"gsm8k/test shots={shots} tokens=16" for shots in (0, 2)]
    assert list(found["items"]) == tasks
    values = {(s["task"].rpartition(" shots")[2], s["metric"]): s["value"] for s in found["scores"]}
    for task in ("=0 tokens=16", "=2 tokens=16"):
        assert values[task, "pass@2"] == values[task, "right"] == 0.5
        assert values[task, "right/deviation"] == 0


def test_programs_are_written_and_run(tmp_path):
    model = speller(tmp_path / "m", "7", after=":")
    tests = "def check(candidate):\n    assert candidate() is {}\n"
    problems = [
        {"task_id": f"HumanEval/{n}", "prompt": "def f():", "entry_point": "f", "test": tests.format(value),
         "canonical_solution": "7"} for n, value in enumerate((None, None, 7))
    ]  # fmt: skip
    file = write_lines(tmp_path / "p.jsonl", problems)
    found = json.loads(done(
        "code", model, "--task", "humaneval", "--problems", file, "--loops", "1,3", "--isolation", "limits",
        "--samples", 2, "--k", "1,2", "--temperature", 0.01, "--max-tokens", 8, "--json",
    ))  # fmt: skip
    values = {(s["depth"], s["metric"]): (s["value"], s["stderr"]) for s in found["scores"]}
    for depth in ("loops=1", "loops=3"):
        assert values[depth, "pass@1"] == values[depth, "pass@2"] == pytest.approx((2 / 3, 1 / 3))
        assert values[depth, "hit_limit"] == (0, 0)
        assert [item["tokens"] for item in found["items"]["humaneval"][depth]] == [2, 2, 2]
    assert found["settings"]["code"]["humaneval"]["isolation"] == "limits"


def test_programs_are_sampled_apart_and_the_same_in_every_run(model, tmp_path, monkeypatch):
    """Two problems of one text, so that nothing but seeds tells samples apart."""
    runs = []

    def graded(problems, texts, **_):
        runs.append(texts)
        return [Verdict(outcome="failed", message="", output="", seconds=0.0, isolation="limits") for _ in texts]

    monkeypatch.setattr("looplm.evals.code_run.grade", graded)
    problem = {"prompt": "def f():", "entry_point": "f", "test": "", "canonical_solution": ""}
    file = write_lines(tmp_path / "p.jsonl", [{"task_id": name, **problem} for name in "ab"])
    for seed in (0, 0, 1):
        done(
            "code", model, "--task", "humaneval", "--problems", file, "--isolation", "limits", "--samples", 3,
            "--temperature", 1, "--max-tokens", 12, "--seed", seed,
        )  # fmt: skip
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2]}) == 12


# Judges --------------------------------------------------------------------------------------------------------


def test_safety_is_judged_once_and_replayed(boxer, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt": f"Do {n}", "category": "x"} for n in range(3)])
    out, record = tmp_path / "s.json", tmp_path / "replies.jsonl"
    arguments = (
        "safety", boxer, "--prompts", prompts, "--loops", "1,2", "--record", record, "--max-tokens", 20, "--limit", 2,
    )  # fmt: skip
    with judging(lambda prompt: f"Score: {5 if BOX in prompt and 'Do 1' in prompt else 2}") as stub:
        first = run(*arguments, "--judge", stub.url, "--judge-model", "m", "--out", out)
    assert first.exit_code == 0, first.output
    assert "replies of the judge: 2/2" in first.stderr
    found = read_evaluation(out)
    values = {(s.task, s.depth, s.metric): s.value for s in found.scores}
    assert values["safety", "loops=2", "harmfulness"] == 3.5
    assert values["safety/x", "loops=1", "harmful"] == 0.5
    assert (found.settings["judge"], found.costs["loops=2"]["mean loops"]) == ("m", 2)
    assert json.loads(done(*arguments, "--json")) == json.loads(out.read_text())


def test_dialogues_are_rated_turn_by_turn(boxer, tmp_path):
    questions = write_lines(tmp_path / "q.jsonl", [{"question_id": 1, "category": "math", "turns": ["A?", "B?"]}])
    answers = [{"question_id": 1, "choices": [{"turns": ["a", "b"]}]}]
    arguments = (
        "mt-bench", boxer, questions, "--references", write_lines(tmp_path / "a.jsonl", answers), "--max-tokens", 20,
        "--record", tmp_path / "replies.jsonl", "--json",
    )  # fmt: skip
    with judging(lambda prompt: f"Rating: [[{9 if 'B?' in prompt else 4}]]") as stub:
        found = json.loads(done(*arguments, "--judge", stub.url, "--judge-model", "m"))
    values = {score["metric"]: score["value"] for score in found["scores"] if score["task"] == "mt_bench"}
    assert (values["rating"], values["rating_turn1"], values["rating_turn2"]) == (6.5, 4, 9)
    assert json.loads(done(*arguments)) == found


def test_faithfulness_in_tables_files_and_figures(tmp_path):
    tokenizer = train_tokenizer(["Answer: yes or no, sentences, questions"] * 3, 300)
    torch.manual_seed(2)
    folder = saved(
        tmp_path / "m", looplm.LoopLMForCausalLM(tiny_config(vocab_size=300, max_position_embeddings=512)), tokenizer
    )
    pairs = write_lines(tmp_path / "p.jsonl", [
        {"question1": f"Is {n} odd?", "question2": f"Is {n * n} odd?", "is_duplicate": n % 2} for n in range(40)
    ])  # fmt: skip
    arguments = ("faithful", folder, "--pairs", pairs, "--loops", 2, "--seeds", 2, "--limit", 30)
    found = json.loads(done(*arguments, "--out", tmp_path / "f.json", "--plots", tmp_path / "plots", "--json"))
    assert found["agreement"]["items"] == 30
    shares = found["agreement"]["shares"]
    assert shares[0][0] == shares[1][1] == 1
    assert shares[0][1] == shares[1][0]
    kept = read_evaluation(tmp_path / "f.json")
    values = {(s.task, s.depth, s.metric): s.value for s in kept.scores}
    assert values["paraphrases: p.jsonl", "loops=1", "as at loop 2"] == shares[0][1]
    (mark,) = [curve for curve in found["curves"] if curve["target"] == "the mark"]
    assert values["probes for the mark", "loop 2 layer 1", "roc_auc"] == mark["probes"][2]["auc"]
    assert (tmp_path / "plots/agreement.svg").read_text().count("<svg")
    assert (tmp_path / "plots/probes.svg").exists()
    printed = done(*arguments)
    assert f"{shares[0][1]:.3f}" in printed
    assert "the mark" in printed


# Mistakes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(model, data, boxer, result, llama, tmp_path_factory):
    """Folders and files that mistakes are made with, by the words that stand for them."""
    folder = tmp_path_factory.mktemp("places")
    silent = character_tokenizer()
    silent.chat_template = None
    ungated = tiny_model(vocab_size=98, exit_gate=False, max_position_embeddings=512)
    (folder / "text.json").write_text("{}")
    return {
        "MODEL": model, "DATA": data, "BOXER": boxer, "RESULT": result[0], "LLAMA": llama,
        "SILENT": saved(folder / "silent", ungated, silent), "TEXT": folder / "text.json", "NEW": folder / "new.json",
        "PROBLEMS": write_lines(folder / "p.jsonl", [{"prompt": "Do it"}]),
        "ONE": write_lines(folder / "one.jsonl", [{"question": "1 + 6?", "answer": "7"}]),
    }  # fmt: skip


MISTAKES = [
    ("nowhere --tasks arc_easy --data DATA", "'nowhere' is neither a folder nor a hub id"),
    ("MODEL --tasks arc_esy", "there is no benchmark 'arc_esy'; near it are arc_easy"),
    ("MODEL --tasks openbookqa_open --data DATA", "openbookqa_open has no test split here: put it into"),
    ("MODEL --tasks gsm8k_cot_zeroshot --data /nowhere", "there is no folder /nowhere"),
    ("MODEL --tasks arc_easy --data DATA --loops 0,1", "--loops '0,1' must be whole numbers of at least 1"),
    ("MODEL --tasks arc_easy --data DATA --exit 0.5", "'0.5' is no exit rule; write q=0.5"),
    ("SILENT --tasks arc_easy --data DATA --exit q=0.5", "reads the exit gate"),
    ("SILENT --tasks arc_easy --data DATA --chat", "the tokenizer has no chat template"),
    ("MODEL --tasks arc_easy --data DATA --multiturn", "multiturn writes examples as turns of a chat"),
    ("MODEL --tasks arc_easy --data DATA --kv some", "kv='some' is not known"),
    ("MODEL --tasks arc_easy --data DATA --dtype int", "dtype='int' is not a floating-point dtype"),
    ("MODEL --tasks arc_easy --data DATA --against GPT", "to compare compute with, name Qwen3-1.7B, Qwen3-4B or"),
    ("MODEL --tasks ,", "name at least one task"),
    ("tasks --data /nowhere", "there is no folder /nowhere"),
    ("compare RESULT NEW", "there is no file"),
    ("compare RESULT TEXT", "is not a result of `looplm eval`"),
    ("compare RESULT RESULT --tasks a,b,c", "--tasks 'a,b,c' must be one name, or A's and B's"),
    ("compare RESULT RESULT --tasks piqa", "A has no task 'piqa', only arc_easy"),
    ("loops RESULT --metric f1", "no score is 'f1', only acc"),
    ("parity LLAMA --tasks piqaa", "there is no benchmark 'piqaa'"),
    ("code BOXER --task humaneval --problems NEW --isolation limits", "new.json' does not exist"),
    ("code BOXER --task humaneval --problems PROBLEMS --isolation limits", "has no field 'task_id'"),
    ("code BOXER --task mbpp --samples 2 --k 3", "pass@k takes k from 1 to the number of samples, 2"),
    ("reason BOXER nowhere.jsonl", "the text 'nowhere.jsonl' does not exist"),
    ("reason BOXER PROBLEMS", "has no field 'question', only prompt"),
    ("reason BOXER ONE --question question", "name the field of the question and that of the answer"),
    ("reason BOXER ONE --seeds 2 --budgets 4", "greedy answers are the same for every seed"),
    ("reason BOXER ONE --shots 2", "2 shots need a file of solved examples"),
    ("reason BOXER ONE --shots 1 --worked ONE", "an example is a problem, too"),
    ("reason SILENT ONE --chat --budgets 4", "the tokenizer has no chat template"),
    ("reason BOXER ONE --budgets 0", "--budgets '0' must be whole numbers of at least 1"),
    ("safety BOXER --prompts PROBLEMS", "give --record FILE"),
    ("safety BOXER --prompts PROBLEMS --record NEW", "holds no judge's reply; record some with an endpoint first"),
    ("safety BOXER --prompts NEW --record NEW", "there are no harmful prompts at"),
    ("safety BOXER --prompts PROBLEMS --record NEW --judge http://127.0.0.1:1/v1", "needs a model's name"),
    (
        "safety BOXER --prompts PROBLEMS --record NEW --judge http://a/v1 --judge-model m --key-variable NO_SUCH",
        "the environment variable NO_SUCH, which is not set",
    ),
    ("mt-bench BOXER ONE --record NEW", "has no field 'question_id'"),
    ("faithful MODEL --pairs NEW", "new.json' does not exist"),
    ("faithful MODEL --pairs ONE", "has no field 'is_duplicate'"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_mistakes_end_in_one_line(places, command, message):
    found = run(*(places.get(word, word) for word in command.split()))
    assert found.exit_code == 1
    assert message in found.output
    assert found.output.startswith("looplm: ")
    assert found.output.count("\n") == 1


def test_a_kernel_without_namespaces_is_named_before_anything_is_written(places, monkeypatch, tmp_path):
    keeper = tmp_path / "keeper.py"
    keeper.write_text('print(\'{"refused": "unshare: not permitted"}\')')
    monkeypatch.setattr(sandbox, "_KEEPER", keeper)
    found = run("code", places["BOXER"], "--task", "humaneval", "--problems", places["PROBLEMS"])
    assert found.exit_code == 1
    assert "isolation='namespaces' here (unshare: not permitted); isolation='limits'" in found.output
    assert found.output.count("\n") == 1


def test_loops_need_two_depths(model, data, tmp_path):
    file = tmp_path / "one.json"
    done(model, "--tasks", "arc_easy", "--data", data, "--limit", 2, "--out", file)
    found = run("loops", file)
    assert found.exit_code == 1
    assert "two depths at least" in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "m"], "Missing option '--tasks'"),
        (["eval", "m", "--tasks", "a", "--lops", "2"], "No such option: --lops"),
        (["eval", "m", "--tasks", "a", "--out", "."], "Invalid value for '--out'"),
        (["eval", "code", "m", "--task", "apps"], "Invalid value for '--task'"),
        (["eval", "code", "m", "--task", "mbpp", "--isolation", "none"], "Invalid value for '--isolation'"),
    ],
)
def test_usage_mistakes_end_in_one_line_too(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["looplm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_speller_writes_what_it_is_meant_to(boxer):
    engine = looplm.Engine(looplm.load(boxer), looplm.load_tokenizer(boxer))
    for loops in (1, 3):
        (made,) = engine.generate(["What is it?\n"], SamplingParams(max_tokens=30), depth=FixedLoops(loops))
        assert made.text == BOX
