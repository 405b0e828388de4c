"""Programs that nobody has read, each run in a process of its own that can harm nothing but its own verdict."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

_KEEPER = Path(__file__).with_name("sandbox_keeper.py")
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))  # of an environment, the Python below it
_GRACE = 60.0  # seconds for all but the program

Isolation = Literal["namespaces", "limits"]
Outcome = Literal["passed", "failed", "timed out", "out of memory", "crashed"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    cpu_seconds: of each process; this usually decides, since a busy machine hardly changes it (the published harnesses
    give 3 s by the clock, RLTT 5) · wall_seconds: of the whole program · memory: bytes of addresses of each process,
    and of what all hold · disk: bytes of all its files (of each, under isolation "limits") · processes: with threads
    (not under "limits") · files: open in a process · output: bytes kept of what it prints; the rest is dropped.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 30.0
    memory: int = 2**30
    disk: int = 2**25
    processes: int = 64
    files: int = 64
    output: int = 2**12

    def __post_init__(self) -> None:
        """Refuse what is not positive.

        Raises:
            ValueError: naming it.
        """
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"a program's limit {name} must be above 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a program ended: its outcome, why in a line, the start of what it printed, its seconds, how it was kept."""

    outcome: Outcome
    message: str
    output: str
    seconds: float
    isolation: Isolation

    @property
    def passed(self) -> bool:
        """Whether it and its tests came to their end."""
        return self.outcome == "passed"


def run_program(
    source: str, limits: Limits | None = None, *, tests: str = "", isolation: Isolation = "namespaces"
) -> Verdict:
    """Run Python source, then `tests` in the same module, in a fresh interpreter that has the standard library only.

    "passed" needs the end of both, where the process passes on a token that nothing read before. So leaving early,
    printing, or changing built-in names does not count. The tests share the program's process, as in the published
    harnesses: objects that lie when compared pass, and so would a program written against this very file.

    isolation: "namespaces" (Linux 5.14 with user namespaces, as root or not): an unprivileged user in a world without
    network, other processes, or files but Python, the system's libraries (to read) and an empty folder in memory; all
    of it is gone at the end. "limits": your user in an empty folder, with resource limits; audit hooks refuse sockets,
    other processes and changes elsewhere, which stops accidents but not attackers.

    Raises:
        ValueError: if this system does not allow the isolation, or there is none of this name; no program was run.
    """
    if isolation not in get_args(Isolation):
        raise ValueError(f"there is no isolation {isolation!r}, only {' and '.join(get_args(Isolation))}")
    limits = limits or Limits()
    with TemporaryDirectory(prefix="looplm-program-") as folder:
        request = {"source": source, "tests": tests, "isolation": isolation, "folder": os.path.realpath(folder)}
        command = [_PYTHON, "-I", "-S", "-B", str(_KEEPER)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        ) as keeper:
            try:
                said, complaint = keeper.communicate(
                    json.dumps(request | {"limits": asdict(limits)}).encode(), limits.wall_seconds + _GRACE
                )
            except subprocess.TimeoutExpired:
                said, complaint = b'{"ready": true}', b""
            finally:
                keeper.kill()  # the process below it ends when nobody listens any more
    return _verdict(said, complaint, isolation)


def _verdict(said: bytes, complaint: bytes, isolation: Isolation) -> Verdict:
    ready, *rest = [json.loads(line) for line in said.splitlines()] or [{}]
    if not ready.get("ready"):
        reason = ready.get("refused") or (complaint.decode(errors="replace").splitlines() or ["it ended"])[-1]
        raise ValueError(
            f"programs cannot be kept by isolation={isolation!r} here ({reason})"
            + ("; isolation='limits' keeps them by limits and guards only" if isolation == "namespaces" else "")
        )
    if not rest:
        return Verdict(
            outcome="crashed", message="with the process that kept it", output="", seconds=0.0, isolation=isolation
        )
    return Verdict(**rest[0], isolation=isolation)
