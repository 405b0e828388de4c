"""Which evaluation data are on this machine, and how to get the others."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from looplm.evals.benchmark_data import find_split, how_to_get
from looplm.evals.benchmarks import Description, benchmark_names, describe
from looplm.evals.data_sets import CODE
from looplm.evals.harmful_prompts import strongreject_prompts
from looplm.evals.own_tasks import OWN, questions
from looplm.evals.pairs import mrpc


@dataclass(frozen=True, kw_only=True)
class Found:
    """A benchmark: what it would be run on, or else what is to be done to have it; `verb` is the command for it."""

    name: str
    verb: str
    here: Description | None = None
    missing: str = ""


def survey(folder: Path | None = None) -> list[Found]:
    """Every benchmark, its records looked for in the user's folder and in packages.

    Raises:
        ValueError: if the folder does not exist.
    """
    if folder is not None and not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return [
        *(_looked(name, "eval", lambda name=name: describe(name, folder)) for name in benchmark_names()),
        *(_looked(name, "eval", lambda name=name: _own(name)) for name in OWN),
        *(_looked(name, "eval code", lambda name=name: _code(name, folder)) for name in CODE),
        _looked("MRPC", "eval faithful", _pairs),
        _looked("StrongREJECT", "eval safety", _prompts),
    ]


def _looked(name: str, verb: str, look: Callable[[], Description]) -> Found:
    found = Found(name=name, verb=verb)
    try:
        return replace(found, here=look())
    except ValueError as error:
        return replace(found, missing=str(error))


def _own(name: str) -> Description:
    return _description(name, "test", len(questions(name)), "looplm.tasks", "Apache-2.0", "")


def _code(name: str, folder: Path | None) -> Description:
    split = find_split(CODE[name], name, "test", folder)
    if split is None:
        raise ValueError(f"{name} has no problems here: {how_to_get(CODE[name], name, 'test', folder)}")
    return _description(name, "test", len(split.rows()), split.origin, CODE[name].licence, split.note)


def _pairs() -> Description:
    found = mrpc()
    return _description("MRPC", "validation", len(found.pairs), found.source, "not stated", "stands in for QQP")


def _prompts() -> Description:
    found = strongreject_prompts()
    return _description("StrongREJECT", "", len(found.prompts), found.source, "MIT", "stands in for HEx-PHI")


def _description(name: str, split: str, items: int, origin: str, licence: str, notes: str) -> Description:
    return Description(
        name=name, tasks=1, split=split, items=items, origin=origin, examples="", licence=licence, notes=notes
    )
