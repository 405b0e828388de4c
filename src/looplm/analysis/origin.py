"""Where a recorded result comes from: the command, date, commit and machine that made it."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime

import torch


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a result comes from."""

    command: str
    date: str
    commit: str
    machine: str
    torch: str


def origin(command: str) -> Origin:
    """The origin of a result that is made now by `command`."""
    return Origin(
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        commit=_commit(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, no GPU"
        if not torch.cuda.is_available()
        else torch.cuda.get_device_name(),
        torch=torch.__version__,
    )


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
