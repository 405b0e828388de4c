"""A user's mistake ends in one line and exit code 1, never in a traceback."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130  # the exit code of a run that Ctrl-C stopped

# The package whose absence means that an extra is not installed.
_EXTRAS = {
    "omegaconf": "train",
    "pydantic": "train",
    "tensorboard": "train",
    "torchdata": "train",
    "peft": "lora",
    "datasets": "data",
    "matplotlib": "studies",
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
        typer.echo(f"looplm: {message}", err=True)
        raise typer.Exit(1)

    return wrapped
