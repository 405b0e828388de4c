"""One step's experience: questions drawn, completions sampled, marked, and compared within their groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from looplm.data.chat import prompt_ids
from looplm.rl.advantages import is_dead
from looplm.rl.batches import Scored
from looplm.rl.environments import Environment
from looplm.rl.questions import Question
from looplm.rl.recipe import RLRecipe
from looplm.rl.rollouts import Rollout, RolloutSource
from looplm.training.distribution import World
from looplm.training.loader import row_seed, share

_TRIES = 1000  # questions that may be too long for `max_prompt` in a row
_ELSEWHERE = 2**31 - 1  # from a question's number to another's; prime, so that its multiples reach all of any file


@dataclass(frozen=True, kw_only=True)
class Group:
    """The completions of one prompt with their rewards, and the price of their loops already taken off `rewards`.

    marks: what the environment gave; None is neither right nor wrong (the answer on file cannot be read).
    """

    question: Question
    rollouts: list[Rollout]
    marks: list[float | None]
    rewards: list[float]

    @property
    def dead(self) -> bool:
        """Whether nothing can be learnt from it."""
        return bool(is_dead(torch.tensor([self.rewards], dtype=torch.float64)))

    @property
    def unmarked(self) -> bool:
        """Whether a completion could not be marked, so that the others have nothing to be compared with."""
        return any(mark is None for mark in self.marks)


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What a step learns from on this process: whole groups, their completions scored, and counts for the log."""

    groups: list[Group]
    scored: list[list[Scored]]
    counts: dict[str, float]


