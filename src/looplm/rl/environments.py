"""Environments: where questions come from and how completions are marked, as recipes say it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from looplm.data.files import Record
from looplm.rl.questions import Question, QuestionFile, Split, asked, prompt_of, read_questions, text_of
from looplm.rl.reward_functions import (
    RESERVED,
    RewardFunction,
    Rewards,
    call_reward_function,
    load_reward_function,
    weighted_sums,
)
from looplm.tasks import Example, RunningSum, Task
from looplm.tasks.answers import BOX_INSTRUCTION, last_boxed, last_tagged
from looplm.tasks.math_answers import MathGrader

_FOR_RECIPES = {"extra": "forbid", "allow_inf_nan": False}
_TAG = "Reason step by step. Write the final answer, and it alone, between <answer> and </answer>."


class _Base:
    """What environments without a file, processes or counts of their own do."""

    def num_questions(self, split: Split) -> int | None:
        """How many questions a split has; None where there is no end of them."""
        return None

    def fingerprint(self) -> str:
        """A hash of what decides the questions beside the recipe; empty where nothing does."""
        return ""

    def drain_counts(self) -> dict[str, int]:
        """How many answers met which fate since the last call, for the log."""
        return {}

    def close(self) -> None:
        """End what runs beside this process."""


class _OfFile(_Base):
    """What environments whose questions are a file's do."""

    @cached_property
    def _file(self) -> QuestionFile:
        return self._read_file()

    def _read_file(self) -> QuestionFile:
        raise AssertionError("each says how it reads its file")

    def question(self, seed: int, split: Split) -> Question:
        """The question number `seed`, with what its reward needs as columns."""
        return self._file.question(seed, split)

    def num_questions(self, split: Split) -> int:
        """How many questions a split has."""
        return self._file.num_questions(split)

    def fingerprint(self) -> str:
        """A hash of the questions."""
        return self._file.fingerprint()


