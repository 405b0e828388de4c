"""Who marks what models write: any OpenAI-compatible chat endpoint, its replies recorded as they come."""

import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2

from looplm.engine.policies import is_positive, is_whole
from looplm.evals.progress import Advance, each_of, unheard
from looplm.evals.recording import Recording, Reply, key_of

_LONGEST_PAUSE = 60.0
_PASSING = (408, 425, 429)  # of the client errors, those that another try may not meet


class Judge(Protocol):
    """Replies to questions; `name` is part of every result."""

    @property
    def name(self) -> str:
        """The model that judges."""
        ...

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """The replies, in the order of the prompts."""
        ...


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Which endpoint judges, and how long it is waited for.

    base_url: up to and without "/chat/completions" · model: as the endpoint calls it
    key_variable: the environment variable that holds the key; None sends no key
    max_tokens: of a reply; None leaves it to the endpoint · limit: seconds for one try
    tries: of one question · pause: seconds before the second try, twice as many before each further one
    concurrency: questions that are under way at once.
    """

    base_url: str
    model: str
    key_variable: str | None = None
    max_tokens: int | None = 1024
    limit: float = 120.0
    tries: int = 6
    pause: float = 1.0
    concurrency: int = 8

    def __post_init__(self) -> None:
        try:
            url = httpx2.URL(self.base_url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"base_url={self.base_url!r} is no URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65535:
            raise ValueError(f"base_url={self.base_url!r} must look like http://localhost:8000/v1")
        if url.userinfo or url.query:
            raise ValueError("base_url must hold no key or password; put it in an environment variable (key_variable)")
        counts = {"tries": self.tries, "concurrency": self.concurrency, "max_tokens": self.max_tokens}
        for name, value in counts.items():
            if not (is_whole(value) or (name == "max_tokens" and value is None)):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        for name, value in (("limit", self.limit), ("pause", self.pause)):
            if not is_positive(value):
                raise ValueError(f"{name}={value!r} must be a number of seconds above 0")

    @property
    def url(self) -> str:
        """Where questions go."""
        return self.base_url.rstrip("/") + "/chat/completions"


class EndpointJudge:
    """A model behind an endpoint, asked greedily; a question that `recording` holds is not asked again.

    A question is tried again after a lost connection, a time-out, HTTP 408, 425, 429 or 5xx, or a reply that is no chat
    completion; where the endpoint says for how long to wait, at least so long (but at most a minute).
    `advance` hears how many replies have come.

    Raises:
        ValueError: if the key is not in the environment; from `ask`, if a question gets no reply. What others got is
            recorded by then.
    """

    def __init__(self, settings: JudgeSettings, recording: str | Path, advance: Advance = unheard) -> None:
        self.settings, self.name, self._advance = settings, settings.model, advance
        self._recording = Recording(Path(recording))
        self._key = None if settings.key_variable is None else _key(settings.key_variable)

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """The replies, in the order of the prompts."""
        unseen = self._recording.unseen(self.name, prompts)
        if unseen:
            self._record(unseen)
        return self._recording.replies(self.name, prompts)

    def _record(self, prompts: Sequence[str]) -> None:
        ended = threading.Event()
        with self._client() as client, ThreadPoolExecutor(self.settings.concurrency, "judge") as threads:
            asked = [threads.submit(self._record_one, client, prompt, ended) for prompt in prompts]
            told = each_of(len(prompts), "replies of the judge", self._advance)
            try:
                for each in as_completed(asked):
                    told(each.result())
            finally:
                ended.set()
                threads.shutdown(wait=False, cancel_futures=True)

    def _client(self) -> httpx2.Client:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        limits = httpx2.Limits(max_connections=self.settings.concurrency)
        return httpx2.Client(headers=headers, timeout=self.settings.limit, limits=limits)

    def _record_one(self, client: httpx2.Client, prompt: str, ended: threading.Event) -> None:
        pause, why = 0.0, ""
        for attempt in range(self.settings.tries):
            if ended.wait(pause):
                return  # another question failed for good
            try:
                self._recording.add(self._reply(prompt, self._post(client, prompt)))
                return
            except _PassingError as error:
                why = str(error)
                pause = min(max(self.settings.pause * 2.0 ** min(attempt, 16), error.wait), _LONGEST_PAUSE)
        raise ValueError(f"the judge at {self.settings.url} did not reply in {self.settings.tries} tries: {why}")

    def _post(self, client: httpx2.Client, prompt: str) -> bytes:
        settings = self.settings
        body: dict[str, Any] = {"model": settings.model, "messages": [{"role": "user", "content": prompt}]}
        body["temperature"] = 0
        if settings.max_tokens is not None:
            body["max_tokens"] = settings.max_tokens
        end = time.monotonic() + settings.limit
        try:
            with client.stream("POST", settings.url, json=body) as response:
                told = bytearray()
                for chunk in response.iter_bytes():
                    told += chunk
                    if time.monotonic() > end:  # the client's own limit is for each chunk
                        raise _PassingError(f"no whole reply in {settings.limit:g} seconds")
        except httpx2.TimeoutException as error:
            raise _PassingError(f"no reply in {settings.limit:g} seconds") from error
        except httpx2.RequestError as error:
            raise _PassingError(f"{type(error).__name__}: {_in_a_line(str(error))}") from error
        if response.is_success:
            return bytes(told)
        why = f"HTTP {response.status_code} {self._said(told)}"
        if response.status_code in _PASSING or response.is_server_error:
            raise _PassingError(why, _seconds(response.headers.get("retry-after")))
        raise ValueError(f"the judge at {settings.url} refuses the question: {why}")

    def _reply(self, prompt: str, told: bytes) -> Reply:
        try:
            answer = json.loads(told)
            choice = answer["choices"][0]
            content = choice["message"]["content"] or ""  # null where it refuses
            answered_by, finish_reason = str(answer.get("model") or ""), str(choice.get("finish_reason") or "")
            (content + answered_by + finish_reason).encode()  # half a character cannot be recorded
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _PassingError(f"no chat completion: {self._said(told)}") from error
        return Reply(
            key=key_of(self.name, prompt), model=self.name, prompt=prompt, reply=content,
            endpoint=self.settings.base_url, answered_by=answered_by, finish_reason=finish_reason,
        )  # fmt: skip

    def _said(self, told: bytes | bytearray) -> str:
        """What the endpoint said, fit for an error: in a line, and without the key."""
        text = told.decode(errors="replace")
        return _in_a_line(text if self._key is None else text.replace(self._key, "..."))


class _PassingError(Exception):
    """What another try may not meet, after at least so many seconds."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"the judge's key is to be in the environment variable {variable}, which is not set")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment variable {variable} holds no key: there are odd characters in it")
    return key


def _seconds(wait: str | None) -> float:
    """What a Retry-After header says in seconds; its other form, a date, is left to the pauses."""
    return float(wait) if wait is not None and wait.isascii() and wait.isdecimal() else 0.0


def _in_a_line(text: str) -> str:
    return " ".join(text.split())[:200]
