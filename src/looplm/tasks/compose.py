"""k-hop composition of random permutations: each hop needs one more step of thought (after arXiv 2604.07822)."""

import hashlib
import random
import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from looplm.tasks.example import Example

_ASK = "<ask>"
_ATTEMPTS = 10_000


@dataclass(frozen=True, kw_only=True)
class Compose:
    """A world in which every relation is a random permutation of the entities, fixed by `world_seed`.

    A question names an entity and `k` relations, k uniform in 1..`max_hops`; the answer is the entity reached:
    `<e3><r1><r0><ask>` -> `<e7>`. Questions of up to two hops are the facts that a learner must see. Of the longer
    ones a share `held_out` (chosen by a hash) never occurs in the "train" split and is all that "test" asks.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["compose"] = "compose"
    entities: int = 12
    relations: int = 3
    max_hops: int = 4
    held_out: float = 0.1
    world_seed: int = 0
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        for name in ("entities", "relations", "max_hops"):
            if getattr(self, name) < 1:
                raise ValueError(f"compose needs {name} of at least 1, got {getattr(self, name)}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"compose needs held_out in [0, 1), got {self.held_out}")
        if self.split == "test" and (self.held_out == 0 or self.max_hops < 3):
            raise ValueError("compose has no test questions: they need held_out above 0 and max_hops of at least 3")

    @cached_property
    def _maps(self) -> list[list[int]]:
        generator = random.Random(self.world_seed)
        return [generator.sample(range(self.entities), self.entities) for _ in range(self.relations)]

    def words(self) -> list[str]:
        """Every word of the task; give each a token of its own."""
        entities = [f"<e{entity}>" for entity in range(self.entities)]
        return [*entities, *(f"<r{relation}>" for relation in range(self.relations)), _ASK]

    def example(self, seed: int, hops: int | None = None) -> Example:
        """The question number `seed` of this split; hop counts are equally likely, or `hops`, beyond `max_hops` too.

        Raises:
            ValueError: if this split has no question of so many hops, or the world is too small to have one.
        """
        generator = random.Random(f"{self.world_seed}/{self.split}/{seed}")
        fewest = 3 if self.split == "test" else 1
        if hops is None:
            hops = generator.randint(fewest, self.max_hops)
        elif hops < fewest:
            raise ValueError(f"compose has no {self.split} questions of hops={hops}; ask at least {fewest}")
        for _ in range(_ATTEMPTS):
            start = generator.randrange(self.entities)
            path = tuple(generator.randrange(self.relations) for _ in range(hops))
            if self.is_held_out(start, path) == (self.split == "test"):
                return self.question(start, path)
        raise ValueError(
            f"compose finds no {hops}-hop question of the {self.split} split in this small world; change held_out "
            f"(now {self.held_out}) or take more entities or relations"
        )

    def question(self, start: int, path: tuple[int, ...]) -> Example:
        """The question that starts at an entity and follows a path of relations, in order."""
        end = start
        for relation in path:
            end = self._maps[relation][end]
        steps = "".join(f"<r{relation}>" for relation in path)
        return Example(prompt=f"<e{start}>{steps}{_ASK}", answer=f"<e{end}>", difficulty=len(path))

    def is_held_out(self, start: int, path: tuple[int, ...]) -> bool:
        """Whether a question belongs to the test split."""
        if len(path) < 3:
            return False
        digest = hashlib.sha256(f"{self.world_seed}/{start}/{path}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < self.held_out * 2**32

    def grade(self, example: Example, text: str) -> float:
        """1.0 if the first entity named in `text` is the answer, else 0.0."""
        named = re.search(r"<e\d+>", text)
        return float(named is not None and named.group() == example.answer)
