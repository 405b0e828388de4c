"""TRL's reward functions called by us, and our environments as TRL's reward functions and data sets."""

import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol

from looplm.rl.questions import Message, Question, Split

Rewards = list[float | None]
RewardFunction = Callable[..., Sequence[float | None]]
RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")
_MOST = 1e100  # of a reward, whose square is still a number


class Asks(Protocol):
    """What every environment can do; `seed` is any whole number from 0 on, and a reward of None applies to nothing."""

    def question(self, seed: int, split: Split) -> Question:
        """The question number `seed` of a split."""
        ...

    def reward(
        self, questions: Sequence[Question], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> Rewards:
        """The reward of every completion, None where it cannot be marked."""
        ...


def load_reward_function(name: str) -> RewardFunction:
    """The function that "package.module:function" names, of a module of the current folder, too.

    Raises:
        ValueError: if it cannot be imported, whatever its module raises, or is no plain function.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute) or module.startswith("."):
        raise ValueError(f"'{name}' names no reward function; write package.module:function")
    with _in_one_line(name, "cannot be imported"), _from_here():
        found = getattr(importlib.import_module(module), attribute)
    if not callable(found) or inspect.isclass(found) or inspect.iscoroutinefunction(found):
        raise ValueError(f"'{name}' is no plain function")
    return found


def call_reward_function(
    function: RewardFunction, name: str, questions: Sequence[Question], texts: Sequence[str],
    token_ids: Sequence[Sequence[int]],
) -> Rewards:  # fmt: skip
    """What a reward function with TRL's signature says of every completion; NaN is None, as TRL has it.

    Completions of chats are given as lists of one assistant turn. Columns are those of the first question, as in TRL.

    Raises:
        ValueError: if it raises anything, or returns what is no list of numbers, another number of them, or one beyond
            1e100, whose square no float holds.
    """
    if not questions:
        return []
    columns = {key: [question.columns[key] for question in questions] for key in questions[0].columns}
    with _in_one_line(name, "failed"):
        found = function(
            prompts=[question.prompt for question in questions],
            completions=[_completion(question, text) for question, text in zip(questions, texts, strict=True)],
            completion_ids=[list(ids) for ids in token_ids],
            **columns,
        )
    with _in_one_line(name, "returned no list of numbers"):
        if isinstance(found, Mapping | Set):
            raise TypeError(f"a {type(found).__name__} is in no order of completions")
        rewards = [None if reward is None or math.isnan(reward) else float(reward) for reward in found]
    if len(rewards) != len(questions):
        raise ValueError(f"the reward function '{name}' returned {len(rewards)} rewards for {len(questions)} answers")
    for reward in rewards:
        if reward is not None and abs(reward) > _MOST:
            raise ValueError(f"the reward function '{name}' returned {reward}; keep rewards within {_MOST:g}")
    return rewards


def weighted_sums(rewards: Sequence[Rewards], weights: Sequence[float]) -> Rewards:
    """The weighted sum over functions [functions][N] of those that apply; None where none does."""
    sums: Rewards = []
    for column in zip(*rewards, strict=True):
        told = [weight * reward for weight, reward in zip(weights, column, strict=True) if reward is not None]
        sums.append(math.fsum(told) if told else None)
    return sums


def as_reward_function(environment: Asks, name: str = "looplm") -> RewardFunction:
    """A reward function for TRL's trainers that marks completions of the questions of `as_dataset(environment)`."""

    def reward(
        prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> Rewards:  # fmt: skip
        lists = {key: values for key, values in columns.items() if isinstance(values, list)}
        questions = [
            Question(prompt=prompt, columns={key: values[row] for key, values in lists.items()})
            for row, prompt in enumerate(prompts)
        ]
        texts = [done if isinstance(done, str) else done[-1]["content"] for done in completions]
        return environment.reward(questions, texts, completion_ids or [[]] * len(questions))

    reward.__name__ = name
    return reward


def as_dataset(environment: Asks, count: int, split: Split = "train", first: int = 0) -> Any:
    """`count` questions as a `datasets.Dataset` with the columns `prompt` and what rewards need, for TRL's trainers.

    Raises:
        ValueError: if `datasets` is not installed.
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise ValueError(
            "TRL's trainers read data with `datasets`, which is not installed; pip install datasets"
        ) from error
    questions = [environment.question(seed, split) for seed in range(first, first + count)]
    return Dataset.from_list([{"prompt": question.prompt, **question.columns} for question in questions])


@contextmanager
def _in_one_line(name: str, what: str) -> Generator[None]:
    """Inside, whatever somebody's reward function raises says which one it was, and where in its own code."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
        theirs = [frame for frame in theirs if not frame.filename.startswith("<")]
        place = f" ({theirs[0].filename}:{theirs[0].lineno})" if theirs else ""
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the reward function '{name}' {what}: {said}{place}") from error


@contextmanager
def _from_here() -> Generator[None]:
    """Inside, modules of the current folder can be imported, as under `python -m`, however looplm was started."""
    before, here = list(sys.path), os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path[:] = [place for place in sys.path if place != here or place in before]


def _completion(question: Question, text: str) -> str | list[Message]:
    return text if isinstance(question.prompt, str) else [{"role": "assistant", "content": text}]
