"""Records of files and of hub datasets, each with the place where it stands."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HUB = "hub:"
_COLUMNS = {".parquet": "parquet", ".arrow": "arrow"}


class Record(NamedTuple):
    """Named values, and where they were read (for messages)."""

    where: str
    values: dict[str, Any]


def read_records(path: str | Path, text_field: str = "text") -> Iterator[Record]:
    """The records of a .jsonl, .parquet or .arrow file, of every file under a folder (by name), or of a dataset.

    Any other file is one record, its UTF-8 text under `text_field`. "hub:owner/name" or "hub:owner/name:config" streams
    the train split of a dataset through `datasets`, as do .parquet and .arrow files. Files in a folder that are not
    text are left out with a warning.

    Raises:
        ValueError: if the path does not exist, or a file or line cannot be read; both are named.
    """
    if str(path).startswith(HUB):
        yield from _dataset(str(path), *str(path).removeprefix(HUB).split(":"))
        return
    path = Path(path)
    if not path.exists():
        raise ValueError(f"the text '{path}' does not exist")
    if path.is_dir():
        yield from _folder(path, text_field)
    else:
        yield from _file(path, text_field)


def value_of(record: Record, field: str) -> Any:
    """The value under a field of a record.

    Raises:
        ValueError: if the record has no such field, naming those that it has.
    """
    if field not in record.values:
        raise ValueError(f"{record.where} has no field '{field}', only {', '.join(sorted(record.values)) or 'none'}")
    return record.values[field]


def check_characters(record: Record, text: str) -> str:
    """`text` itself, a value of the record.

    Raises:
        ValueError: if it holds half a character, as JSON can spell it ("\\ud800") and no tokenizer can read.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ValueError(
            f"{record.where}: character {error.start + 1} of a text is {half}, half a character"
        ) from error
    return text


def _folder(folder: Path, text_field: str) -> Iterator[Record]:
    skipped = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        if file.suffix == ".jsonl" or file.suffix in _COLUMNS or _is_text(file):
            yield from _file(file, text_field)
        else:
            skipped.append(file)
    if skipped:
        warnings.warn(f"left out {len(skipped)} files that are not UTF-8 text, such as {skipped[0]}", stacklevel=2)


def _is_text(file: Path) -> bool:
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _file(file: Path, text_field: str) -> Iterator[Record]:
    if file.suffix == ".jsonl":
        yield from _json_lines(file)
    elif file.suffix in _COLUMNS:
        yield from _dataset(str(file), _COLUMNS[file.suffix], data_files=str(file))
    else:
        try:
            yield Record(str(file), {text_field: file.read_text(encoding="utf-8")})
        except UnicodeDecodeError as error:
            raise ValueError(f"'{file}' is not UTF-8 text") from error


def _json_lines(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file} line {number}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
            if not isinstance(values, dict):
                raise ValueError(f"{where} is a JSON {type(values).__name__}, not an object with named fields")
            yield Record(where, values)


def _dataset(where: str, *name: str, **options: str) -> Iterator[Record]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"{where} is read with `datasets`, which is not installed; pip install datasets") from error
    number = 0
    try:
        loaded: Any = load_dataset(*name, split="train", streaming=True, **options)  # ty: ignore[no-matching-overload]
        for number, values in enumerate(loaded, start=1):
            yield Record(f"{where} row {number}", dict(values))
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{where} cannot be read after row {number}: {reason}") from error
