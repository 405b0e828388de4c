"""Capo: synthetic biographies to learn by heart (bioS(N) of PhysicsLM4, in symbols; Ouro, Appendix B.1)."""

import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from looplm.tasks.example import Example

NAMES = ("first", "middle", "last")
ATTRIBUTES = ("month", "day", "year", "city", "university", "major", "company", "gender")
_BEGIN = "<bos>"


@dataclass(frozen=True, kw_only=True)
class Capo:
    """`<bos>` -> `<first3><middle9><last41><month5><day0><year31><city8>…<gender1>`: one token a field, in this order.

    The world has `people` persons, fixed by `world_seed`. Full names are drawn without replacement, so that no two are
    alike; every attribute is drawn uniformly and by itself. Each field's number says how many values it has. "train"
    draws persons uniformly; "test" asks the same ones in order, for nothing is held out from what is to be remembered.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["capo"] = "capo"
    people: int = 1000
    first: int = 50
    middle: int = 50
    last: int = 100
    month: int = 12
    day: int = 28
    year: int = 50
    city: int = 50
    university: int = 50
    major: int = 25
    company: int = 50
    gender: int = 2
    world_seed: int = 0
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        for name in ("people", *NAMES, *ATTRIBUTES):
            if getattr(self, name) < 1:
                raise ValueError(f"capo needs {name} of at least 1, got {getattr(self, name)}")
        if self.people > self._count(NAMES):
            raise ValueError(
                f"capo has {self._count(NAMES)} full names for {self.people} people; lower people, or raise last"
            )

    @property
    def name_bits(self) -> float:
        """log2 N0: what one of the N0 = first x middle x last names tells."""
        return math.log2(self._count(NAMES))

    @property
    def attribute_bits(self) -> float:
        """log2 S0: what one person's attributes tell."""
        return math.log2(self._count(ATTRIBUTES))

    def words(self) -> list[str]:
        """Every token of the task."""
        fields = [f"<{name}{value}>" for name in (*NAMES, *ATTRIBUTES) for value in range(getattr(self, name))]
        return [*fields, _BEGIN]

    def example(self, seed: int) -> Example:
        """A person drawn by `seed`; in the test split person number `seed`, counted round and round."""
        if self.split == "test":
            return self.person(seed % self.people)
        return self.person(random.Random(seed).randrange(self.people))

    def person(self, number: int) -> Example:
        """The biography of a person by its number."""
        return Example(prompt=_BEGIN, answer=self._biographies[number], difficulty=1)

    def grade(self, example: Example, text: str) -> float:
        """1.0 if `text` begins with exactly the biography, else 0.0."""
        return float(text.startswith(example.answer))

    @cached_property
    def _biographies(self) -> list[str]:
        generator = random.Random(f"capo/{self.world_seed}")
        found = []
        for name in generator.sample(range(self._count(NAMES)), self.people):
            rest, last = divmod(name, self.last)
            values = [*divmod(rest, self.middle), last]
            values += [generator.randrange(getattr(self, attribute)) for attribute in ATTRIBUTES]
            fields = zip((*NAMES, *ATTRIBUTES), values, strict=True)
            found.append("".join(f"<{field}{value}>" for field, value in fields))
        return found

    def _count(self, fields: tuple[str, ...]) -> int:
        return math.prod(getattr(self, field) for field in fields)
