"""The papers' reasoning evaluation: one generation for all decode budgets, at every depth, greedy or sampled.

Protocol of RLTT (arXiv 2602.10520, section 6 and Tables 1 to 3), but for one thing: the last box is marked, as in
training, not the first. Accuracy is never reported without the budget: a share of what separates models is length.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from looplm.engine import DepthPolicy
from looplm.evals.depths import Depth, fixed_depths
from looplm.evals.marking import Marker
from looplm.evals.pass_at_k import pass_at_k
from looplm.evals.prompts import Problem, Prompting, Worked, check_problems
from looplm.evals.results import Evaluation, Item, Score, averages, digest
from looplm.evals.solvers import Attempt, Solver
from looplm.evals.statistics import over_seeds

RIGHT = "right"
BUDGETS = (512, 1024, 2048, 3072, 4096)


@dataclass(frozen=True, kw_only=True)
class ReasoningTest:
    """What is asked, and what is read of the answers.

    task: its name in results, to which each budget is added ("math500 tokens=2048") · budgets: limits of new tokens
    seeds: one answer each; greedy has one · pass_at: the k of pass@k, at most as many as seeds.
    """

    task: str
    budgets: tuple[int, ...] = (2048,)
    seeds: tuple[int, ...] = (0,)
    pass_at: tuple[int, ...] = ()
    prompting: Prompting = field(default_factory=Prompting)

    def __post_init__(self) -> None:
        for name, values in (("budgets", self.budgets), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}={values} needs one value at least, and none twice")
        if min(self.budgets) < 1 or min(self.seeds) < 0:
            raise ValueError(f"budgets start at 1 and seeds at 0, got {self.budgets} and {self.seeds}")
        if not all(1 <= k <= len(self.seeds) for k in self.pass_at):
            raise ValueError(f"pass@k takes k from 1 to the number of seeds, {len(self.seeds)}, got {self.pass_at}")

    def task_at(self, budget: int) -> str:
        """The name in results of the task under this limit."""
        return f"{self.task} tokens={budget}"


def solve(
    solver: Solver, problems: Sequence[Problem], test: ReasoningTest, mark: Marker, depths: Sequence[Depth],
    settings: Mapping[str, Any] | None = None,
) -> Evaluation:  # fmt: skip
    """Every problem answered at every depth (by its name in results), and read at every budget.

    Items hold their means over the seeds: `right`, `tokens` and `hit_limit` (the answer had not ended), `pass@k`.
    Scores are their means over the items, and `loops`, per token; with several seeds `right/seed=s` and their
    `right/deviation`, too. Problems that `mark` cannot mark are in no mean; settings name them as `unmarked`.
    `settings` say what the solver cannot: the checkpoint and its hash, dtype, tokenizer, data.

    Raises:
        ValueError: for no problem, two of one id, one that is an example, too, no depth, or none that can be marked.
    """
    check_problems(problems)
    _check_examples(problems, test.prompting.examples)
    if not depths:
        raise ValueError("name at least one depth, such as fixed_depths([1, 2, 4])")
    found = {depth.name: _readings(solver, problems, test, mark, depth.policy) for depth in depths}
    unmarked = {reading.id for told in found.values() for reading in told if reading.mark is None}
    if len(unmarked) == len(problems):
        raise ValueError(f"no answer of {test.task} can be marked; look at the problems' answers")
    scores: list[Score] = []
    items: dict[str, dict[str, list[Item]]] = {test.task_at(budget): {} for budget in test.budgets}
    for depth, told in found.items():
        for budget in test.budgets:
            marked = [reading for reading in told if reading.budget == budget and reading.id not in unmarked]
            items[test.task_at(budget)][depth] = _items(marked, test.pass_at)
            scores += _scores(test, budget, depth, marked, items[test.task_at(budget)][depth])
    own = _settings(solver, problems, test) | {
        "depths": {depth.name: repr(depth.policy) for depth in depths},
        "unmarked": sorted(unmarked),
    }
    return Evaluation(settings={**(settings or {}), "reasoning": {test.task: own}}, scores=scores, items=items)


def budget_curve(
    solver: Solver, problems: Sequence[Problem], test: ReasoningTest, mark: Marker, depths: Sequence[Depth],
    budgets: Sequence[int] = BUDGETS, settings: Mapping[str, Any] | None = None,
) -> Evaluation:  # fmt: skip
    """`solve` at many budgets, read of one generation at the largest."""
    return solve(solver, problems, replace(test, budgets=tuple(budgets)), mark, depths, settings)


def accuracy_by_loops(
    solver: Solver, problems: Sequence[Problem], test: ReasoningTest, mark: Marker, loops: Sequence[int],
    settings: Mapping[str, Any] | None = None,
) -> Evaluation:  # fmt: skip
    """`solve` with every token, the prompt's too, at each of `loops`."""
    return solve(solver, problems, test, mark, fixed_depths(loops), settings)


def k_shot_saturation(
    solver: Solver, problems: Sequence[Problem], test: ReasoningTest, mark: Marker, examples: Sequence[Worked],
    depths: Sequence[Depth], shots: Sequence[int] = (0, 1, 5, 25, 50), settings: Mapping[str, Any] | None = None,
) -> Evaluation:  # fmt: skip
    """Accuracy against loops for each number of worked examples, the first of `examples` (Huginn, Figure 9).

    The tasks are named "arc shots=5 tokens=64"; `saturations` finds how many loops each needs.

    Raises:
        ValueError: for fewer examples than shots, or one that is a problem, too.
    """
    if not shots or max(shots) > len(examples) or min(shots) < 0:
        raise ValueError(f"shots={tuple(shots)} takes numbers from 0 to that of the examples, {len(examples)}")
    _check_examples(problems, examples[: max(shots)])
    found = [
        solve(
            solver, problems,
            replace(
                test, task=f"{test.task} shots={count}",
                prompting=replace(test.prompting, examples=tuple(examples[:count])),
            ),
            mark, depths,
        )
        for count in shots
    ]  # fmt: skip
    return Evaluation(
        settings={
            **(settings or {}),
            "reasoning": {name: told for each in found for name, told in each.settings["reasoning"].items()},
        },
        scores=[score for each in found for score in each.scores],
        items={task: depths for each in found for task, depths in each.items.items()},
    )


