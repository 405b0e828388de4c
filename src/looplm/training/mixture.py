"""The batches of a run: text and task questions packed together, a pure function of (seed, step)."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from looplm.data.packing import IGNORED, Document, pack
from looplm.data.text import read_documents
from looplm.data.windows import TextWindows
from looplm.tasks import Compose, Example
from looplm.training.recipe import Data, TaskData, TextData

Batch = dict[str, Tensor]
_HELD_OUT_SEED = 10**9  # far from any training step's questions


class TextSource:
    """Windows of running text."""

    def __init__(self, recipe: TextData, length: int, tokenizer: PreTrainedTokenizerFast) -> None:
        self.recipe = recipe
        documents = tokenizer(read_documents(recipe.path), add_special_tokens=False, verbose=False)["input_ids"]
        self.windows = TextWindows(documents, length, recipe.held_out)

    def train(self, seed: int, step: int) -> Batch:
        return self.windows.train(self.recipe.rows, [seed, step])

    def held_out(self) -> Batch:
        return self.windows.held_out(self.recipe.held_out_rows)


class TaskSource:
    """Packed questions of a task; held-out questions are the task's test split."""

    def __init__(self, recipe: TaskData, length: int, tokenizer: PreTrainedTokenizerFast) -> None:
        self.recipe = recipe
        self.length = length
        self.tokenizer = tokenizer

    def train(self, seed: int, step: int) -> Batch:
        first = (seed * 2**32 + step) * self.recipe.questions
        return self._pack([self.recipe.task.example(first + i) for i in range(self.recipe.questions)])

    def held_out(self) -> Batch:
        task = test_split(self.recipe.task)
        return self._pack([task.example(_HELD_OUT_SEED + i) for i in range(self.recipe.held_out_questions)])

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
        named = {"text": (TextSource, data.text), "compose": (TaskSource, data.compose)}
        self.sources = {
            name: source(recipe, data.length, tokenizer)
            for name, (source, recipe) in named.items()
            if recipe is not None
        }

    def train(self, seed: int, step: int) -> Batch:
        """The batch of a step: `input_ids`, `labels`, `position_ids` and `weights`, each [R, length].

        The loss is the sum over sources of weight x mean over the source's targets.
        """
        parts = [_weighted(source.train(seed, step), source.recipe.weight) for source in self.sources.values()]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def held_out(self) -> dict[str, Batch]:
        """The held-out batch of every source."""
        return {name: source.held_out() for name, source in self.sources.items()}


def _weighted(batch: Batch, weight: float) -> Batch:
    valid = batch["labels"] != IGNORED
    return batch | {"weights": valid * (weight / valid.sum().clamp(min=1))}


def test_split(task: Compose) -> Compose:
    """The same world, asked about what training left out."""
    values = {name: getattr(task, name) for name in ("entities", "relations", "max_hops", "held_out", "world_seed")}
    return Compose(**values, split="test")
