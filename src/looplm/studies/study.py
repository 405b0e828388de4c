"""What a study is: runs, what was measured on each, and whether the paper's directions hold."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from matplotlib.figure import Figure

Scale = Literal["paper", "cpu", "smoke"]
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run gave.

    values: numbers that are summed up over seeds · series: curves (x, y), with the same x at every seed
    facts: what the run was: parameters, loops, FLOPs, seconds; the same at every seed but for the seconds.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    series: Mapping[str, Points] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class Job(Protocol):
    """One run: resumes what lies in its folder, and measures; it travels to another process."""

    def __call__(self, folder: Path) -> Outcome:  # noqa: D102
        ...

    def steps(self) -> int:
        """Training steps it takes in all, for a progress bar; 0 where it trains nothing."""
        ...


Results = Mapping[str, Sequence[Outcome]]  # by cell, an outcome for each seed


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a direction of the paper's holds here: by how much, in which unit, over how many seeds."""

    claim: str
    holds: bool
    effect: float
    unit: str
    seeds: int


class Study(ABC):
    """A paper's experiment at three scales: the paper's own, one for two CPU cores, and one that only shows it works.

    claim: what the paper says, with its numbers · setting: what is run here, for the reader of the results
    chance: what guessing gets, in words.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    claim: ClassVar[str]
    setting: ClassVar[str]
    chance: ClassVar[str] = ""

    @abstractmethod
    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """The runs of every cell, one for each seed; a cell of a grid may take fewer."""

    @abstractmethod
    def verdicts(self, results: Results) -> list[Verdict]:
        """Each direction of the paper's, judged."""

    @abstractmethod
    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Figures by name, each with its caption."""

    def rows(self, results: Results) -> Results:
        """The table's rows; the cells by default."""
        return results

    def columns(self, results: Results) -> list[str]:
        """Which values the table shows of its rows, in order; all of them by default."""
        return list(dict.fromkeys(name for found in results.values() for name in found[0].values))


def above(results: Results, value: str, high: str, low: str, claim: str, unit: str = "") -> Verdict:
    """Whether every seed of cell `high` lies above every seed of cell `low`; the effect is the means' difference."""
    ours, theirs = ([outcome.values[value] for outcome in results[cell]] for cell in (high, low))
    effect = sum(ours) / len(ours) - sum(theirs) / len(theirs)
    return Verdict(
        claim=claim, holds=min(ours) > max(theirs), effect=effect, unit=unit, seeds=min(len(ours), len(theirs))
    )


def within(results: Results, cell: str, high: str, low: str, claim: str, unit: str = "") -> Verdict:
    """As `above`, of two values of one cell."""
    ours, theirs = ([outcome.values[name] for outcome in results[cell]] for name in (high, low))
    effect = sum(ours) / len(ours) - sum(theirs) / len(theirs)
    return Verdict(claim=claim, holds=min(ours) > max(theirs), effect=effect, unit=unit, seeds=len(ours))
