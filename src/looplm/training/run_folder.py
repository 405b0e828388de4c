"""A run's folder: one set of processes at a time, and one recipe as soon as it holds a checkpoint."""

import errno
import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from looplm.training.checkpoints import clear_unfinished, complete_checkpoints
from looplm.training.distribution import World
from looplm.training.logs import clear_log
from looplm.training.recipe import RunSettings, resolved
from looplm.training.schedules import Constant

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None

_LOCK, _RECIPE = "lock", "recipe.json"


@contextmanager
def alone_in(folder: Path, world: World) -> Generator[None]:
    """Inside, no other run's processes train in `folder`; without anything written there it is gone afterwards.

    The leading process holds a POSIX record lock: it ends with its process, however that dies, and no data worker
    inherits it.

    Raises:
        ValueError: if another process holds the folder, or locks are not to be had there; on every process alike.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    descriptor = world.led(lambda: _lock(folder))
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # somebody has removed it, or put something there
                if os.listdir(folder) == [_LOCK]:
                    (folder / _LOCK).unlink()
                    for place in missing:
                        place.rmdir()
            os.close(descriptor)


def refuse_another(folder: Path, recipe: RunSettings) -> None:
    """Let `recipe` pass if it may train in `folder`: the run there is its own, or has saved nothing.

    Raises:
        ValueError: if the folder holds a checkpoint of another recipe, naming what differs, or its recipe.json is
            damaged.
    """
    held = folder / _RECIPE
    if not held.exists() or not complete_checkpoints(folder / "checkpoints"):
        return
    lasting = isinstance(recipe.schedule, Constant)  # no step's rate depends on how many there will be
    apart = (*recipe.free_fields, "steps") if lasting else recipe.free_fields
    before, now = _without(_read(held), apart), _without(resolved(recipe), apart)
    if before != now:
        changed = _first_difference(before, now)
        why = f", and every rate of schedule '{recipe.schedule.kind}' may depend on it" if changed == "steps" else ""
        raise ValueError(
            f"{folder} holds a run of another recipe ({changed} differs{why}); give another out= or remove it"
        )


def claim(folder: Path, recipe: RunSettings) -> None:
    """Make `folder` the run's of `recipe`: its recipe.json, and nothing of saves or of a run that came to nothing."""
    held, checkpoints = folder / _RECIPE, folder / "checkpoints"
    if held.exists() and not complete_checkpoints(checkpoints):
        clear_log(folder)
    checkpoints.mkdir(parents=True, exist_ok=True)
    clear_unfinished(checkpoints)
    aside = held.with_suffix(".partial")
    aside.write_text(json.dumps(resolved(recipe), indent=2) + "\n")
    os.replace(aside, held)


def _lock(folder: Path) -> int:
    """The open lock file of `folder`, which is made."""
    if fcntl is None:
        raise ValueError(
            f"{folder} cannot be kept from other processes: that takes POSIX locks; train on Linux or macOS"
        )
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"another process trains in {folder}; wait for its end, or give another out="
                ) from error
            raise ValueError(
                f"{folder} lies where files cannot be locked ({error.strerror}); give another out="
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / _LOCK)):
                return descriptor
        os.close(descriptor)  # a process that wrote nothing has just removed it


def _read(held: Path) -> dict[str, Any]:
    try:
        found = json.loads(held.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{held} is damaged; remove {held.parent} or give another out=")
    return found


def _without(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Nested values without what lies under the dotted `keys`."""
    kept = {}
    for name, value in values.items():
        if name not in keys:
            below = [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]
            kept[name] = _without(value, below) if below and isinstance(value, dict) else value
    return kept


def _first_difference(before: Any, now: Any, where: str = "") -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        absent = object()
        key = next(key for key in sorted({*before, *now}) if before.get(key, absent) != now.get(key, absent))
        return _first_difference(before.get(key), now.get(key), f"{where}.{key}".lstrip("."))
    return where
