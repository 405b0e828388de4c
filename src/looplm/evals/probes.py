"""Linear probes: how well the hidden state after every visit of a layer foretells an answer (Ouro, section 7.2)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

Place = tuple[int, int]  # loop (0 in the prelude) and layer, from 1


@dataclass(frozen=True, kw_only=True)
class Probing:
    """How probes are trained.

    seeds: splits into a training and a held-out part (a share `held_out`), each with both answers in equal shares
    strength: scikit-learn's C, the inverse of the regularisation.
    """

    seeds: int = 5
    held_out: float = 0.3
    strength: float = 1.0

    def __post_init__(self) -> None:
        if self.seeds < 2 or not 0 < self.held_out < 1 or not self.strength > 0:
            raise ValueError(f"{self}: seeds must be 2 or more, held_out in (0, 1), strength above 0")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """ROC AUC on held-out items of the probes after one visit of a layer: the mean, its 95 % interval, each seed's."""

    loop: int
    layer: int
    auc: float
    low: float
    high: float
    by_seed: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Probes of every visit, in order of time, that foretell `target`; it holds for the share `positive` of items."""

    target: str
    positive: float
    probes: tuple[Probe, ...]


def probe_curve(
    states: Mapping[Place, np.ndarray], target: np.ndarray, name: str, probing: Probing | None = None
) -> Curve:  # fmt: skip
    """Probes on states [N, D] of every visit, by loop and layer, that foretell the booleans `target` [N].

    Each is a logistic regression on features standardised by the training part.

    Raises:
        ValueError: if one of the two answers is too rare to be split.
    """
    probing = probing or Probing()
    if too_rare := one_sided(target, probing):
        raise ValueError(f"{name}: {too_rare}")
    probes = [_probe(place, features, target, probing) for place, features in states.items()]
    return Curve(target=name, positive=float(target.mean()), probes=tuple(probes))


def one_sided(target: np.ndarray, probing: Probing) -> str | None:
    """Why probes for the booleans `target` [N] cannot be, if so: either part of a split needs two of each answer."""
    fewest = math.ceil(2 / min(probing.held_out, 1 - probing.held_out))
    rarer = int(min(target.sum(), (~target).sum()))
    return None if rarer >= fewest else f"the rarer answer is given {rarer} times in {len(target)}, not {fewest}"


def resampled_interval(values: Sequence[float], held_out: float) -> tuple[float, float]:
    """The 95 % interval of a mean over random splits, within [0, 1].

    Splits share items, so the variance of the mean is s^2 (1 / splits + held-out / training items), the correction of
    Nadeau and Bengio (2003), in Student's t.
    """
    spread = np.std(values, ddof=1) * np.sqrt(1 / len(values) + held_out / (1 - held_out))
    margin = student.ppf(0.975, len(values) - 1) * spread
    return float(max(0.0, np.mean(values) - margin)), float(min(1.0, np.mean(values) + margin))


def _probe(place: Place, features: np.ndarray, target: np.ndarray, probing: Probing) -> Probe:
    aucs = tuple(_auc(features, target, seed, probing) for seed in range(probing.seeds))
    low, high = resampled_interval(aucs, probing.held_out)
    return Probe(loop=place[0], layer=place[1], auc=float(np.mean(aucs)), low=low, high=high, by_seed=aucs)


def _auc(features: np.ndarray, target: np.ndarray, seed: int, probing: Probing) -> float:
    train, test, train_target, test_target = train_test_split(
        features, target, test_size=probing.held_out, random_state=seed, stratify=target
    )
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=probing.strength, max_iter=2000))
    return float(roc_auc_score(test_target, probe.fit(train, train_target).decision_function(test)))
