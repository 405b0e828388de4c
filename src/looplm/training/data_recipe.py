"""What a step's batch is mixed from, as recipes say it."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from looplm.tasks import Compose, Task

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Fraction = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class _Source:
    """`share` is the source's part of the rows, `weight` that of its mean loss where the mean is by sources."""

    share: PositiveFloat = 1.0
    weight: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TextSource(_Source):
    """Running text of `path`: a file, a folder, "hub:owner/name", or Python's own manual by default."""

    kind: Literal["text"] = "text"
    path: str | None = None
    field: str = "text"
    held_out: Fraction = 0.1
    held_out_rows: PositiveInt = 64


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ShardSource(_Source):
    """Token shards in the folder `path`, written by `looplm tokenize`; `held_out` names a folder of others."""

    kind: Literal["shards"] = "shards"
    path: str
    held_out: str | None = None
    held_out_rows: PositiveInt = 64


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ChatSource(_Source):
    """Conversations in ChatML, the assistant's turns alone being targets, packed into rows.

    Records have `messages` of role and content; `prompt` and `answer` name two fields instead, and `instruction` is put
    before each prompt, with an empty line between. A conversation longer than a row is dropped, truncated (both are
    counted in the log), or an error.
    """

    kind: Literal["chat"] = "chat"
    path: str
    messages: str = "messages"
    prompt: str | None = None
    answer: str | None = None
    instruction: str | None = None
    too_long: Literal["drop", "truncate", "error"] = "drop"
    held_out: Fraction = 0.05
    held_out_rows: PositiveInt = 64

    def __post_init__(self) -> None:
        if (self.prompt is None) != (self.answer is None):
            raise ValueError("name both prompt and answer, or neither")
        if self.instruction is not None and self.prompt is None:
            raise ValueError("instruction stands before a prompt; name the fields prompt and answer, too")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TaskSource(_Source):
    """Fresh questions of a task in every row; the loss is on the answers only."""

    kind: Literal["task"] = "task"
    task: Annotated[Task, Field(discriminator="kind")] = field(default_factory=Compose)
    held_out_questions: PositiveInt = 512


Source = TextSource | ShardSource | ChatSource | TaskSource


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Ramp:
    """The rows of a step grow linearly from `rows` to the full count over the first `steps` steps."""

    rows: PositiveInt
    steps: PositiveInt


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Data:
    """`rows` rows of `length` tokens a step, over all processes, drawn from named sources by their shares.

    mean: "tokens" weighs every target of a step alike, "sources" adds up weight x mean over each source's targets.
    workers: processes that prepare batches; they change nothing but speed.
    """

    length: Annotated[int, Field(ge=2)] = 128
    rows: PositiveInt = 16
    ramp: Ramp | None = None
    mean: Literal["tokens", "sources"] = "tokens"
    sources: dict[str, Annotated[Source, Field(discriminator="kind")]]
    workers: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources: name at least one source of rows")
        weighed = [name for name, source in self.sources.items() if source.weight != 1]
        if weighed and self.mean == "tokens":
            raise ValueError(f"the weight of '{weighed[0]}' has no meaning under mean: tokens; set data.mean=sources")

    def rows_at(self, step: int) -> int:
        """The rows of 0-based `step`."""
        if self.ramp is None or step >= self.ramp.steps:
            return self.rows
        return round(self.ramp.rows + (self.rows - self.ramp.rows) * step / self.ramp.steps)
