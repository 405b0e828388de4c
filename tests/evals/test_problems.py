"""Problems and worked examples from records of every shape that is published."""

import json

import pytest

from looplm.evals.problems import Fields, read_problems, read_worked

ARC = {"question": "Which?", "choices": {"text": ["ash", "elm", "fir"], "label": ["1", "2", "3"]}, "answerKey": "3"}
BOOK = {"question_stem": "Which tree?", "choices": ARC["choices"], "answerKey": "3"}
SHAPES = {
    "gsm8k": ({"question": "How many? ", "answer": "2*600=<<2*600=1200>>1200\n#### 1,200"}, "How many?", "1200"),
    "svamp": ({"Body": "Ann has 3 pens", "Question": "How many?", "Answer": 3.0}, "Ann has 3 pens. How many?", "3"),
    "math by its box": (
        {"problem": "Find it.", "solution": r"So $\boxed{\frac{1}{2}}$.", "answer": "malformed("}, "Find it.",
        r"\frac{1}{2}",
    ),
    "aime": ({"problem": "Find it.", "answer": 204}, "Find it.", "204"),
    "plain": ({"question": "Capital?", "answer": "Paris"}, "Capital?", "Paris"),
    "arc": (ARC, "Which?\nA. ash\nB. elm\nC. fir", "C"),
    "mmlu": ({"question": "Which?", "choices": ["x", "y"], "answer": 1}, "Which?\nA. x\nB. y", "B"),
    "openbookqa": (BOOK, "Which tree?\nA. ash\nB. elm\nC. fir", "C"),
}  # fmt: skip


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(tmp_path, shape):
    record, question, answer = SHAPES[shape]
    found = read_problems(lines(tmp_path / "p.jsonl", record))
    (problem,) = found.problems
    assert (problem.question, problem.answer) == (question, answer)
    assert found.lettered == ("choices" in record)


def test_named_fields_are_taken_as_they_are(tmp_path):
    file = lines(tmp_path / "p.jsonl", {"ask": "  2 + 2?", "gold": "#### 4", "answer": "no"})
    (problem,) = read_problems(file, fields=Fields(question="ask", answer="gold")).problems
    assert (problem.question, problem.answer) == ("  2 + 2?", "#### 4")


def test_ids_are_those_of_the_questions_wherever_they_stand(tmp_path):
    one, two = ({"question": f"{n}?", "answer": "1"} for n in range(2))
    first = [problem.id for problem in read_problems(lines(tmp_path / "a.jsonl", one, two, one)).problems]
    again = [problem.id for problem in read_problems(lines(tmp_path / "b.jsonl", two, one), limit=1).problems]
    assert again == [first[1]]
    assert first[2] == f"{first[0]}-2"
    assert len(first[0]) == 16


def test_worked_examples_end_in_a_box(tmp_path):
    records = [record for record, _, _ in (SHAPES["gsm8k"], SHAPES["math by its box"], SHAPES["aime"], SHAPES["arc"])]
    solutions = [each.solution for each in read_worked(lines(tmp_path / "w.jsonl", *records), 4)]
    assert solutions == [
        "2*600=1200\n\\boxed{1200}", r"So $\boxed{\frac{1}{2}}$.", r"\boxed{204}", r"\boxed{C}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "holds no problem"),
        ([SHAPES["arc"][0], SHAPES["aime"][0]], "mixes choices with other answers"),
        ([{**ARC, "answerKey": "D"}], "line 1: the answer is none of the choices"),
        ([{"question": "Which?", "choices": ["x", "y"], "answer": 2}], "line 1: the answer is none of the choices"),
        ([{"question": "Which?", "choices": 3, "answer": 2}], "line 1: the answer is none of the choices"),
        ([{"question": ["Which?"], "answer": "2"}], "line 1: 'question' is a list, not text"),
        ([{"Body": "Ann", "Answer": 3.0}], "line 1 has no field 'Question'"),
        ([{"Body": 1, "Question": "How many?", "Answer": 3.0}], "line 1 holds a value of another kind"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, records, message):
    with pytest.raises(ValueError, match=message) as error:
        read_problems(lines(tmp_path / "p.jsonl", *records))
    assert "\n" not in str(error.value)


def test_too_few_examples_and_half_named_fields(tmp_path):
    with pytest.raises(ValueError, match="holds 1 examples, not 2"):
        read_worked(lines(tmp_path / "w.jsonl", SHAPES["aime"][0]), 2)
    with pytest.raises(ValueError, match="or neither"):
        Fields(question="ask")
