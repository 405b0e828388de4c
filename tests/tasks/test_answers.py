"""Reading answers: boxes by a slow reader written here, spellings by tables made by hand."""

import time
from fractions import Fraction

import pytest

from looplm.tasks.answers import (
    fully_normalised,
    last_boxed,
    last_tagged,
    lightly_normalised,
    number_in,
    spelt_alike,
)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} then \fbox{ 2 } follows", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{1 + \fbox{2}} = 3", "2"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),  # a brace that is a sign closes nothing
        (r"\boxed{a\\{b}}", r"a\\{b}"),  # a line break, then a brace
        (r"\boxed {5}", "5"),
        (r"$\boxed 5$.", "5"),
        (r"it is \boxed 42. The end", "42"),
        (r"\boxed{}", ""),
        (r"\boxed{5} but no, \boxed{6", None),
        (r"\boxed{\{1}", r"\{1"),
        (r"\boxed", None),
        (r"\boxedword{5}", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_box(text, held):
    assert last_boxed(text) == held


def test_boxes_among_braces_of_any_depth():
    """Every word over braces that is balanced comes back whole; with one brace missing, nothing does."""
    words = [""]
    for _ in range(5):
        words = [*words, *(f"{{{word}}}" for word in words), *(f"x{word}{{y}}" for word in words)]
    for word in dict.fromkeys(words):
        assert last_boxed(f"\\boxed{{1}} \\boxed{{{word}}} }}") == word
        assert last_boxed(f"\\boxed{{1}} \\boxed{{{word}") is None


@pytest.mark.parametrize(
    ("text", "held"),
    [("<answer>1</answer><answer> 2 </answer> 3", "2"), ("<answer>1</answer><answer>2", None), ("1", None),
     ("2</answer>", None), ("<answer></answer>", "")],
)  # fmt: skip
def test_the_last_tag(text, held):
    assert last_tagged(text) == held


@pytest.mark.parametrize(
    ("answer", "light", "full"),
    [
        (r"$\dfrac12$", r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{23}", r"\frac1{23}", r"\frac{1}{23}"),
        (r"\frac 3 4", r"\frac 3 4", r"\frac{3}{4}"),
        (" 1/2. ", "1/2", r"\frac{1}{2}"),
        (r"\left( 1,\, 2 \right)", "( 1, 2 )", "(1,2)"),
        (r"\matrix{1 \\ 2}", r"\matrix{1 \\ 2}", r"\matrix{1\\2}"),
        (r"90^{\circ}", "90", "90"),
        (r"50\%", "50", "50"),
        (r"\$1{,}000", "1,000", "1000"),
        ("(1,200)", "(1,200)", "(1,200)"),  # a pair, not a number
        (r"12 \text{ cm}^2", r"12 \text{ cm}^2", "12"),
        (r"\text{Evelyn}", r"\text{Evelyn}", "Evelyn"),
        (r"2 \text{ or } 3", r"2 \text{ or } 3", "2or3"),
        ("18 dollars", "18 dollars", "18"),
        (r"\text{18 dollars}.", r"\text{18 dollars}", "18"),
        (r"\frac12 cups", r"\frac12 cups", r"\frac{1}{2}"),
        (r"\frac{1}{2} cups", r"\frac{1}{2} cups", r"\frac{1}{2}"),
        ("18 million", "18 million", "18million"),  # another number
        ("18 or 20", "18 or 20", "18or20"),
        ("3 pi", "3 pi", "3pi"),
        ("1.0500", "1.0500", "1.05"),
        ("1.00", "1.00", "1"),
        (r"x = \sqrt2", r"x = \sqrt2", r"\sqrt{2}"),
        ("-.50", "-.50", "-0.5"),
        ("10.0", "10.0", "10"),
        ("100", "100", "100"),
        (r"\leftarrow", r"\leftarrow", r"\leftarrow"),
    ],
)  # fmt: skip
def test_spellings(answer, light, full):
    assert lightly_normalised(answer) == light
    assert fully_normalised(answer) == full
    assert fully_normalised(full) == full


@pytest.mark.parametrize("answer", ["0." + "0" * 20_000 + "1", "1" + " " * 20_000 + "x", r"\text{" * 5000, "1," * 9000])
def test_a_long_answer_takes_no_long_time(answer):
    begin = time.process_time()
    assert not spelt_alike("0", answer)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("answer", "number"),
    [("5", Fraction(5)), ("-0.25", Fraction(-1, 4)), (r"-\frac{1}{3}", Fraction(-1, 3)),
     (r"\frac{-1}{3}", Fraction(-1, 3)), (r"\frac{1}{0}", None), ("x", None), ("1e5", None), ("9" * 101, None)],
)  # fmt: skip
def test_numbers(answer, number):
    assert number_in(answer) == number


@pytest.mark.parametrize(
    ("gold", "answer", "alike"),
    [
        (r"\frac13", "0.3333333", True),
        (r"\frac13", "0.33333", False),
        ("5", "5.000001", True),
        ("5", "5.0000011", False),
        ("100000000000000000001", "100000000000000000002", False),  # equal as floats
        ("1,000", "1000", True),
        ("3", r"3\text{ apples}", True),
        ("Evelyn", r"\text{Evelyn}", True),
        ("", "", False),
        ("5", "", False),
        ("9" * 5000, "9" * 5000, True),
        ("(1,2)", "(2,1)", False),
    ],
)
def test_alike(gold, answer, alike):
    assert spelt_alike(gold, answer) is alike
    assert spelt_alike(answer, gold) is alike
