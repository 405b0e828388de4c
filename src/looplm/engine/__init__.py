"""The engine: continuous batching by loops, depth policies, key/value sharing, self-speculation, drafts in parallel."""

from looplm.engine.calibration import Calibration, calibrate, load_calibration, save_calibration
from looplm.engine.criteria import (
    ArgmaxStable,
    Certificate,
    CosineConverged,
    EntropyBelow,
    EntropyDifference,
    LogitsKL,
    Margin,
    MinPKL,
    SecondDifference,
    StateConverged,
    StepBelow,
)
from looplm.engine.engine import Engine
from looplm.engine.intake import Options
from looplm.engine.kv_policies import AdjacentKV, AveragedKV, FirstKV, FullKV, KVPolicy, RingKV
from looplm.engine.parallel import ParallelSampler, ParallelSettings
from looplm.engine.policies import AnyOf, DepthPolicy, ExitCDF, ExitSampled, FixedLoops, GateAbove, LookAhead
from looplm.engine.requests import Completion, Request, TokenEvent
from looplm.engine.sampling import SamplingParams
from looplm.engine.speculation import Speculation
from looplm.engine.stats import Stats

__all__ = [
    "AdjacentKV",
    "AnyOf",
    "ArgmaxStable",
    "AveragedKV",
    "Calibration",
    "Certificate",
    "Completion",
    "CosineConverged",
    "DepthPolicy",
    "Engine",
    "EntropyBelow",
    "EntropyDifference",
    "ExitCDF",
    "ExitSampled",
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
    "ParallelSampler",
    "ParallelSettings",
    "Request",
    "RingKV",
    "SamplingParams",
    "SecondDifference",
    "Speculation",
    "StateConverged",
    "Stats",
    "StepBelow",
    "TokenEvent",
    "calibrate",
    "load_calibration",
    "save_calibration",
]
