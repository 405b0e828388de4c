"""Whether our scores are those of lm-eval's own `hf` model, on a checkpoint that both can load."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM

from looplm.evals.harness import Protocol, run_at
from looplm.evals.lm import LoopLM, Reader


@dataclass(frozen=True, kw_only=True)
class Parity:
    """A metric of a task by both, and how far their answers lie apart.

    furthest: nats between two log-likelihoods of the same request, at most; of generated texts the share that differ.
    """

    task: str
    metric: str
    items: int
    looplm: float
    hf: float
    difference: float
    furthest: float


def parity(reader: Reader, folder: Path, tasks: Mapping[str, Any], protocol: Protocol) -> list[Parity]:
    """Every metric of `tasks` by `LoopLM` and by `HFLM`, which loads `folder` in float32 on CPU.

    `reader` is that checkpoint in float32 on CPU, at one depth: its own loops.

    Raises:
        ValueError: if transformers cannot load the checkpoint, or the two were asked different things.
    """
    try:
        theirs = HFLM(pretrained=str(folder), batch_size=reader.batch_size, device="cpu", dtype="float32")
    except (OSError, ValueError, KeyError) as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"transformers cannot load {folder} ({line}); parity needs a checkpoint of its own") from error
    found = []
    for number, (name, lm) in enumerate((("looplm", LoopLM(reader)), ("lm-eval's hf model", theirs))):
        reader.advance(name, number, 2)
        found.append(run_at(lm, tasks, protocol))
    return [row for name in tasks for row in _rows(name, *found)]


def _rows(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Parity]:
    mine, others = ours["samples"][name], theirs["samples"][name]
    if [one["arguments"] for one in mine] != [one["arguments"] for one in others]:
        raise ValueError(f"{name}: the two models were asked different things; does the task draw at random?")
    furthest = _furthest(
        [a for one in mine for a in one["resps"]], [a for one in others for a in one["resps"]]
    )  # fmt: skip
    values = {key: value for key, value in ours["results"][name].items() if "," in key and "_stderr," not in key}
    return [
        Parity(
            task=name, metric=key.removesuffix(",none"), items=len({one["doc_id"] for one in mine}), looplm=value,
            hf=theirs["results"][name][key], difference=abs(value - theirs["results"][name][key]), furthest=furthest,
        )
        for key, value in values.items()
        if isinstance(value, float)
    ]  # fmt: skip


def _furthest(mine: list[Any], others: list[Any]) -> float:
    pairs = [(a, b) for some, other in zip(mine, others, strict=True) for a, b in zip(some, other, strict=True)]
    if isinstance(pairs[0][0], str):
        return sum(a != b for a, b in pairs) / len(pairs)
    return max(abs(_nats(a) - _nats(b)) for a, b in pairs)


def _nats(answer: Any) -> float:
    return answer[0] if isinstance(answer, tuple) else answer
