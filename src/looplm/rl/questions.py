"""What is asked, and questions of a file dealt in an order that a seed decides."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from looplm.data.files import Record, check_characters, read_records, value_of
from looplm.data.permutation import permute

Split = Literal["train", "test"]
Message = dict[str, str]
Prompt = str | list[Message]


@dataclass(frozen=True, kw_only=True)
class Question:
    """`prompt` is text or the turns of a chat; `columns` are what else its reward needs, as TRL calls them.

    where: it was read, for messages.
    """

    prompt: Prompt
    columns: Mapping[str, Any]
    where: str = ""


class QuestionFile:
    """Questions in memory: a share `held_out`, chosen by a hash of the prompt, is "test", all others are "train".

    Raises:
        ValueError: if a split that is asked for has no question.
    """

    def __init__(self, questions: Iterable[Question], held_out: float, seed: int, where: str) -> None:
        self._seed, self._where = seed, where
        self._splits: dict[Split, list[Question]] = {"train": [], "test": []}
        for question in questions:
            self._splits["test" if _is_held_out(question, held_out) else "train"].append(question)

    def question(self, seed: int, split: Split) -> Question:
        """The question number `seed`: each comes once in an epoch, in an order of the epoch's own."""
        questions = self._splits[split]
        if not questions:
            hint = "; raise environment.held_out" if split == "test" else "; lower environment.held_out"
            raise ValueError(f"'{self._where}' has no question of the {split} split{hint}")
        epoch, place = divmod(seed, len(questions))
        return questions[permute([place], len(questions), [self._seed, epoch])[0]]

    def num_questions(self, split: Split) -> int:
        """How many questions a split has."""
        return len(self._splits[split])

    def fingerprint(self) -> str:
        """A hash of all questions, of what rewards read beside them, and of their order."""
        found = hashlib.sha256()
        for split, questions in self._splits.items():
            for question in questions:
                found.update(json.dumps([split, question.prompt, dict(question.columns)], default=str).encode() + b"\n")
        return found.hexdigest()[:32]


def read_questions(path: str, make: Callable[[Record], Question | None], needed: str) -> list[Question]:
    """The questions that `make` finds in the records of a file, a folder or "hub:owner/name"; None is left out.

    Raises:
        ValueError: if there is none, saying what is `needed`.
    """
    found = [question for question in map(make, read_records(path)) if question is not None]
    if not found:
        raise ValueError(f"'{path}' holds no question that can be marked; {needed}")
    return found


def text_of(record: Record, field: str) -> str:
    """A text under a field of a record; numbers as they are written.

    Raises:
        ValueError: if it is anything else.
    """
    value = value_of(record, field)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{record.where}: '{field}' is a {type(value).__name__}, not text")
    return check_characters(record, str(value))


def prompt_of(record: Record, field: str) -> Prompt:
    """A prompt under a field: text, or turns of role and content.

    Raises:
        ValueError: if it is anything else, or empty.
    """
    value = value_of(record, field)
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{record.where}: '{field}' is empty; give it text, or take the record out")
        return check_characters(record, value)
    turns = list(value) if isinstance(value, Sequence) else []
    if not turns or not all(isinstance(turn, Mapping) and _says(turn) for turn in turns):
        raise ValueError(f"{record.where}: '{field}' is neither text nor a list of turns with role and content")
    return [{name: check_characters(record, turn[name]) for name in ("role", "content")} for turn in turns]


def asked(text: str, chat: bool) -> Prompt:
    """`text` as one user turn, or as it is."""
    return [{"role": "user", "content": text}] if chat else text


def _says(turn: Mapping[str, Any]) -> bool:
    return isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _is_held_out(question: Question, share: float) -> bool:
    digest = hashlib.sha256(json.dumps(question.prompt).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