@dataclass(frozen=True, kw_only=True)
class TaskEnvironment(_Base):
    """One of looplm's tasks: its train split to learn from, its test split to be evaluated on, its grade as reward."""

    __pydantic_config__: ClassVar = _FOR_RECIPES

    kind: Literal["task"] = "task"
    task: Annotated[Task, Field(discriminator="kind")] = field(default_factory=RunningSum)

    @cached_property
    def _splits(self) -> dict[Split, Task]:
        return {"train": replace(self.task, split="train"), "test": replace(self.task, split="test")}

    def question(self, seed: int, split: Split) -> Question:
        """The task's question number `seed`, with its answer and difficulty as columns."""
        example = self._splits[split].example(seed)
        return Question(prompt=example.prompt, columns={"answer": example.answer, "difficulty": example.difficulty})

    def reward(
        self, questions: Sequence[Question], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> Rewards:
        """The task's grades."""
        return [self.task.grade(_example(question), text) for question, text in zip(questions, texts, strict=True)]


@dataclass(frozen=True, kw_only=True)
class MathEnvironment(_OfFile):
    r"""Problems of a .jsonl or .parquet file, a folder of them or "hub:owner/name"; the last box is marked, 1 or 0.

    A record has its `problem`, and either its `answer` or a worked `solution` whose last `\boxed{}` is the answer;
    records without one, or with null or blanks for it, are left out and counted. An answer that math-verify cannot read
    gives None, never a reward. The question is `instruction`, an empty line and the problem: as one user turn if
    `chat`, else as text. `workers` and `limit` (seconds an answer) are the grader's.
    """

    __pydantic_config__: ClassVar = _FOR_RECIPES

    kind: Literal["math"] = "math"
    path: str
    problem: str = "problem"
    answer: str | None = "answer"
    solution: str | None = None
    instruction: str = BOX_INSTRUCTION
    chat: bool = True
    held_out: float = 0.0
    seed: int = 0
    workers: int = 2
    limit: float = 5.0

    def __post_init__(self) -> None:
        _check_file(self.held_out, self.seed)
        if (self.answer is None) == (self.solution is None):
            raise ValueError("name one of answer and solution, and set the other to null")
        if self.workers < 1 or not self.limit > 0:
            raise ValueError(f"math needs workers of at least 1 and a limit above 0, got {self.workers}, {self.limit}")

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter()

    def _read_file(self) -> QuestionFile:
        needed = f"its records need '{self.problem}' and '{self.answer or self.solution}'"
        return QuestionFile(read_questions(self.path, self._read, needed), self.held_out, self.seed, self.path)

    @cached_property
    def _grader(self) -> MathGrader:
        return MathGrader(self.workers, self.limit)

    def reward(
        self, questions: Sequence[Question], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> Rewards:
        """1.0 where the last box means the same as the answer, 0.0 where not, None where the answer is unreadable."""
        golds = [question.columns["answer"] for question in questions]
        return self._grader.grade(golds, [last_boxed(text) for text in texts])

    def drain_counts(self) -> dict[str, int]:
        """The grader's counts, and `left_out`: records without an answer."""
        counts = {"left_out": self._counts.pop("left_out", 0)}
        return counts | (asdict(self._grader.drain()) if "_grader" in self.__dict__ else {})

    def close(self) -> None:
        """End the marking processes; the next reward starts others."""
        grader = self.__dict__.pop("_grader", None)
        if grader is not None:
            grader.close()

    def _read(self, record: Record) -> Question | None:
        gold = self._gold(record)
        if not gold:
            self._counts["left_out"] += 1
            return None
        text = f"{self.instruction}\n\n{text_of(record, self.problem)}"
        prompt = asked(text if self.chat else f"{text}\n\n", self.chat)
        return Question(prompt=prompt, columns={"answer": gold}, where=record.where)

    def _gold(self, record: Record) -> str | None:
        field = self.answer or self.solution or ""
        if record.values.get(field) is None:
            return None
        text = text_of(record, field)
        return text.strip() if self.answer is not None else last_boxed(text)


@dataclass(frozen=True, kw_only=True)
class GymEnvironment(_Base):
    """A data set of reasoning-gym by name, with its own settings in `config`; its `score_answer` is the reward.

    What is scored is the last box, the last `<answer>` tag, or the whole text; without box or tag the reward is 0.
    `size` questions exist, the first `held_out` of which are the test split; since they are drawn at random, a small
    data set may ask the same in both. An answer on which `score_answer` fails counts as 0 and as an error.
    """

    __pydantic_config__: ClassVar = _FOR_RECIPES

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    size: int = 10_000
    held_out: int = 500
    answer: Literal["box", "tag", "text"] = "box"
    chat: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.held_out < self.size or self.seed < 0:
            raise ValueError(
                f"reasoning_gym needs 0 < held_out < size and a seed from 0 on, got held_out {self.held_out}, "
                f"size {self.size}, seed {self.seed}"
            )
        if {"seed", "size"} & set(self.config):
            raise ValueError("set seed and size of the environment, not in its config")

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter()

    @cached_property
    def _dataset(self) -> Any:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ValueError("reasoning-gym is not installed; pip install looplm[rl]") from error
        try:
            return reasoning_gym.create_dataset(self.dataset, seed=self.seed, size=self.size, **self.config)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"reasoning-gym refuses '{self.dataset}' with {self.config}: {error}") from error

    def question(self, seed: int, split: Split) -> Question:
        """Question number `seed` of the split, round and round; its number in the data set is the column `number`."""
        number = seed % self.num_questions(split) + (self.held_out if split == "train" else 0)
        instruction = {"box": BOX_INSTRUCTION, "tag": _TAG, "text": ""}[self.answer]
        text = f"{self._dataset[number]['question']}\n\n{instruction}".strip()
        return Question(prompt=asked(text if self.chat else f"{text}\n\n", self.chat), columns={"number": number})

    def num_questions(self, split: Split) -> int:
        """`held_out` of the test split, and the others."""
        return self.held_out if split == "test" else self.size - self.held_out

    def reward(
        self, questions: Sequence[Question], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> Rewards:
        """The data set's scores."""
        numbers = [int(question.columns["number"]) for question in questions]
        entries = {number: self._dataset[number] for number in set(numbers)}
        read = {"box": last_boxed, "tag": last_tagged, "text": str.strip}[self.answer]
        return [self._score(read(text), entries[number]) for number, text in zip(numbers, texts, strict=True)]

    def drain_counts(self) -> dict[str, int]:
        """`errors`: answers on which `score_answer` failed; `unanswered`: texts without a box or tag."""
        return {name: self._counts.pop(name, 0) for name in ("errors", "unanswered")}

    def _score(self, answer: str | None, entry: dict[str, Any]) -> float:
        if answer is None:
            self._counts["unanswered"] += 1
            return 0.0
        try:
            return float(self._dataset.score_answer(answer, entry))
        except Exception:
            self._counts["errors"] += 1
            return 0.0


@dataclass(frozen=True, kw_only=True)
class FunctionEnvironment(_OfFile):
    """Prompts of a file and reward functions with TRL's signature, "package.module:function", summed by `weights`.

    Modules of the current folder are found, too.

    A record has a `prompt`, text or turns of role and content; its other fields (None where it lacks one) are given to
    the functions by name: `fn(prompts=..., completions=..., completion_ids=..., **columns) -> list[float | None]`, None
    where the function does not apply.
    """

    __pydantic_config__: ClassVar = _FOR_RECIPES

    kind: Literal["functions"] = "functions"
    path: str
    functions: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    prompt: str = "prompt"
    held_out: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_file(self.held_out, self.seed)
        if not self.functions:
            raise ValueError("functions: name at least one reward function, as package.module:function")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(f"{len(self.functions)} functions need as many weights, got {len(self.weights)}")

    def _read_file(self) -> QuestionFile:
        read = read_questions(self.path, self._read, f"its records need '{self.prompt}'")
        names = dict.fromkeys(name for question in read for name in question.columns)
        whole = (replace(each, columns={name: each.columns.get(name) for name in names}) for each in read)
        return QuestionFile(whole, self.held_out, self.seed, self.path)

    @cached_property
    def _functions(self) -> dict[str, RewardFunction]:
        return {name: load_reward_function(name) for name in self.functions}

    def reward(
        self, questions: Sequence[Question], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> Rewards:
        """The weighted sum of what the functions say."""
        told = [
            call_reward_function(self._functions[name], name, questions, texts, token_ids) for name in self.functions
        ]
        return weighted_sums(told, self.weights or [1.0] * len(told))

    def _read(self, record: Record) -> Question:
        columns = {name: value for name, value in record.values.items() if name != self.prompt}
        taken = [name for name in RESERVED if name in columns]
        if taken:
            raise ValueError(
                f"{record.where}: a field must not be called '{taken[0]}', as the functions' own inputs are"
            )
        return Question(prompt=prompt_of(record, self.prompt), columns=columns, where=record.where)


Environment = TaskEnvironment | MathEnvironment | GymEnvironment | FunctionEnvironment


def _example(question: Question) -> Example:
    prompt, columns = question.prompt, question.columns
    assert isinstance(prompt, str)
    return Example(prompt=prompt, answer=columns["answer"], difficulty=columns["difficulty"])


def _check_file(held_out: float, seed: int) -> None:
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is a share from 0 up to 1, got {held_out}")
    if seed < 0:
        raise ValueError(f"seed counts from 0 on, got {seed}")
