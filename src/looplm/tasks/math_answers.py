"""Mathematical answers marked by math-verify in processes that can be killed."""

import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from looplm.tasks.answers import lightly_normalised, spelt_alike

_SCRIPT = Path(__file__).with_name("math_worker.py")
_START = 300.0  # seconds that a process may take to import math-verify


@dataclass(frozen=True, kw_only=True)
class GradeCounts:
    """What became of every answer, each counted once; all but `right` and `unreadable` were marked 0.

    unanswered: there was no answer. unreadable: the gold is no expression, so that nothing was marked. errors:
    math-verify raised. hangs: it took longer than the limit. deaths: its process ended.
    """

    right: int = 0
    wrong: int = 0
    unanswered: int = 0
    unreadable: int = 0
    errors: int = 0
    hangs: int = 0
    deaths: int = 0


class MathGrader:
    """Marks answers by math-verify in `workers` processes, each killed and replaced if an answer takes over `limit` s.

    Can be called from any thread. No process outlives `close`, which happens by itself when the grader is no longer
    used or Python ends.

    Raises:
        ValueError: if math-verify is not installed, or for less than one worker or a limit that is not positive.
    """

    def __init__(self, workers: int = 2, limit: float = 5.0) -> None:
        if workers < 1 or not limit > 0:
            raise ValueError(f"marking needs at least one worker and a limit above 0, got {workers} and {limit}")
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "math answers are marked with math-verify, which is not installed; pip install 'looplm[eval]'"
            )
        self._workers = [_Worker(limit) for _ in range(workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="math-verify")
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, self._threads, self._workers)

    def grade(self, golds: Sequence[str], answers: Sequence[str | None]) -> list[float | None]:
        """1.0 where an answer means the same as its gold, else 0.0; None where the gold cannot be read.

        Compared are, until two agree: the raw strings by math-verify; both lightly normalised by math-verify; the
        strings after full normalisation; numbers within 1e-6 (RLTT, arXiv 2602.10520). None as an answer is wrong.

        Raises:
            ValueError: if the grader is closed, or its processes do not start.
        """
        if not self._end.alive:
            raise ValueError("this grader was closed; make another")
        return list(self._threads.map(self._mark, golds, answers))

    def drain(self) -> GradeCounts:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return GradeCounts(**counts)

    def close(self) -> None:
        """End the processes."""
        self._end()

    def __enter__(self) -> "MathGrader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _mark(self, gold: str, answer: str | None) -> float | None:
        worker = self._idle.get()
        try:
            found = worker.ask([_spellings(gold), None if answer is None else _spellings(answer)])
        finally:
            self._idle.put(worker)
        if found not in ("right", "unreadable") and answer is not None and spelt_alike(gold, answer):
            found = "right"
        with self._lock:
            self._counts[found] += 1
        return None if found == "unreadable" else float(found == "right")


class _Worker:
    """A process that compares one pair of answers at a time; a new one takes its place when it hangs or dies."""

    def __init__(self, limit: float) -> None:
        self._limit, self._closed, self._lock = limit, False, threading.Lock()
        self._start()

    def ask(self, request: list) -> str:
        """The verdict of the process, else "hangs" or "deaths"."""
        if not self._ready:
            self._wait()
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
            found = self._pipe.recv_bytes().decode() if self._pipe.poll(self._limit) else "hangs"
        except (EOFError, OSError):
            found = "deaths"
        if found in ("hangs", "deaths"):
            self._replace()
        return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stop()

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        place = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(place), str(self._limit)],
            pass_fds=[place], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        self._ready = False

    def _wait(self) -> None:
        try:
            self._ready = self._pipe.poll(_START) and bool(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._ready = False
        if not self._ready:
            self._replace()
            raise ValueError(f"the process that runs math-verify does not start; see what {sys.executable} prints")

    def _replace(self) -> None:
        with self._lock:
            self._stop()
            if not self._closed:
                self._start()

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def _end(threads: ThreadPoolExecutor, workers: list[_Worker]) -> None:
    for worker in workers:
        worker.close()
    threads.shutdown(wait=False, cancel_futures=True)


def _spellings(answer: str) -> list[str]:
    return [answer, lightly_normalised(answer)]
