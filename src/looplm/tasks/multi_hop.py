"""Three-hop questions over layered facts (Yao et al., arXiv 2505.17923; Ouro, Appendix B.3)."""

import random
import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from looplm.tasks.example import Example

LAYERS = 5
_ANSWER = "<ans>"


@dataclass(frozen=True, kw_only=True)
class MultiHop:
    """`<e3><r1><r0><r4><ans>` -> `<e71>`; the facts are the questions of one hop, `<e3><r1><ans>` -> `<e29>`.

    Entities stand in five layers of equal size. Each but the last layer's has every relation, to an entity of the next
    layer drawn uniformly by `world_seed`. All questions of `hops` hops are shuffled once: the first `fraction` of them
    are the "train" split's, whole, and the last `held_out` are all that "test" asks, so that every fraction has the
    same test and a larger one contains a smaller. "train" draws uniformly from its questions or, with probability
    `facts`, from all facts.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["multi_hop"] = "multi_hop"
    entities: int = 100
    relations: int = 5
    hops: int = 3
    fraction: float = 0.25
    facts: float = 0.25
    held_out: int = 500
    world_seed: int = 0
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        if self.entities < LAYERS or self.entities % LAYERS:
            raise ValueError(f"multi_hop needs entities in {LAYERS} equal layers, got {self.entities}")
        if self.relations < 1 or not 1 < self.hops < LAYERS:
            raise ValueError(
                f"multi_hop needs a relation and 2 to {LAYERS - 1} hops, got {self.relations} and {self.hops}"
            )
        if not 0 < self.facts < 1:
            raise ValueError(f"multi_hop needs facts between 0 and 1, got {self.facts}")
        if self.trained < 1 or self.held_out < 1 or self.trained + self.held_out > self.questions:
            raise ValueError(
                f"multi_hop has {self.questions} questions, of which fraction={self.fraction} and "
                f"held_out={self.held_out} must each take at least one, and not the same"
            )

    @property
    def questions(self) -> int:
        """How many questions of `hops` hops exist: entities / 5 x relations^hops for every layer that one starts in."""
        return (LAYERS - self.hops) * self.entities // LAYERS * self.relations**self.hops

    @property
    def trained(self) -> int:
        """How many of them the training split has."""
        return round(self.fraction * self.questions)

    def words(self) -> list[str]:
        """Every token of the task."""
        entities = [f"<e{entity}>" for entity in range(self.entities)]
        return [*entities, *(f"<r{relation}>" for relation in range(self.relations)), _ANSWER]

    def example(self, seed: int) -> Example:
        """The document of this split that `seed` draws; in the test split question number `seed`, round and round."""
        if self.split == "test":
            return self._numbered(int(self._order[-1 - seed % self.held_out]), self.hops)
        generator = random.Random(seed)
        if generator.random() < self.facts:
            return self._numbered(generator.randrange(len(self._targets) * self.relations), 1)
        return self._numbered(int(self._order[generator.randrange(self.trained)]), self.hops)

    def question(self, start: int, path: tuple[int, ...]) -> Example:
        """The question that starts at an entity and follows a path of relations, in order."""
        end = start
        for relation in path:
            end = int(self._targets[end, relation])
        steps = "".join(f"<r{relation}>" for relation in path)
        return Example(prompt=f"<e{start}>{steps}{_ANSWER}", answer=f"<e{end}>", difficulty=len(path))

    def grade(self, example: Example, text: str) -> float:
        """1.0 if the first entity named in `text` is the answer, else 0.0."""
        named = re.search(r"<e\d+>", text)
        return float(named is not None and named.group() == example.answer)

    def _numbered(self, number: int, hops: int) -> Example:
        """Of the questions of so many hops, in the order of their start and relations, one by its number."""
        path = []
        for _ in range(hops):
            number, relation = divmod(number, self.relations)
            path.append(relation)
        return self.question(number, tuple(path))

    @cached_property
    def _targets(self) -> np.ndarray:
        """The entity [entities outside the last layer, relations] that each leads to."""
        size = self.entities // LAYERS
        place = np.random.default_rng([self.world_seed, 0]).integers(size, size=((LAYERS - 1) * size, self.relations))
        return (np.arange(len(place))[:, None] // size + 1) * size + place

    @cached_property
    def _order(self) -> np.ndarray:
        """The numbers of all questions, shuffled."""
        return np.random.default_rng([self.world_seed, 1]).permutation(self.questions)
