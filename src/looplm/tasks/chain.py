"""Chains of hops written out: every token of the answer is a few hops from the one before it."""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from looplm.tasks.compose import Compose
from looplm.tasks.example import Example

_ATTEMPTS = 10_000


@dataclass(frozen=True, kw_only=True)
class Chain:
    """`<e3><r1><r0><r2><r2><ask>` -> `<e7><e4>`: the entities reached after every `stride` hops of a `Compose` world.

    A question has n x `stride` relations, n uniform in 1..`steps`, and n answers. A share `held_out` of the questions
    of at least three hops (chosen by a hash) never occurs in the "train" split; "test" asks such questions alone, of
    `steps` answers.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["chain"] = "chain"
    entities: int = 12
    relations: int = 3
    stride: int = 2
    steps: int = 4
    held_out: float = 0.2
    world_seed: int = 0
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        for name in ("entities", "relations", "stride", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"chain needs {name} of at least 1, got {getattr(self, name)}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"chain needs held_out between 0 and 1, got {self.held_out}")
        if self.stride * self.steps < 3:
            raise ValueError("chain has no test questions: they need stride x steps of at least 3")

    @cached_property
    def _world(self) -> Compose:
        return Compose(
            entities=self.entities, relations=self.relations, max_hops=self.stride * self.steps,
            held_out=self.held_out, world_seed=self.world_seed,
        )  # fmt: skip

    def words(self) -> list[str]:
        """Every word of the task; give each a token of its own."""
        return self._world.words()

    def example(self, seed: int) -> Example:
        """The question number `seed` of this split.

        Raises:
            ValueError: if the world is too small to have a question of the drawn length in this split.
        """
        generator = random.Random(f"chain/{self.world_seed}/{self.split}/{seed}")
        steps = self.steps if self.split == "test" else generator.randint(1, self.steps)
        for _ in range(_ATTEMPTS):
            start = generator.randrange(self.entities)
            path = tuple(generator.randrange(self.relations) for _ in range(steps * self.stride))
            if self._world.is_held_out(start, path) == (self.split == "test"):
                return self.question(start, path)
        raise ValueError(
            f"chain finds no question of {steps} answers in the {self.split} split of this small world; change "
            f"held_out (now {self.held_out}) or take more entities or relations"
        )

    def question(self, start: int, path: tuple[int, ...]) -> Example:
        """The question that starts at an entity and follows a path of relations; its difficulty is its answers."""
        ends = range(self.stride, len(path) + 1, self.stride)
        answer = "".join(self._world.question(start, path[:end]).answer for end in ends)
        return Example(prompt=self._world.question(start, path).prompt, answer=answer, difficulty=len(ends))

    def grade(self, example: Example, text: str) -> float:
        """1.0 if `text` begins with exactly the answer, else 0.0."""
        return float(text.startswith(example.answer))
