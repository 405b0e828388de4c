"""Records as the hub spells them, rebuilt from the documents of OLMo's request files or from published files."""

from collections.abc import Callable
from typing import Any

from looplm.tasks.answers import last_boxed

Row = dict[str, Any]

_OPENING, _CLOSING = "Question: ", "\nAnswer:"
_MBPP_TEST = range(11, 511)  # the task numbers that the paper tests on (arXiv 2108.07732)


def lettered(question: str) -> Callable[[Row], Row]:
    """A row of ARC, OpenBookQA or CommonsenseQA, its question under the name given."""

    def rebuild(doc: Row) -> Row:
        letters = list("ABCDE"[: len(doc["choices"])])
        choices = {"text": doc["choices"], "label": letters}
        return {"id": doc["id"], question: _asked(doc), "choices": choices, "answerKey": letters[doc["gold"]]}

    return rebuild


def kept(*columns: str) -> Callable[[Row], Row]:
    """A row with these columns alone, as they are."""
    return lambda doc: {column: doc[column] for column in columns}


def boolq(doc: Row) -> Row:
    """A row of SuperGLUE's BoolQ, whose passages open with their titles."""
    passage, _, question = doc["query"].removesuffix("?" + _CLOSING).rpartition("\n" + _OPENING)
    return {"passage": passage, "question": question, "label": int(doc["choices"][doc["gold"]] == "yes")}


def hellaswag(doc: Row) -> Row:
    """A row of HellaSwag whose texts are cleaned already; lm-eval leaves a space or stop more in WikiHow's."""
    label, _, context = doc["query"].partition(": ")
    texts = {"activity_label": label, "ctx_a": context, "ctx_b": "", "endings": doc["choices"]}
    return {"ind": doc["ind"], **texts, "label": str(doc["gold"])}


def math_500(doc: Row) -> Row:
    """A row of MATH-500, its answer read from the box of the solution: the one given is malformed in places."""
    return {**kept("problem", "solution", "level")(doc), "answer": last_boxed(doc["solution"])}


def lambada(doc: Row) -> Row:
    """A row of LAMBADA: the text with its last word."""
    return {"text": f"{doc['query']} {doc['answers_text'][0]}"}


def svamp(rows: list[Row]) -> list[Row]:
    """Rows of SVAMP as GSM8K's: the question after its story, the answer after "####"."""
    return [{"question": _story(row), "answer": f"#### {_spelt(float(row['Answer']))}"} for row in rows]


def mbpp_test(rows: list[Row]) -> list[Row]:
    """The rows of MBPP that belong to its test split."""
    return [row for row in rows if row["task_id"] in _MBPP_TEST]


def _asked(doc: Row) -> str:
    return doc["query"].removeprefix(_OPENING).removesuffix(_CLOSING)


def _story(row: Row) -> str:
    body = row["Body"].strip()
    return f"{body}{'' if body.endswith('.') else '.'} {row['Question'].strip()}"


def _spelt(number: float) -> str:
    return str(int(number) if number == int(number) else number)
