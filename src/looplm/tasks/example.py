"""A question with its answer."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Example:
    """`prompt` is what the model reads, `answer` what it should write; `difficulty` orders questions of one task."""

    prompt: str
    answer: str
    difficulty: int
