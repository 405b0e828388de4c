"""What a model has answered already, by depth and request: in memory, and in a file where one is named."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Asked = TypeVar("Asked")
_AT_ONCE = 1024  # requests that are asked together: what an interrupt may lose


class Memo:
    """Answers (JSON values) under (depth, request), appended to `file` line by line as they come.

    `settings` is all that decides an answer beside these; the file begins with it, and one that begins otherwise is
    refused, so that nothing is taken for another model's. A last line that was cut off is dropped.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, file: Path | None = None) -> None:
        self._found: dict[str, Any] = {}
        self._file = file
        if file is None:
            return
        head = json.dumps(settings, sort_keys=True)
        if file.exists():
            self._read(file, head)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(head + "\n")

    def _read(self, file: Path, head: str) -> None:
        first, *lines = file.read_text().split("\n")
        if first != head:
            raise ValueError(f"{file} holds answers under other settings; remove it, or name another cache")
        whole = lines[:-1]  # a line is whole once its end is there
        if lines[-1]:
            file.write_text("\n".join([first, *whole, ""]))
        for line in whole:
            key, answer = json.loads(line)
            self._found[key] = answer

    def answers(
        self, depths: Sequence[str], requests: Sequence[Asked], answer: Callable[[Sequence[Asked]], list[list[Any]]]
    ) -> list[list[Any]]:  # fmt: skip
        """For every request what each of `depths` gives; `answer` is asked for those that any depth lacks, once each.

        Requests are compared as JSON.
        """
        keys = [[_key(depth, request) for depth in depths] for request in requests]
        missing = {row[0]: number for number, row in enumerate(keys) if any(key not in self._found for key in row)}
        numbers = list(missing.values())
        for first in range(0, len(numbers), _AT_ONCE):
            chosen = numbers[first : first + _AT_ONCE]
            told = answer([requests[number] for number in chosen])
            self._keep({k: v for n, row in zip(chosen, told, strict=True) for k, v in zip(keys[n], row, strict=True)})
        return [[self._found[key] for key in row] for row in keys]

    def _keep(self, new: Mapping[str, Any]) -> None:
        self._found |= new
        if self._file is not None:
            with self._file.open("a") as file:
                file.writelines(json.dumps([key, answer]) + "\n" for key, answer in new.items())


def _key(depth: str, request: object) -> str:
    return hashlib.blake2b(json.dumps([depth, request], sort_keys=True).encode(), digest_size=16).hexdigest()
