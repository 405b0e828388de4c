"""Whole answers marked by the one reader: what a human would mark right is right, and nothing else."""

import pytest

from looplm.evals.marking import boxed_math
from looplm.tasks.math_answers import MathGrader

RIGHT = [
    # fractions and decimals
    (r"\frac{3}{4}", r"So \boxed{\frac{3}{4}}."),
    (r"\frac{3}{4}", r"\boxed{0.75}"),
    (r"\frac{3}{4}", r"\boxed{\dfrac{3}{4}}"),
    (r"\frac{3}{4}", r"\boxed{3/4}"),
    (r"\frac{3}{4}", r"\boxed{\frac34}"),
    (r"\frac{3}{4}", r"\boxed{\frac{6}{8}}"),
    ("-0.5", r"\boxed{-\frac{1}{2}}"),
    ("2.5", r"\boxed{\frac{5}{2}}"),
    # numbers as they are written
    ("1234", r"\boxed{1,234}"),
    ("1234", r"\boxed{1{,}234}"),
    ("18", r"The total is \boxed{\$18}."),
    ("18", r"\boxed{18.0}"),
    ("70000", r"\boxed{70{,}000}"),
    ("10", r"\boxed{10\%}"),
    ("42", r"\boxed{ 42 }"),
    ("-3", r"\boxed{-3}"),
    # units and words
    ("90", r"\boxed{90^\circ}"),
    ("5", r"\boxed{5\text{ cm}}"),
    ("12", r"\boxed{12 \mathrm{ m}^2}"),
    ("18", r"\boxed{18 dollars}"),
    ("18", r"\boxed{\text{18 dollars}}"),
    (r"\text{Tuesday}", r"\boxed{\text{Tuesday}}"),
    (r"\text{east}", r"\boxed{east}"),
    (r"\text{(C)}", r"\boxed{C}"),
    # roots, powers, pi
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    (r"\sqrt{2}", r"\boxed{\sqrt2}"),
    (r"4\pi", r"\boxed{4 \pi}"),
    ("8", r"\boxed{2^3}"),
    (r"\frac{\pi}{2}", r"\boxed{\pi/2}"),
    # expressions and equations
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    ("2x+4", r"\boxed{2(x+2)}"),
    ("5", r"\boxed{x = 5}"),
    ("a+b", r"\boxed{b+a}"),
    # tuples, sets, intervals
    ("(1, 2)", r"\boxed{(1,2)}"),
    (r"\left(3,\frac{\pi}{2}\right)", r"\boxed{(3, \frac{\pi}{2})}"),
    (r"\{1, 2, 3\}", r"\boxed{\{3, 2, 1\}}"),
    ("[0, 1)", r"\boxed{[0,1)}"),
    (r"(-\infty, 2)", r"\boxed{(-\infty,2)}"),
    # several boxes, nested braces, other boxes
    ("7", r"First \boxed{5}, but no: \boxed{7}"),
    ("7", r"\fbox{7}"),
    (r"\frac{1}{1+\sqrt{2}}", r"\boxed{\frac{1}{1+\sqrt{2}}}"),
    ("7", r"$\boxed 7$"),
    ("7", r"$$\boxed{7}$$ is the answer."),
]
WRONG = [
    ("7", "The answer is 7."),  # no box
    ("7", r"\boxed{}"),
    ("7", r"\boxed{7"),  # not closed
    ("7", r"\boxed{7}, no, \boxed{8}"),
    ("7", r"\boxed{77}"),
    ("7", ""),
    (r"\frac{3}{4}", r"\boxed{\frac{4}{3}}"),
    (r"\frac{3}{4}", r"\boxed{0.74}"),
    (r"\frac{3}{4}", r"\boxed{\frac{3}{}}"),
    ("1234", r"\boxed{1.234}"),
    ("-3", r"\boxed{3}"),
    ("(1, 2)", r"\boxed{(2, 1)}"),
    (r"\{1, 2, 3\}", r"\boxed{\{1, 2\}}"),
    ("[0, 1)", r"\boxed{(0, 1)}"),
    ("[0, 1)", r"\boxed{[0, 1]}"),
    (r"\text{east}", r"\boxed{west}"),
    (r"\text{(C)}", r"\boxed{D}"),
    (r"2\sqrt{3}", r"\boxed{3\sqrt{2}}"),
    ("x^2+2x+1", r"\boxed{(x-1)^2}"),
    ("5", r"\boxed{x = 6}"),
    ("18", r"\boxed{18 million}"),
    ("18", r"\boxed{18 or 20}"),
    ("18", r"\boxed{18, 20}"),
    (r"4\pi", r"\boxed{4}"),
    ("8", r"\boxed{\text{eight or nine}}"),
    ("90", r"\boxed{\frac{90}{0}}"),
    ("7", r"\boxed{\unknown{7}{8}}"),
]
assert len(RIGHT) + len(WRONG) >= 60


@pytest.fixture(scope="module")
def mark():
    with MathGrader(workers=1, limit=5.0) as grader:
        yield boxed_math(grader)


@pytest.mark.parametrize("pairs", [RIGHT, WRONG], ids=["right", "wrong"])
def test_answers_are_marked_as_a_human_would(mark, pairs):
    marks = mark([gold for gold, _ in pairs], [text for _, text in pairs])
    wanted = float(pairs is RIGHT)
    assert [pair for pair, found in zip(pairs, marks, strict=True) if found != wanted] == []
