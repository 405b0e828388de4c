"""The engine: continuous batching by loops, depth policies, key/value sharing, self-speculation."""

from looplm.engine.engine import Engine, Stats
from looplm.engine.intake import Options
from looplm.engine.kv_policies import AdjacentKV, AveragedKV, FirstKV, FullKV, KVPolicy, RingKV
from looplm.engine.policies import (
    AnyOf,
    ArgmaxStable,
    Certificate,
    CosineConverged,
    DepthPolicy,
    EntropyBelow,
    EntropyDifference,
    ExitCDF,
    FixedLoops,
    GateAbove,
    LogitsKL,
    LookAhead,
    Margin,
    MinPKL,
    SecondDifference,
    StateConverged,
    StepBelow,
)
from looplm.engine.requests import Completion, Request, TokenEvent
from looplm.engine.sampling import SamplingParams
from looplm.engine.speculation import Speculation

__all__ = [
    "AdjacentKV",
    "AnyOf",
    "ArgmaxStable",
    "AveragedKV",
    "Certificate",
    "Completion",
    "CosineConverged",
    "DepthPolicy",
    "Engine",
    "EntropyBelow",
    "EntropyDifference",
    "ExitCDF",
    "FirstKV",
    "FixedLoops",
    "FullKV",
    "GateAbove",
    "KVPolicy",
    "LogitsKL",
    "LookAhead",
    "Margin",
    "MinPKL",
    "Options",
    "Request",
    "RingKV",
    "SamplingParams",
    "SecondDifference",
    "Speculation",
    "StateConverged",
    "Stats",
    "StepBelow",
    "TokenEvent",
]
