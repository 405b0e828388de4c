"""Averages of weights: exponential over the steps of a run, or over its checkpoints."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from looplm.data.tokenizer import load_tokenizer
from looplm.models import load, save
from looplm.models.precision import at_least_float32


@dataclass(frozen=True, kw_only=True)
class EmaSettings:
    """After each step, average = decay * average + (1 - decay) * weights; it starts at the weights themselves."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay} must lie between 0 and 1, 1 excluded; 0.999 averages some 1000 steps")


class Ema:
    """The exponential average of a model's trainable weights, by name, in at least float32, sharded as they are."""

    def __init__(self, model: nn.Module, settings: EmaSettings) -> None:
        self.settings = settings
        self.averages = {
            name: at_least_float32(parameter.detach()).clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights of `model` after a step."""
        parameters = dict(model.named_parameters())
        for name, average in self.averages.items():
            average.lerp_(parameters[name].to(average.dtype), 1 - self.settings.decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Generator[None]:
        """Inside, `model` holds the averages; afterwards its own weights again, bit for bit."""
        parameters = dict(model.named_parameters())
        own = {name: parameters[name].detach().clone() for name in self.averages}
        _copy(self.averages, parameters)
        try:
            yield
        finally:
            _copy(own, parameters)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return dict(self.averages)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put averages back.

        Raises:
            ValueError: if their names are not those of this model's trainable parameters.
        """
        odd = sorted(set(state) ^ set(self.averages))
        if odd:
            where = "is not trained here" if odd[0] in state else "is missing"
            raise ValueError(f"the stored average of {odd[0]} {where}; resume with the recipe that stored it")
        _copy(state, self.averages)


def dilated(folders: Sequence[Path], last: int = 75, dilation: int = 7) -> list[Path]:
    """Of the `last` newest checkpoints every `dilation`-th, counted back from the newest; oldest first, as they come.

    The defaults are Huginn's (arXiv 2502.05171): 11 of 75.
    """
    if last < 1 or dilation < 1:
        raise ValueError(f"last={last} and dilation={dilation} must be at least 1")
    return list(folders[-last:])[::-1][::dilation][::-1]


def average_checkpoints(folders: Sequence[Path], beta: float = 0.9) -> dict[str, Tensor]:
    """The mean of checkpoints, oldest first, with weights beta^age: the newest has age 0, and they sum to 1.

    One checkpoint is read at a time; the result is float32, under the names of a model's `state_dict`.

    Raises:
        ValueError: if there is no checkpoint, one cannot be read, or its tensors differ from the first one's.
    """
    if not folders:
        raise ValueError("there is no checkpoint to average")
    if not 0 < beta <= 1:
        raise ValueError(f"beta={beta} must be above 0 and at most 1, which is the plain mean")
    averages: dict[str, Tensor] = {}
    total = 0.0
    for folder in folders:
        state = load(folder).state_dict()
        total = beta * total + 1
        averages = averages or {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        if {name: t.shape for name, t in state.items()} != {name: t.shape for name, t in averages.items()}:
            raise ValueError(f"{folder} holds another model than {folders[0]}; average checkpoints of one run")
        for name, average in averages.items():
            average.lerp_(state[name], 1 / total)
    return averages


def write_average(
    folders: Sequence[Path], out: Path, beta: float = 0.9, last: int = 75, dilation: int = 7
) -> list[Path]:
    """Write the dilated average of a run's checkpoints (oldest first) as a model folder; the checkpoints that went in.

    Config and tokenizer are the newest checkpoint's.

    Raises:
        ValueError: if `out` is anything but an empty folder, or a checkpoint is unusable; nothing is written then.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already and is no empty folder; give another one")
    chosen = dilated(folders, last, dilation)
    averages = average_checkpoints(chosen, beta)
    model, tokenizer = load(chosen[-1]), load_tokenizer(chosen[-1])
    model.load_state_dict(averages)
    save(model, out)
    tokenizer.save_pretrained(out)
    return chosen


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
