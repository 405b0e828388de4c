"""looplm: looped language models, whose depth of thought is chosen at run time."""

import looplm.quiet  # noqa: F401  before anything imports transformers
from looplm.data.tokenizer import load_tokenizer
from looplm.engine import (
    AnyOf,
    Engine,
    EntropyBelow,
    ExitCDF,
    ExitSampled,
    FixedLoops,
    LogitsKL,
    Margin,
    ParallelSampler,
    ParallelSettings,
    SamplingParams,
    SecondDifference,
    Speculation,
    StateConverged,
)
from looplm.models import LoopLMConfig, LoopLMForCausalLM, LoopLMModel, LoopOutput, load, quantize_int8, save

__version__ = "0.1.0"
__all__ = [
    "AnyOf",
    "Engine",
    "EntropyBelow",
    "ExitCDF",
    "ExitSampled",
    "FixedLoops",
    "LogitsKL",
    "LoopLMConfig",
    "LoopLMForCausalLM",
    "LoopLMModel",
    "LoopOutput",
    "Margin",
    "ParallelSampler",
    "ParallelSettings",
    "SamplingParams",
    "SecondDifference",
    "Speculation",
    "StateConverged",
    "__version__",
    "load",
    "load_tokenizer",
    "quantize_int8",
    "save",
]
