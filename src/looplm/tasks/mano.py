"""Mano: arithmetic modulo a prime on random expression trees, answered at once (PhysicsLM4; Ouro, Appendix B.2)."""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from looplm.tasks.example import Example

_OPERATIONS = ("+", "-", "*")
_BEGIN, _ANSWER = "<bos>", "<ans>"
_ATTEMPTS = 10_000


@dataclass(frozen=True, kw_only=True)
class Mano:
    """`<bos><len2><-><*><3><4><5><ans>` -> `<7>`: (3 * 4) - 5 in prefix order, modulo `modulus`.

    An expression of l operations is a value where l = 0, else an operation drawn uniformly, a left part with l1 ~
    U{0 … l - 1} operations and a right part with the others. "train" draws l ~ U{1 … `length`}; "test" asks
    l = `length` alone. Expressions whose hash falls into the share `held_out` are never in "train" and are all that
    "test" asks.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["mano"] = "mano"
    modulus: int = 23
    length: int = 10
    held_out: float = 0.05
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        if self.modulus < 2 or self.length < 1:
            raise ValueError(
                f"mano needs modulus of at least 2 and length of at least 1, got {self.modulus} and {self.length}"
            )
        if not 0 < self.held_out < 1:
            raise ValueError(f"mano needs held_out between 0 and 1, got {self.held_out}")

    def words(self) -> list[str]:
        """Every token of the task."""
        values = [f"<{value}>" for value in range(self.modulus)]
        lengths = [f"<len{length}>" for length in range(1, self.length + 1)]
        return [*values, *(f"<{operation}>" for operation in _OPERATIONS), *lengths, _BEGIN, _ANSWER]

    def example(self, seed: int) -> Example:
        """The expression number `seed` of this split.

        Raises:
            ValueError: if so few expressions exist that none of the drawn length is in this split.
        """
        generator = random.Random(f"mano/{self.modulus}/{self.length}/{self.split}/{seed}")
        length = self.length if self.split == "test" else generator.randint(1, self.length)
        for _ in range(_ATTEMPTS):
            tokens = list(self._draw(generator, length))
            if self.is_held_out(tokens) == (self.split == "test"):
                return self.question(tokens)
        raise ValueError(
            f"mano finds no expression of {length} operations in the {self.split} split; change held_out "
            f"(now {self.held_out}), or raise length"
        )

    def question(self, tokens: list[str]) -> Example:
        """The question of an expression in prefix order; its difficulty is the number of operations."""
        length = len(tokens) // 2
        text = "".join(f"<{token}>" for token in tokens)
        return Example(
            prompt=f"{_BEGIN}<len{length}>{text}{_ANSWER}", answer=f"<{self.value(tokens)}>", difficulty=length
        )

    def value(self, tokens: list[str]) -> int:
        """What an expression in prefix order comes to."""
        stack: list[int] = []
        for token in reversed(tokens):
            if token in _OPERATIONS:
                left, right = stack.pop(), stack.pop()
                stack.append(_apply(token, left, right) % self.modulus)
            else:
                stack.append(int(token))
        return stack.pop()

    def is_held_out(self, tokens: list[str]) -> bool:
        """Whether an expression belongs to the test split."""
        digest = hashlib.sha256(" ".join(tokens).encode()).digest()
        return int.from_bytes(digest[:4], "big") < self.held_out * 2**32

    def grade(self, example: Example, text: str) -> float:
        """1.0 if the first value in `text` is the answer, else 0.0."""
        named = re.search(r"<\d+>", text)
        return float(named is not None and named.group() == example.answer)

    def _draw(self, generator: random.Random, length: int) -> Iterator[str]:
        if length == 0:
            yield str(generator.randrange(self.modulus))
            return
        yield generator.choice(_OPERATIONS)
        left = generator.randrange(length)
        yield from self._draw(generator, left)
        yield from self._draw(generator, length - 1 - left)


def _apply(operation: str, left: int, right: int) -> int:
    if operation == "+":
        return left + right
    return left - right if operation == "-" else left * right
