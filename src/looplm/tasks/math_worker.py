"""The process that compares answers by math-verify: run as a script, so that nothing of ours is imported with it."""

import contextlib
import json
import logging
import resource
import signal
import sys
from functools import lru_cache
from multiprocessing.connection import Connection

from math_verify import parse, verify

_MEMORY = 4 * 2**30
_GRACE = 2.0  # seconds that the asking process has to end this one first


def serve(pipe: Connection, limit: float) -> None:
    """Answer requests, JSON lists [spellings of the gold, spellings of the answer or null], until the pipe closes.

    Whoever asks ends this process once `limit` seconds have passed; if nobody is left to do so, the alarm does.
    """
    pipe.send_bytes(b"ready")
    while True:
        golds, answers = json.loads(pipe.recv_bytes())
        signal.setitimer(signal.ITIMER_REAL, limit + _GRACE)
        found = verdict(golds, answers).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(found)


def verdict(golds: list[str], answers: list[str] | None) -> str:
    """What math-verify finds, in the words of `GradeCounts`: the first spelling that agrees with its gold decides."""
    if not any(_readable(gold) for gold in golds):
        return "unreadable"
    if answers is None:
        return "unanswered"
    found = "wrong"
    for gold, answer in dict.fromkeys(zip(golds, answers, strict=True)):
        try:
            if verify(_parsed(gold), _parsed(answer), timeout_seconds=None, raise_on_error=True):
                return "right"
        except Exception:
            # One of several comparisons failed; another may still agree.
            if verify(_tolerated(gold), _tolerated(answer), timeout_seconds=None):
                return "right"
            found = "errors"
    return found


@lru_cache(maxsize=256)
def _parsed(answer: str) -> list:
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None, raise_on_error=True)  # ty: ignore[invalid-argument-type]


def _tolerated(answer: str) -> list:
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)  # ty: ignore[invalid-argument-type]


def _readable(gold: str) -> bool:
    """Whether math-verify makes an expression of it; a bare string is its way to say that it could not."""
    return any(not isinstance(found, str) for found in _tolerated(gold))


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    with contextlib.suppress(ValueError, OSError):  # systems that cannot limit it
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which stops when it has saved
    logging.disable()
    _limit_memory()
    with contextlib.suppress(EOFError, OSError):
        serve(Connection(int(sys.argv[1])), float(sys.argv[2]))
