"""A user's mistake ends in one line and exit code 1, never in a traceback."""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130  # the exit code of a run that Ctrl-C stopped

_LAST_WORD = "looplm/last word"
_PATIENCE = timedelta(seconds=10)

# The package whose absence means that an extra is not installed.
_EXTRAS = {
    "omegaconf": "train",
    "pydantic": "train",
    "tensorboard": "train",
    "torchdata": "train",
    "peft": "lora",
    "datasets": "data",
    "matplotlib": "studies",
    "scipy": "studies",
    "lm_eval": "eval",
    "sklearn": "eval",
    "gguf": "eval",
    "math_verify": "eval",
    "httpx2": "eval",
    "accelerate": "eval",
}


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """`command`, with bad input, unusable files and missing extras reported in one line."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get((error.name or "").split(".")[0])
            if extra is None:
                raise
            message = f"this command needs the '{extra}' extra: pip install 'looplm[{extra}]' (no module {error.name})"
        except (ValueError, OSError) as error:
            message = " ".join(str(error).split()) or type(error).__name__
        complain(message)
        raise typer.Exit(1)

    return wrapped


def complain(message: str) -> None:
    """Print `message` as a line of looplm's: once where all processes of torchrun end by it, else by its rank."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        typer.echo(f"looplm: {message}", err=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not _said_by_the_first(message, rank):
        typer.echo(f"looplm: rank {rank}: {message}", err=True)


def _said_by_the_first(message: str, rank: int) -> bool:
    """Whether process 0 ends by this message, too; the others wait for its word, and it leaves it where they look."""
    from torch.distributed.rendezvous import rendezvous

    try:
        store, *_ = next(rendezvous("env://", timeout=_PATIENCE))
        if rank == 0:
            store.set(_LAST_WORD, message)
        return rank == 0 or store.get(_LAST_WORD).decode() == message
    except (RuntimeError, ValueError):  # it goes on, has gone already, or nobody keeps a store
        return rank == 0
