"""Scaling laws of looped models fitted to runs: what a loop is worth in parameters, and what each loop adds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import product

import numpy as np
from scipy.optimize import least_squares

_PER = 1e5  # parameters and tokens are counted in hundred thousands
_HUBER = 0.02  # log residuals beyond this count linearly
_RESAMPLES = 200

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A held-out loss of one run.

    once, recurrent: parameters that a token visits once, and those visited `loops` times · tokens: trained on
    run: which run it is from; a bootstrap draws whole runs.
    """

    loss: float
    once: float
    recurrent: float
    loops: float
    tokens: float
    run: int


@dataclass(frozen=True, kw_only=True)
class Law:
    """A form of loss: the names of its parameters, what they predict for points, and where to begin searching.

    Coefficients and exponents are searched by their logarithms, so they are positive; only phi is searched as it is.
    """

    names: tuple[str, ...]
    predict: Callable[[np.ndarray, Columns], np.ndarray]
    starts: Callable[[float], list[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Parameters by name, how far the points lie off in log loss (root mean square), and a bootstrap's draws by name.

    Coefficients are those of parameters and tokens counted in hundred thousands.
    """

    values: dict[str, float]
    error: float
    draws: dict[str, np.ndarray]

    def interval(self, name: str, share: float = 0.95) -> tuple[float, float]:
        """The central `share` of the bootstrap's draws of one parameter."""
        low, high = np.quantile(self.draws[name], [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)


def fit_law(law: Law, points: Sequence[Measured], resamples: int = _RESAMPLES, seed: int = 0) -> Fit:
    """The law's parameters with the least Huber loss of log residuals (as Chinchilla's, arXiv 2203.15556).

    The best of several starts; the bootstrap draws runs with replacement and refits each draw from there.
    """
    columns = {field.name: np.array([getattr(point, field.name) for point in points]) for field in fields(Measured)}
    starts = law.starts(float(columns["loss"].min()))
    best = min((_search(law, columns, start) for start in starts), key=lambda theta: _huber(_off(law, columns, theta)))
    runs = [np.flatnonzero(columns["run"] == run) for run in np.unique(columns["run"])]
    generator = np.random.default_rng(seed)
    draws = []
    for _ in range(resamples):
        drawn = np.concatenate([runs[index] for index in generator.integers(len(runs), size=len(runs))])
        draws.append(_own(law, _search(law, {name: column[drawn] for name, column in columns.items()}, best)))
    return Fit(
        values=_own(law, best),
        error=float(np.sqrt((_off(law, columns, best) ** 2).mean())),
        draws={name: np.array([draw[name] for draw in draws]) for name in law.names},
    )


def effective_parameters(once: np.ndarray, recurrent: np.ndarray, loops: np.ndarray, phi: float) -> np.ndarray:
    """N_once + r^phi N_rec."""
    return once + loops**phi * recurrent


def _iso_depth(theta: np.ndarray, columns: Columns) -> np.ndarray:
    floor, *terms, phi = theta
    parameters = effective_parameters(columns["once"], columns["recurrent"], columns["loops"], phi)
    return np.exp(floor) + _powers(terms, parameters / _PER, columns["tokens"] / _PER)


def _per_loop(theta: np.ndarray, columns: Columns) -> np.ndarray:
    floor, *terms = theta
    parameters = columns["once"] + columns["recurrent"]
    return np.exp(floor) + _powers(terms, parameters / _PER, columns["tokens"] / _PER, columns["loops"])


def _powers(terms: Sequence[float], *axes: np.ndarray) -> np.ndarray:
    """The sum of factor x^(-exponent), by the logarithms of each axis's factor and exponent."""
    pairs = zip(terms[::2], terms[1::2], axes, strict=True)
    with np.errstate(over="ignore"):  # a step that long is not taken
        return sum((np.exp(factor - np.exp(power) * np.log(x)) for factor, power, x in pairs), np.zeros(len(axes[0])))


def _starts(least: float, terms: int, tails: Sequence[list[float]]) -> list[np.ndarray]:
    """Half of the least loss as the floor, the rest shared by the terms, whose exponents are slow or fast."""
    share = np.log(least / 2 / terms)
    return [
        np.array([np.log(least / 2), *(value for power in powers for value in (share, np.log(power))), *tail])
        for powers in product((0.2, 0.6), repeat=terms)
        for tail in tails
    ]


# L = E + A (N_once + r^phi N_rec)^-alpha + B D^-beta (iso-depth scaling, arXiv 2604.21106).
ISO_DEPTH = Law(
    names=("E", "A", "alpha", "B", "beta", "phi"),
    predict=_iso_depth,
    starts=lambda least: _starts(least, 2, [[0.0], [0.5], [1.0]]),
)
# The loss read at loop t: L = E + A N^-alpha + B D^-beta + C t^-gamma, a simple form (after Ouro, arXiv 2510.25741).
PER_LOOP = Law(
    names=("E", "A", "alpha", "B", "beta", "C", "gamma"),
    predict=_per_loop,
    starts=lambda least: _starts(least, 3, [[]]),
)


def _own(law: Law, theta: np.ndarray) -> dict[str, float]:
    """Parameters by name, in their own units."""
    pairs = zip(law.names, theta, strict=True)
    return {name: float(value if name == "phi" else np.exp(value)) for name, value in pairs}


def _off(law: Law, columns: Columns, theta: np.ndarray) -> np.ndarray:
    return np.log(law.predict(theta, columns)) - np.log(columns["loss"])


def _search(law: Law, columns: Columns, theta: np.ndarray) -> np.ndarray:
    """The nearest least Huber loss from `theta`."""
    return least_squares(lambda tried: _off(law, columns, tried), theta, loss="huber", f_scale=_HUBER).x


def _huber(errors: np.ndarray) -> float:
    size = np.abs(errors)
    return float(np.where(size <= _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum())
