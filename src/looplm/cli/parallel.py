"""`looplm bench parallel`: continuations of real text by drafts in parallel, for several settings."""

from collections.abc import Mapping
from typing import Any

from looplm.cli.paths import open_checkpoint
from looplm.cli.speculation import beginnings
from looplm.data.tokenizer import load_tokenizer
from looplm.engine import ParallelSettings
from looplm.models import load
from looplm.studies.bench_parallel import ParallelRow, bench_parallel


def measure_parallel(
    checkpoint: str, text: str | None, inner_loops: str, thresholds: str, shared: Mapping[str, Any], prompts: int,
    tokens: int, repeats: int,
) -> list[ParallelRow]:  # fmt: skip
    """Every pair of inner loops and threshold on the beginnings of the text's documents, the rest as in `shared`."""
    folder = open_checkpoint(checkpoint)
    chosen = beginnings(load_tokenizer(folder), text, prompts)
    settings = [
        ParallelSettings(inner_loops=inner, threshold=threshold, **shared)
        for inner in _numbers(inner_loops, "--inner-loops", int)
        for threshold in _numbers(thresholds, "--thresholds", float)
    ]
    return bench_parallel(load(folder), chosen, tokens, settings, repeats)


def _numbers(given: str, name: str, kind: type) -> list:
    try:
        return [kind(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"{name} '{given}' is not a list of numbers such as 1,2,4") from None
