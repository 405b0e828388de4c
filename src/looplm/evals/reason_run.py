"""A model on problems that it reasons about: asked by the papers' prompt at every depth, marked by its last box."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from looplm.engine import SamplingParams
from looplm.evals.marking import boxed_letter, boxed_math
from looplm.evals.problems import Fields, read_problems, read_worked
from looplm.evals.progress import Advance, unheard
from looplm.evals.prompts import Prompting
from looplm.evals.reasoning import ReasoningTest, k_shot_saturation, solve
from looplm.evals.results import Evaluation
from looplm.evals.solvers import engine_solver
from looplm.evals.subject import ModelSettings, open_subject
from looplm.tasks.math_answers import MathGrader


@dataclass(frozen=True, kw_only=True)
class ReasonSettings:
    """Which problems, and how they are put and sampled.

    problems: a file, or the name of a benchmark, whose records may lie in `data` · name: of the task in results
    shots: how many solved examples of the file `worked` come before a problem, the first; several are compared
    fields: of records in both files · chat: as turns · seeds: so many samples of each problem · stops: strings that end
    an answer · budgets, pass_at: as `ReasoningTest` has them · rows: answers at once.
    """

    problems: str
    name: str
    data: Path | None = None
    fields: Fields = field(default_factory=Fields)
    limit: int | None = None
    shots: tuple[int, ...] = (0,)
    worked: Path | None = None
    chat: bool = False
    budgets: tuple[int, ...] = (2048,)
    seeds: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    pass_at: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    rows: int = 8

    def __post_init__(self) -> None:
        if not self.shots or min(self.shots) < 0 or len(set(self.shots)) < len(self.shots):
            raise ValueError(f"shots={self.shots} takes numbers from 0 on, none twice")
        if max(self.shots) and self.worked is None:
            raise ValueError(f"{max(self.shots)} shots need a file of solved examples; name it by worked")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1; leave it out for all problems")


def run_reasoning(model: ModelSettings, asked: ReasonSettings, advance: Advance = unheard) -> Evaluation:
    """`solve` of a checkpoint, or `k_shot_saturation` where several numbers of shots are asked for.

    Raises:
        ValueError: for problems or examples that cannot be read, a model or depth that cannot be, turns without a chat
            template, or several greedy samples.
    """
    found = read_problems(asked.problems, asked.data, asked.limit, asked.fields)
    worked = () if asked.worked is None else tuple(read_worked(asked.worked, max(asked.shots), asked.fields))
    longest = Prompting(chat=asked.chat, examples=worked)
    test = ReasoningTest(
        task=asked.name, budgets=asked.budgets, seeds=tuple(range(asked.seeds)), pass_at=asked.pass_at,
        prompting=longest,
    )  # fmt: skip
    subject = open_subject(model)
    sampling = SamplingParams(temperature=asked.temperature, top_p=asked.top_p, stop=asked.stops)
    prompts = [longest.ask(problem.question) for problem in found.problems]
    solver = engine_solver(subject, prompts, sampling, max(asked.budgets), rows=asked.rows, advance=advance)
    settings = {"source": found.source, "limit": asked.limit}
    with ExitStack() as stack:
        mark = boxed_letter if found.lettered else boxed_math(stack.enter_context(MathGrader()))
        if len(asked.shots) == 1:
            done = solve(solver, found.problems, test, mark, subject.depths, settings)
        else:
            done = k_shot_saturation(
                solver, found.problems, test, mark, worked, subject.depths, asked.shots, settings
            )  # fmt: skip
    return subject.result(done)
