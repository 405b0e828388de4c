"""What judges were asked and replied, kept in a file from which a run is replayed without them."""

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One question to a judge and what it replied.

    key: `key_of(model, prompt)` · endpoint, answered_by, finish_reason: which server was asked, which model it says
    replied, and why the reply ends where it does.
    """

    key: str
    model: str
    prompt: str
    reply: str
    endpoint: str = ""
    answered_by: str = ""
    finish_reason: str = ""


_REPLY = TypeAdapter(Reply)


def key_of(model: str, prompt: str) -> str:
    """The name of a question: a hash of the judge's model and the prompt."""
    return hashlib.sha256(json.dumps([model, prompt]).encode()).hexdigest()


class Recording:
    """Replies by their questions in a JSON lines file, in which the first reply to a question stays the only one.

    Lines are appended whole and one at a time, whichever processes share the file; a line that a crash cut off counts
    for nothing and is overwritten by the next one.

    Raises:
        ValueError: if a line is no reply, or not the one that its key says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._replies: dict[str, Reply] = {}
        self._read_bytes = self._read_lines = 0
        self._lock = threading.Lock()
        if path.exists():
            with path.open("rb") as file:
                self._catch_up(file.read())

    @property
    def models(self) -> list[str]:
        """The judges whose replies it holds."""
        return sorted({reply.model for reply in self._replies.values()})

    def unseen(self, model: str, prompts: Sequence[str]) -> list[str]:
        """Those of the questions that have no reply yet, each once."""
        return [prompt for prompt in dict.fromkeys(prompts) if key_of(model, prompt) not in self._replies]

    def replies(self, model: str, prompts: Sequence[str]) -> list[str]:
        """The replies, in the order of the prompts.

        Raises:
            ValueError: for a question that has none.
        """
        for prompt in self.unseen(model, prompts):
            end = " ".join(prompt.split())[-80:]
            raise ValueError(
                f"{self.path} holds no reply of '{model}' to the question that ends in '{end}'; "
                "run with the endpoint to record it"
            )
        return [self._replies[key_of(model, prompt)].reply for prompt in prompts]

    def add(self, reply: Reply) -> None:
        """Put a reply in the file, unless this question has one by now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self.path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END) < self._read_bytes:
                raise ValueError(f"{self.path} became shorter while it was written to; let no other program change it")
            file.seek(self._read_bytes)
            self._catch_up(file.read())
            if reply.key not in self._replies:
                file.truncate(self._read_bytes)  # only what was cut off lies beyond
                line = json.dumps(asdict(reply)).encode() + b"\n"
                self._catch_up(line[: file.write(line)])

    def _catch_up(self, lines: bytes) -> None:
        """Take in whole lines that follow those known."""
        for line in lines.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            self._read_lines += 1
            reply = self._parsed(line)
            self._replies.setdefault(reply.key, reply)
            self._read_bytes += len(line)

    def _parsed(self, line: bytes) -> Reply:
        where = f"{self.path} line {self._read_lines}"
        try:
            reply = _REPLY.validate_json(line)
        except ValidationError as error:
            raise ValueError(f"{where} is not a judge's reply ({error.errors()[0]['msg']})") from error
        if reply.key != key_of(reply.model, reply.prompt):
            raise ValueError(f"{where} was changed: its key is not that of its model and prompt; remove the line")
        return reply


class RecordedJudge:
    """A judge that replies as it did when it was recorded, and to nothing else.

    Args:
        model: which judge, where the recording holds several.

    Raises:
        ValueError: if there is no recording, or it does not hold that judge; from `ask`, for an unseen question.
    """

    def __init__(self, path: str | Path, model: str | None = None) -> None:
        self._recording = Recording(Path(path))
        known = self._recording.models
        if not known:
            raise ValueError(f"{path} holds no judge's reply; record some with an endpoint first")
        if (model is None and len(known) > 1) or (model is not None and model not in known):
            raise ValueError(f"{path} holds replies of {', '.join(known)}; choose one of them, not {model}")
        self.name = known[0] if model is None else model

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """The recorded replies, in the order of the prompts."""
        return self._recording.replies(self.name, prompts)
