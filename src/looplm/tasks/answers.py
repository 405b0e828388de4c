"""The one reader of written answers, for training and evaluation: where the answer stands, and how it is spelt."""

import re
from fractions import Fraction

BOX_INSTRUCTION = r"Reason step by step. Write the final answer inside \boxed{} and stop right after it."

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace after a backslash is a sign, not a brace
_UNBRACED = re.compile(r"[^\s$]+")
_TOLERANCE = Fraction(1, 10**6)
_LONGEST_NUMBER = 100

_LIGHT = [
    (re.compile(r"(?<!\\)\\(?:[!,;: ]|q?quad(?![a-zA-Z]))|~"), ""),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])"), ""),
    (re.compile(r"\\?[%$]|(?<!\\)\\[()\[\]]"), ""),
    (re.compile(r"\{,\}"), ","),
]
_WRAPPERS = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*"
_WRAPPED = (re.compile(rf"{_WRAPPERS}\{{([^{{}}]*)\}}"), r"\1")
_FULL = [
    (re.compile(rf"(?<=\S)\s*{_WRAPPERS}\{{[^{{}}]*\}}(?:\^\{{?\d\}}?)?$"), ""),  # a unit
    _WRAPPED,
    (
        re.compile(r"(?<=[\d}])\s+(?!(?:hundred|thousand|[mbt]r?illion|dozen)s?$)[a-zA-Z]{3,}$"),
        "",
    ),  # one in plain words
    (re.compile(r"\s+"), ""),
    (re.compile(r"^[a-zA-Z]=(?=.)"), ""),
    (re.compile(r"\\frac(?!\{)(\d)(\d|\{)"), r"\\frac{\1}\2"),
    (re.compile(r"(\\frac\{[^{}]*\})(\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"^([+-]?)(\d+)/(\d+)$"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<!\d)\.(?=\d)"), "0."),
    (re.compile(r"(\d\.(?:\d*[1-9])?)0+(?!\d)"), r"\1"),
    (re.compile(r"(?<=\d)\.(?!\d)"), ""),
]
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
_RATIO = re.compile(r"([+-]?)\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` of `text` holds; of boxes in each other, the one that opens last.

    Without braces (`\boxed 5`) it is what follows up to a space or a dollar sign. None if there is no box, or the last
    one is not closed.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    if not rest.startswith("{"):
        word = _UNBRACED.match(rest)
        return (word.group().rstrip(".,;:") or None) if word else None
    depth = 0
    for brace in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0 and brace.group() == "}":
            return rest[1 : brace.start()].strip()
    return None


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """What stands between the last `<answer>` of `text` and the `</answer>` after it; None without both."""
    _, opened, rest = text.rpartition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside.strip() if opened and closed else None


def lightly_normalised(answer: str) -> str:
    """`answer` without what only sets its type: spacing, sizes of brackets and fractions, math signs, %, degrees."""
    return _rewritten(answer, _LIGHT).strip().rstrip(".").rstrip()


def fully_normalised(answer: str) -> str:
    r"""The same without units, `\text`, spaces, a leading `x =` and digit groups; `1/2`, `\frac12` as `\frac{1}{2}`."""
    light = lightly_normalised(answer)
    if _GROUPED.fullmatch(light):
        light = light.replace(",", "")
    return _rewritten(light, _FULL)


def unwrapped(answer: str) -> str:
    r"""`answer` with what `\text{...}` and its kin hold in their place."""
    return _rewritten(answer, [_WRAPPED])


def number_in(answer: str) -> Fraction | None:
    """The decimal number or ratio of whole numbers that a fully normalised answer is; None if it is neither."""
    if len(answer) > _LONGEST_NUMBER:
        return None
    if _NUMBER.fullmatch(answer):
        return Fraction(answer)
    ratio = _RATIO.fullmatch(answer)
    if ratio is None or not int(ratio[3]):
        return None
    return Fraction(int(ratio[2]), int(ratio[3])) * (-1 if ratio[1] == "-" else 1)


def spelt_alike(gold: str, answer: str) -> bool:
    """Whether two answers are the same string after full normalisation, or numbers within 1e-6 of each other.

    The last two of the four comparisons of RLTT (arXiv 2602.10520); the first two need math-verify.
    """
    gold, answer = fully_normalised(gold), fully_normalised(answer)
    if not gold or not answer:
        return False
    numbers = number_in(gold), number_in(answer)
    if numbers[0] is None or numbers[1] is None:
        return gold == answer
    return abs(numbers[0] - numbers[1]) <= _TOLERANCE


def _rewritten(text: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text
