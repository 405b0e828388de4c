"""What a model has answered already, by depth and request: in memory, and in a file where one is named."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Asked = TypeVar("Asked")
Keep = Callable[[int, list[Any]], None]  # takes the place of a request, and its answer at each depth


class Memo:
    """Answers (JSON values) under (depth, request), appended to `file` line by line as they come.

    `settings` is all that decides an answer beside these; the file begins with it, and one that begins otherwise is
    refused, so that nothing is taken for another model's. Processes may share a file: lines are written whole, one
    process at a time. A line that a crash cut off counts for nothing.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, file: Path | None = None) -> None:
        self._found: dict[str, Any] = {}
        self._file = file
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps(settings, sort_keys=True)
        if not file.exists() or not file.stat().st_size:
            _append(file, head)
        first, *lines = file.read_bytes().splitlines()
        if first != head.encode():
            raise ValueError(f"{file} holds answers under other settings; remove it, or name another cache")
        self._found = dict(filter(None, map(_entry, lines)))

    def answers(
        self, depths: Sequence[str], requests: Sequence[Asked], answer: Callable[[Sequence[Asked], Keep], None]
    ) -> list[list[Any]]:  # fmt: skip
        """For every request what each of `depths` gives; `answer` is asked for those that any depth lacks, once each.

        It has to `keep` an answer to every request, as soon as it has it. Requests are compared as JSON.
        """
        keys = [[_key(depth, request) for depth in depths] for request in requests]
        missing = {row[0]: number for number, row in enumerate(keys) if any(key not in self._found for key in row)}
        numbers = list(missing.values())
        if numbers:
            answer(
                [requests[number] for number in numbers],
                lambda place, row: self._keep(dict(zip(keys[numbers[place]], row, strict=True))),
            )
        return [[self._found[key] for key in row] for row in keys]

    def _keep(self, new: Mapping[str, Any]) -> None:
        self._found |= new
        if self._file is not None:
            _append(self._file, "\n".join(json.dumps([key, answer]) for key, answer in new.items()))


def _append(file: Path, lines: str) -> None:
    with file.open("a+b", buffering=0) as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        end = kept.seek(0, os.SEEK_END)
        kept.seek(max(0, end - 1))
        torn = kept.read(1) not in (b"", b"\n")
        kept.write((b"\n" if torn else b"") + lines.encode() + b"\n")


def _entry(line: bytes) -> tuple[str, Any] | None:
    """A key and its answer; None of what is no whole line."""
    try:
        key, answer = json.loads(line)
    except ValueError:
        return None
    return key, answer


def _key(depth: str, request: object) -> str:
    return hashlib.blake2b(json.dumps([depth, request], sort_keys=True).encode(), digest_size=16).hexdigest()