class Collector:
    """Draws questions by step and place alone, so that a resumed run and any number of processes see the same.

    Step by step the training split is gone through in its own order; others than the next ones are asked only in place
    of prompts that are too long or, where they are resampled, of dead groups.
    """

    def __init__(
        self, recipe: RLRecipe, environment: Environment, tokenizer: PreTrainedTokenizerBase, source: RolloutSource,
        world: World,
    ) -> None:  # fmt: skip
        self.recipe, self.environment, self.tokenizer = recipe, environment, tokenizer
        self.source, self.world = source, world
        self.places = own_places(recipe.sampling.prompts, recipe.minibatches, world)
        rules = recipe.advantages
        self.attempts = 1 + (rules.attempts if rules.dead == "resample" else 0)

    def check(self) -> None:
        """Fail now for what the first step or the first evaluation would: no question, no function, no grader."""
        for split in ("train", "test"):
            prompt_tokens(self.tokenizer, self.environment.question(0, split))
        self.environment.reward([], [], [])

    def collect(self, step: int) -> Experience:
        """This process's part of the step's groups.

        Raises:
            ValueError: on every process, if questions or rewards fail on any.
        """
        groups, counts = self.world.each(lambda: self._groups(step))
        return Experience(groups=groups, scored=self._scored(groups), counts=counts)

    def _groups(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The groups of this process's places, with counts."""
        groups: dict[int, Group] = {}
        too_long = replaced = 0
        for attempt in range(self.attempts):
            missing = [
                place for place in self.places if place not in groups or groups[place].dead or groups[place].unmarked
            ]
            replaced += len(missing) if attempt else 0
            drawn = [self._question(step, place, attempt) for place in missing]
            too_long += sum(skipped for _, _, skipped in drawn)
            if missing:
                groups |= dict(zip(missing, self._sampled(step, missing, attempt, drawn), strict=True))
        found = [groups[place] for place in self.places]
        counts = {
            "too_long_prompts": float(too_long), "resampled_groups": float(replaced),
            "unmarked_groups": float(sum(group.unmarked for group in found)),
        }  # fmt: skip
        return found, counts

    def _question(self, step: int, place: int, attempt: int) -> tuple[Question, list[int], int]:
        """A question that fits, its tokens, and how many were too long."""
        first = step * self.recipe.sampling.prompts + place
        for skipped in range(_TRIES):
            elsewhere = attempt + skipped * self.attempts
            question = self.environment.question(first + elsewhere * _ELSEWHERE, "train")
            tokens = prompt_tokens(self.tokenizer, question)
            if len(tokens) <= self.recipe.sampling.max_prompt:
                return question, tokens, skipped
        raise ValueError(
            f"{_TRIES} questions in a row are longer than sampling.max_prompt={self.recipe.sampling.max_prompt} tokens"
        )

    def _sampled(
        self, step: int, places: Sequence[int], attempt: int, drawn: Sequence[tuple[Question, list[int], int]]
    ) -> list[Group]:  # fmt: skip
        size = self.recipe.sampling.group
        seeds = [row_seed(self.recipe.seed, step, attempt * self.recipe.sampling.prompts + place) for place in places]
        sampled = self.source.sample([tokens for _, tokens, _ in drawn], seeds, size)
        questions = [question for question, _, _ in drawn for _ in range(size)]
        rollouts = [rollout for group in sampled for rollout in group]
        marks = self.environment.reward(
            questions, [rollout.text for rollout in rollouts], [rollout.token_ids for rollout in rollouts]
        )
        price = self.recipe.loop_price
        rewards = [
            (0.0 if mark is None else mark) - price * mean_loops(rollout)
            for mark, rollout in zip(marks, rollouts, strict=True)
        ]
        return [
            Group(
                question=question, rollouts=sampled[index], marks=list(marks[index * size : (index + 1) * size]),
                rewards=rewards[index * size : (index + 1) * size],
            )
            for index, (question, _, _) in enumerate(drawn)
        ]  # fmt: skip

    def _scored(self, groups: Sequence[Group]) -> list[list[Scored]]:
        """Every completion with its advantage among the rewards of all processes, and whether it is to count."""
        sampling = self.recipe.sampling
        rewards = torch.zeros(sampling.prompts, sampling.group, dtype=torch.float64)
        for place, group in zip(self.places, groups, strict=True):
            rewards[place] = torch.tensor(group.rewards, dtype=torch.float64)
        advantages = self.recipe.advantages.of(self.world.sum(rewards).cpu())[self.places]
        return [
            [
                Scored(rollout=rollout, advantage=value, counts=self._counts(group, rollout))
                for rollout, value in zip(group.rollouts, values, strict=True)
            ]
            for group, values in zip(groups, advantages.tolist(), strict=True)
        ]

    def _counts(self, group: Group, rollout: Rollout) -> bool:
        dropped = group.unmarked or (group.dead and self.recipe.advantages.dead != "keep")
        return not dropped and (rollout.finished or not self.recipe.mask_truncated)


def own_places(prompts: int, minibatches: int, world: World) -> list[int]:
    """Which of a step's groups this process has: of every minibatch its share, so that each is the same on any number.

    Raises:
        ValueError: where minibatches have no equal share for every process.
    """
    together = minibatches * world.size
    if minibatches > 1 and prompts % together:
        raise ValueError(
            f"sampling.prompts={prompts} cannot be cut into minibatches={minibatches} on {world.size} processes; take "
            f"a multiple of {together} prompts, or fewer minibatches or processes"
        )
    size = prompts // minibatches
    spans = [range(first, first + size) for first in range(0, prompts, size)]
    return [place for span in spans for place in share(span, world.rank, world.size)]


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    """A question's token ids: text as it is, messages through the tokenizer's chat template.

    Raises:
        ValueError: if the template refuses the messages, or the tokenizer the text; or if no token comes of it.
    """
    try:
        tokens = prompt_ids(tokenizer, question.prompt)
    except ValueError as error:
        raise ValueError(f"{question.where or repr(question.prompt)} cannot be asked: {error}") from error
    if not tokens:
        raise ValueError(f"{question.where or repr(question.prompt)} cannot be asked: its prompt has no token")
    return tokens


def mean_loops(rollout: Rollout) -> float:
    """Loops a token of the completion; the prompt's depth where there is none."""
    return sum(rollout.loops) / len(rollout.loops) if rollout.loops else float(rollout.max_loops)
