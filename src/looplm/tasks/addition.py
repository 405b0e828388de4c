"""Addition of numbers of equal length, the sum written backwards (STARS, arXiv 2605.26733)."""

import hashlib
import random
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from looplm.tasks.example import Example

END = "<end>"
_SYMBOLS = (*"0123456789", "+", "=", " ")


@dataclass(frozen=True, kw_only=True)
class Addition:
    """`1234+5678=` -> ` 2196<end>`: a space, the reversed sum, an end mark; every character is a token of its own.

    The "train" split has `samples` questions, drawn with repetition; pairs whose hash falls into the share `held_out`
    are never among them and are all that "test" asks.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["addition"] = "addition"
    digits: int = 4
    samples: int = 100_000
    held_out: float = 0.05
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        if self.digits < 1 or self.samples < 1:
            raise ValueError(f"addition needs digits and samples of at least 1, got {self.digits} and {self.samples}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"addition needs held_out between 0 and 1, got {self.held_out}")

    def words(self) -> list[str]:
        """Every token of the task."""
        return [*_SYMBOLS, END]

    def example(self, seed: int) -> Example:
        """The question of this split that `seed` draws; in the training split one of `samples`, whatever the stride."""
        number = random.Random(seed).randrange(self.samples) if self.split == "train" else seed
        generator = random.Random(f"addition/{self.digits}/{self.split}/{number}")
        while True:
            pair = (self._draw(generator), self._draw(generator))
            if self.is_held_out(*pair) == (self.split == "test"):
                return self.question(*pair)

    def question(self, a: int, b: int) -> Example:
        """The question a + b; its difficulty is the longest run of carries."""
        return Example(prompt=f"{a}+{b}=", answer=f" {str(a + b)[::-1]}{END}", difficulty=_longest_carry(a, b))

    def is_held_out(self, a: int, b: int) -> bool:
        """Whether the pair belongs to the test split."""
        digest = hashlib.sha256(f"{a}+{b}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < self.held_out * 2**32

    def grade(self, example: Example, text: str) -> float:
        """1.0 if `text` begins with exactly the answer, else 0.0."""
        written = re.match(r" \d+<end>", text)
        return float(written is not None and written.group() == example.answer)

    def _draw(self, generator: random.Random) -> int:
        return generator.randint(10 ** (self.digits - 1), 10**self.digits - 1)


def _longest_carry(a: int, b: int) -> int:
    longest = run = carry = 0
    while a or b:
        carry = int(a % 10 + b % 10 + carry > 9)
        run = run + 1 if carry else 0
        longest = max(longest, run)
        a, b = a // 10, b // 10
    return longest
