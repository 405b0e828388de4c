"""How written answers are marked: the last box, by what it means or by its letter."""

import re
from collections.abc import Callable, Sequence

from looplm.tasks.answers import fully_normalised, last_boxed, unwrapped
from looplm.tasks.math_answers import MathGrader

Marks = Sequence[float | None]
Marker = Callable[[Sequence[str], Sequence[str]], Marks]  # golds and texts; 1.0, 0.0, or None where no mark is fair
_LETTER = re.compile(r"\(?([A-Za-z])(?!(?:(?:\W|and|or)+[A-Z])+\W*$)(?:[).:,].*)?", re.DOTALL)  # no second one


def boxed_math(grader: MathGrader) -> Marker:
    """The last box means the same as the gold (RLTT's four comparisons); None where the gold cannot be read."""

    def mark(golds: Sequence[str], texts: Sequence[str]) -> Marks:
        return grader.grade(golds, [last_boxed(text) for text in texts])

    return mark


def boxed_letter(golds: Sequence[str], texts: Sequence[str]) -> Marks:
    r"""The last box names the gold's letter, of a choice, and no other: `B`, `(b)`, `\text{B}`, `B. Paris`.

    Raises:
        ValueError: for a gold that is no letter.
    """
    odd = next((gold for gold in golds if _letter(gold) is None), None)
    if odd is not None:
        raise ValueError(f"the answer {odd!r} is no letter of a choice, such as 'B'; mark it as mathematics")
    return [float(_letter(last_boxed(text) or "") == _letter(gold)) for gold, text in zip(golds, texts, strict=True)]


def _letter(answer: str) -> str | None:
    found = _LETTER.fullmatch(fully_normalised(unwrapped(answer)))
    return found[1].upper() if found else None
