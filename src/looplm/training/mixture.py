"""The batches of a run: text and task questions packed together, a pure function of (seed, step)."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from looplm.data.packing import IGNORED, Document, pack
from looplm.data.text import read_documents
from looplm.data.windows import TextWindows
from looplm.tasks import Example
from looplm.training.recipe import Data, TaskData, TextData

Batch = dict[str, Tensor]
_HELD_OUT_SEED = 10**9  # far from any training step's questions


class TextSource:
    """Windows of running text; `held_out` are windows of the part that training never sees."""

    def __init__(self, recipe: TextData, length: int, tokenizer: PreTrainedTokenizerFast) -> None:
        self.recipe = recipe
        documents = tokenizer(read_documents(recipe.path), add_special_tokens=False, verbose=False)["input_ids"]
        self.windows = TextWindows(documents, length, recipe.held_out)
        self.held_out = self.windows.held_out(recipe.held_out_rows)

    def train(self, seed: int, step: int) -> Batch:
        """The windows of a step."""
        return self.windows.train(self.recipe.rows, [seed, step])


class TaskSource:
    """Packed questions of a task; `held_out` are questions of the task's test split."""

    def __init__(self, recipe: TaskData, length: int, tokenizer: PreTrainedTokenizerFast) -> None:
        self.recipe = recipe
        self.length = length
        self.tokenizer = tokenizer
        test = replace(recipe.task, split="test")
        self.held_out = self._pack([test.example(_HELD_OUT_SEED + i) for i in range(recipe.held_out_questions)])

    def train(self, seed: int, step: int) -> Batch:
        """The fresh questions of a step."""
        first = (seed * 2**32 + step) * self.recipe.questions
        return self._pack([self.recipe.task.example(first + i) for i in range(self.recipe.questions)])

    def _pack(self, examples: list[Example]) -> Batch:
        prompts, answers = (
            self.tokenizer([getattr(example, part) for example in examples], add_special_tokens=False)["input_ids"]
            for part in ("prompt", "answer")
        )
        documents = [
            Document(tokens=prompt + answer, is_target=[False] * len(prompt) + [True] * len(answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return pack(documents, self.length, self.tokenizer.pad_token_id)


class Mixture:
    """The sources that a recipe names, one under another in a batch."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerFast) -> None:
        self.sources: dict[str, TextSource | TaskSource] = {}
        if data.text is not None:
            self.sources["text"] = TextSource(data.text, data.length, tokenizer)
        if data.compose is not None:
            self.sources["compose"] = TaskSource(data.compose, data.length, tokenizer)

    def train(self, seed: int, step: int) -> Batch:
        """The batch of a step: `input_ids`, `labels`, `position_ids` and `weights`, each [R, length].

        The loss is the sum over sources of weight x mean over the source's targets.
        """
        parts = [_weighted(source.train(seed, step), source.recipe.weight) for source in self.sources.values()]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def held_out(self) -> dict[str, Batch]:
        """The held-out batch of every source."""
        return {name: source.held_out for name, source in self.sources.items()}


def _weighted(batch: Batch, weight: float) -> Batch:
    valid = batch["labels"] != IGNORED
    return batch | {"weights": valid * (weight / valid.sum().clamp(min=1))}
