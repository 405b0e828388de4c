"""Problems to reason about, from records of any published shape: a file's, or a benchmark's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from looplm.data.files import Record, check_characters, read_records, value_of
from looplm.evals.benchmarks import benchmark_names, benchmark_records
from looplm.evals.hub_columns import svamp
from looplm.evals.prompts import Problem, Worked
from looplm.evals.results import hashed_ids
from looplm.tasks.answers import last_boxed

_FINAL = "####"  # before the answer of a solution of GSM8K
_CALCULATED = re.compile(r"<<[^<>]*>>")
_QUESTIONS = ("problem", "question", "question_stem")


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Where a record's question and answer stand, where it has another shape than the published ones."""

    question: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        if (self.question is None) != (self.answer is None):
            raise ValueError("name the field of the question and that of the answer, or neither")


@dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """Problems; `lettered` says that their answers are letters of a choice, and `source` where they come from."""

    source: str
    lettered: bool
    problems: tuple[Problem, ...]


class _Read(NamedTuple):
    """A record's question, its answer, the solution in words where it has one, and whether the answer is a letter."""

    question: str
    answer: str
    solution: str = ""
    lettered: bool = False


def read_problems(
    place: str, folder: Path | None = None, limit: int | None = None, fields: Fields | None = None
) -> ProblemSet:  # fmt: skip
    """The first problems of a file, or of a benchmark's name (its records in `folder`, else in a package).

    Shapes: GSM8K (`question`, and an `answer` that ends in "#### 18"), MATH (`problem`, and a `solution` with a box,
    which goes before `answer`), SVAMP (`Body`, `Question`, `Answer`), choices as of ARC, OpenBookQA and CommonsenseQA
    (`choices`, `answerKey`) or of MMLU (`choices`, `answer` as an index), which are asked for by letter; or `fields`,
    whose answer is taken as it is. Ids are hashes of the questions.

    Raises:
        ValueError: for a record of another shape, named; a mixture of letters and others; or no problem at all.
    """
    if place in benchmark_names():
        source, records = place, benchmark_records(place, folder)
    else:
        source, records = str(place), read_records(place)
    read = [_read(record, fields or Fields()) for record in islice(records, limit)]
    if not read:
        raise ValueError(f"'{place}' holds no problem")
    if len({each.lettered for each in read}) > 1:
        raise ValueError(f"'{place}' mixes choices with other answers, which are marked differently; give them apart")
    ids = hashed_ids(each.question for each in read)
    problems = [Problem(id=id, question=each.question, answer=each.answer) for id, each in zip(ids, read, strict=True)]
    return ProblemSet(source=source, lettered=read[0].lettered, problems=tuple(problems))


def read_worked(path: str | Path, limit: int, fields: Fields | None = None) -> list[Worked]:
    """The first examples of a file of problems (as `read_problems`), each with its solution and the answer in a box.

    Raises:
        ValueError: for a record of another shape, named, or fewer examples than `limit`.
    """
    read = [_read(record, fields or Fields()) for record in islice(read_records(path), limit)]
    if len(read) < limit:
        raise ValueError(f"'{path}' holds {len(read)} examples, not {limit}")
    return [Worked(question=each.question, solution=_boxed(each)) for each in read]


def _boxed(read: _Read) -> str:
    box = rf"\boxed{{{read.answer}}}"
    if last_boxed(read.solution) is not None or not read.solution:
        return read.solution or box
    return f"{read.solution}\n{box}"


def _read(record: Record, fields: Fields) -> _Read:
    values = record.values
    if fields.question is not None and fields.answer is not None:
        return _Read(_text(record, fields.question), _text(record, fields.answer))
    if "Body" in values:
        values = _svamp(record)
        record = Record(record.where, values)
    asked = next((name for name in _QUESTIONS if name in values), _QUESTIONS[1])
    question = _text(record, asked).strip()
    if "choices" in values:
        return _chosen(record, question)
    solution = _text(record, "solution") if "solution" in values else ""
    box = last_boxed(solution)
    if box is not None:
        return _Read(question, box, solution)
    words, marked, final = _text(record, "answer").rpartition(_FINAL)
    if not marked:
        return _Read(question, final.strip(), solution)
    return _Read(question, final.strip().replace(",", ""), _CALCULATED.sub("", words).strip())


def _chosen(record: Record, question: str) -> _Read:
    """The choices below the question, under letters from A on, whatever the record calls them."""
    choices = value_of(record, "choices")
    try:
        texts: Sequence[Any] = choices["text"] if isinstance(choices, dict) else choices
        labels = choices["label"] if isinstance(choices, dict) else list(range(len(texts)))
        place = list(labels).index(value_of(record, "answerKey" if "answerKey" in record.values else "answer"))
        lines = [f"{_letter(number)}. {text}" for number, text in enumerate(texts)]
        return _Read("\n".join([question, *lines]), _letter(range(len(texts))[place]), lettered=True)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{record.where}: the answer is none of the choices {str(choices)[:60]}") from error


def _letter(place: int) -> str:
    return chr(ord("A") + place)


def _svamp(record: Record) -> dict[str, Any]:
    for name in ("Body", "Question", "Answer"):
        value_of(record, name)
    try:
        return svamp([dict(record.values)])[0]
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{record.where} holds a value of another kind: {error}") from error


def _text(record: Record, field: str) -> str:
    value = value_of(record, field)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{record.where}: '{field}' is a {type(value).__name__}, not text")
    return check_characters(record, str(value))
