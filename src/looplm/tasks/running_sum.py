"""Sums of many digits, answered with the total after every term or at once; only the last total is marked."""

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from looplm.tasks.example import Example

MARK, END = "#", "<end>"
_DIGITS = "0123456789"
_BLANK, _EQUALS, _ALTERNATING = ".", "=", "~"


@dataclass(frozen=True, kw_only=True)
class RunningSum:
    """`3859....=` -> `3165#5<end>`: the total (modulo 10) after every term, a mark, the last total.

    Every character and the end mark is a token. A question has n digits, n uniform in `fewest`..`terms`, then blanks,
    so that a step stands `terms` + 1 places after its term whatever n is. `grade` reads what follows the last mark
    alone: the totals written before it are free, and each is one addition, while the answer without them is all of them
    at once. `written: false` leaves them out of the answer, which is what supervised training then learns.

    `alternating` adds and subtracts in turn, and asks with `~` instead of `=`: another task that shares the steps.
    `samples` is how many questions the train split has, so that supervision can be scarce; without it there is no end.

    A share `held_out` of the questions (chosen by a hash, whatever the other settings) is never in the "train" split
    and is all that "test" asks.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["running_sum"] = "running_sum"
    terms: int = 8
    fewest: int = 2
    modulus: int = 10
    written: bool = True
    alternating: bool = False
    samples: int | None = None
    held_out: float = 0.1
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        if not 2 <= self.fewest <= self.terms:
            raise ValueError(f"running_sum needs 2 <= fewest <= terms, got fewest {self.fewest}, terms {self.terms}")
        if not 2 <= self.modulus <= 10:
            raise ValueError(f"running_sum needs a modulus from 2 to 10, so that totals are digits, got {self.modulus}")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"running_sum needs samples of at least 1, or null, got {self.samples}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"running_sum needs held_out between 0 and 1, got {self.held_out}")

    def words(self) -> list[str]:
        """Every token of the task."""
        return [*_DIGITS, _BLANK, _EQUALS, _ALTERNATING, MARK, END]

    def example(self, seed: int) -> Example:
        """The question number `seed` of this split."""
        if self.samples is not None and self.split == "train":
            seed %= self.samples
        generator = random.Random(f"running_sum/{self.split}/{seed}")
        count = generator.randint(self.fewest, self.terms)
        while True:
            digits = [generator.randrange(10) for _ in range(count)]
            if self.is_held_out(digits) == (self.split == "test"):
                return self.question(digits)

    def question(self, digits: Sequence[int]) -> Example:
        """The question that adds up `digits`; its difficulty is their number."""
        signed = [-digit if self.alternating and place % 2 else digit for place, digit in enumerate(digits)]
        totals = "".join(str(total % self.modulus) for total in itertools.accumulate(signed))
        return Example(
            prompt="".join(map(str, digits)).ljust(self.terms, _BLANK)
            + (_ALTERNATING if self.alternating else _EQUALS),
            answer=f"{totals if self.written else ''}{MARK}{totals[-1]}{END}",
            difficulty=len(digits),
        )

    def is_held_out(self, digits: Sequence[int]) -> bool:
        """Whether the question belongs to the test split."""
        digest = hashlib.sha256("+".join(map(str, digits)).encode()).digest()
        return int.from_bytes(digest[:4], "big") < self.held_out * 2**32

    def grade(self, example: Example, text: str) -> float:
        """1.0 if the last total stands between the last mark of `text` and the end mark or the text's end, else 0.0."""
        _, mark, final = text.rpartition(MARK)
        return float(bool(mark) and final.partition(END)[0] == example.answer.rpartition(MARK)[2].removesuffix(END))