def _check_examples(problems: Sequence[Problem], examples: Sequence[Worked]) -> None:
    asked = {problem.question for problem in problems} & {example.question for example in examples}
    if asked:
        raise ValueError(f"an example is a problem, too: {' '.join(sorted(asked)[0].split())[:60]!r}; take others")


class _Reading(NamedTuple):
    """One answer under a limit: the problem's id, how long it is, what its loops sum to, and its mark."""

    id: str
    seed: int
    budget: int
    tokens: int
    loops: int
    finished: bool
    text: str
    mark: float | None = None

    @property
    def right(self) -> float:
        return self.mark or 0.0


def _readings(
    solver: Solver, problems: Sequence[Problem], test: ReasoningTest, mark: Marker, depth: DepthPolicy
) -> list[_Reading]:  # fmt: skip
    """Every answer at every budget, in the order of problems, then seeds."""
    done = solver.complete(
        [test.prompting.ask(problem.question) for problem in problems],
        [[_seed(seed, problem) for seed in test.seeds] for problem in problems], depth, max(test.budgets),
    )  # fmt: skip
    read = [
        (problem.answer, reading)
        for problem, attempts in zip(problems, done, strict=True)
        for seed, attempt in zip(test.seeds, attempts, strict=True)
        for reading in _read(solver, problem, seed, attempt, test.budgets)
    ]
    pairs = list(dict.fromkeys((gold, reading.text) for gold, reading in read))  # equal texts are marked once
    marks = dict(zip(pairs, mark([gold for gold, _ in pairs], [text for _, text in pairs]), strict=True))
    return [reading._replace(text="", mark=marks[gold, reading.text]) for gold, reading in read]


def _read(
    solver: Solver, problem: Problem, seed: int, attempt: Attempt, budgets: Sequence[int]
) -> Iterator[_Reading]:  # fmt: skip
    texts: dict[int, str] = {}
    for budget in budgets:
        cut = attempt.within(budget)
        tokens = len(cut.token_ids)
        if tokens not in texts:
            texts[tokens] = solver.text(cut.token_ids)
        yield _Reading(
            id=problem.id, seed=seed, budget=budget, tokens=tokens, loops=sum(cut.loops), finished=cut.finished,
            text=texts[tokens],
        )  # fmt: skip


def _items(readings: Sequence[_Reading], pass_at: Sequence[int]) -> list[Item]:
    by_id: dict[str, list[_Reading]] = {}
    for reading in readings:
        by_id.setdefault(reading.id, []).append(reading)
    return [_item(id, told, pass_at) for id, told in by_id.items()]


def _item(id: str, told: Sequence[_Reading], pass_at: Sequence[int]) -> Item:
    right, tokens = sum(reading.right == 1 for reading in told), sum(reading.tokens for reading in told)
    metrics = {
        RIGHT: right / len(told),
        "tokens": tokens / len(told),
        "hit_limit": sum(not reading.finished for reading in told) / len(told),
    }
    metrics |= {f"pass@{k}": pass_at_k(len(told), right, k) for k in pass_at}
    return Item(id=id, metrics=metrics, tokens=round(tokens / len(told)), loops=_loops(told))


def _scores(
    test: ReasoningTest, budget: int, depth: str, readings: Sequence[_Reading], items: Sequence[Item]
) -> list[Score]:  # fmt: skip
    def score(metric: str, value: float) -> Score:
        return Score(task=test.task_at(budget), depth=depth, metric=metric, value=value, stderr=None, items=len(items))

    found = averages(test.task_at(budget), depth, items, items[0].metrics)
    found.append(score("loops", _loops(readings) or 0.0))
    if len(test.seeds) > 1:
        right = {seed: [reading.right for reading in readings if reading.seed == seed] for seed in test.seeds}
        runs = {seed: sum(marks) / len(marks) for seed, marks in right.items()}
        found += [score(f"{RIGHT}/seed={seed}", value) for seed, value in runs.items()]
        found.append(score(f"{RIGHT}/deviation", over_seeds(list(runs.values())).deviation or 0.0))
    return found


def _loops(readings: Sequence[_Reading]) -> float | None:
    """For each token, on average; None of no token."""
    tokens = sum(reading.tokens for reading in readings)
    return sum(reading.loops for reading in readings) / tokens if tokens else None


def _settings(solver: Solver, problems: Sequence[Problem], test: ReasoningTest) -> dict[str, Any]:
    prompting = test.prompting
    examples = [[each.question, each.solution] for each in prompting.examples]
    asked = [[each.id, each.question, each.answer] for each in problems]
    return {
        "instruction": prompting.instruction, "chat": prompting.chat, "shots": len(prompting.examples),
        "examples": digest(json.dumps(examples)), "problems": digest(json.dumps(asked)),
        "budgets": list(test.budgets), "seeds": list(test.seeds), "pass_at": list(test.pass_at),
        "answer": "last box", **solver.settings,
    }  # fmt: skip


def _seed(seed: int, problem: Problem) -> int:
    """A seed of the problem's own, whatever else is asked."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{problem.id}".encode()).digest()[:8]) >> 1
