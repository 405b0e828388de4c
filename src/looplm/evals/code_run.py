"""A model on HumanEval or MBPP: its programs written by the engine at every depth, then run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from looplm.engine import SamplingParams
from looplm.evals.code_tasks import CodeProblem, Form, code_items, find_code_problems, grade, read_code_problems
from looplm.evals.data_sets import CODE
from looplm.evals.depths import Depth
from looplm.evals.progress import Advance, unheard
from looplm.evals.prompts import Prompt
from looplm.evals.results import Evaluation, Item, averages, digest
from looplm.evals.sandbox import Isolation, Limits, run_program
from looplm.evals.solvers import Attempt, EngineSolver, engine_solver
from looplm.evals.subject import ModelSettings, open_subject


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """Which problems, and how they are answered and marked.

    task: "humaneval" or "mbpp" · problems: a file of them, else they are looked for in the folder `data`, then packages
    limit: the first problems · form: how they are put · samples: programs of each, by seeds of their own from `seed` on
    ks: the k of pass@k · isolation, limits: how programs are kept · rows: programs that are written at once.
    """

    task: str
    problems: Path | None = None
    data: Path | None = None
    limit: int | None = None
    form: Form = "base"
    samples: int = 1
    ks: tuple[int, ...] = (1,)
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 1024  # as lm-eval gives HumanEval
    seed: int = 0
    isolation: Isolation = "namespaces"
    limits: Limits = field(default_factory=Limits)
    rows: int = 8

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"there is no form '{self.form}' of a question, only {', '.join(get_args(Form))}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1; leave it out for all problems")
        if not self.ks or not all(1 <= k <= self.samples for k in self.ks):
            raise ValueError(f"pass@k takes k from 1 to the number of samples, {self.samples}, got {self.ks}")


def run_code(model: ModelSettings, asked: CodeSettings, advance: Advance = unheard) -> Evaluation:
    """pass@k at every depth with its standard error over problems, and the share of programs cut by `max_tokens`.

    Raises:
        ValueError: if programs cannot be kept here (asked first), for missing problems, a model or depth that cannot
            be, or turns without a chat template.
    """
    run_program("", asked.limits, isolation=asked.isolation)
    problems = _problems(asked)
    subject = open_subject(model)
    prompts = [_prompt(problem, asked.form) for problem in problems]
    stops = problems[0].questions[asked.form].stops
    sampling = SamplingParams(temperature=asked.temperature, top_p=asked.top_p, stop=stops)
    solver = engine_solver(subject, prompts, sampling, asked.max_tokens, rows=asked.rows, advance=advance)
    items = {depth.name: _items(solver, problems, prompts, depth, asked, advance) for depth in subject.depths}
    scores = [score for depth, told in items.items() for score in averages(asked.task, depth, told, told[0].metrics)]
    settings = _settings(asked, problems, solver)
    return subject.result(Evaluation(settings=settings, scores=scores, items={asked.task: items}))


def _problems(asked: CodeSettings) -> list[CodeProblem]:
    if asked.task not in CODE:
        raise ValueError(f"'{asked.task}' is no benchmark of programs; there are {', '.join(CODE)}")
    found = find_code_problems(asked.task, asked.data) if asked.problems is None else read_code_problems(asked.problems)
    if len({problem.id for problem in found}) < len(found):
        raise ValueError(f"{asked.problems} holds two problems of one id; results are paired by id")
    if len({problem.questions[asked.form].stops for problem in found}) > 1:
        raise ValueError(f"{asked.problems} mixes problems of {' and '.join(CODE)}; give them apart")
    return found[: asked.limit]


def _prompt(problem: CodeProblem, form: Form) -> Prompt:
    question = problem.questions[form]
    return question.plain() if form == "base" else question.messages()


def _items(
    solver: EngineSolver, problems: Sequence[CodeProblem], prompts: Sequence[Prompt], depth: Depth,
    asked: CodeSettings, advance: Advance,
) -> list[Item]:  # fmt: skip
    seeds = [[_seed(asked.seed, number, problem) for number in range(asked.samples)] for problem in problems]
    written = solver.complete(prompts, seeds, depth.policy, asked.max_tokens)
    programs = [
        (problem, solver.text(attempt.token_ids))
        for problem, attempts in zip(problems, written, strict=True)
        for attempt in attempts
    ]
    sampled, texts = zip(*programs, strict=True)
    verdicts = grade(
        sampled, texts, form=asked.form, limits=asked.limits, isolation=asked.isolation, advance=advance
    )  # fmt: skip
    marked = code_items(sampled, verdicts, asked.ks)
    return [_with_effort(item, attempts) for item, attempts in zip(marked, written, strict=True)]


def _with_effort(item: Item, attempts: Sequence[Attempt]) -> Item:
    tokens = sum(len(attempt.token_ids) for attempt in attempts)
    loops = sum(sum(attempt.loops) for attempt in attempts)
    cut = sum(not attempt.finished for attempt in attempts) / len(attempts)
    return replace(
        item, metrics={**item.metrics, "hit_limit": cut}, tokens=round(tokens / len(attempts)),
        loops=loops / tokens if tokens else None,
    )  # fmt: skip


def _settings(asked: CodeSettings, problems: Sequence[CodeProblem], solver: EngineSolver) -> dict[str, Any]:
    told: Mapping[str, Any] = {
        name: value for name, value in asdict(asked).items() if name not in ("problems", "data", "rows", "task")
    }
    questions = [(problem.id, problem.questions[asked.form].messages(), problem.tests) for problem in problems]
    return {
        "code": {asked.task: {**told, "ks": list(asked.ks), **solver.settings, "problems": digest(repr(questions))}}
    }


def _seed(seed: int, sample: int, problem: CodeProblem) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\n{sample}\n{problem.id}".encode()).digest()[:8]) >> 1
