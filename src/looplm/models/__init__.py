"""The looped model: config, parts, verbs, the transformers doorway, loading, saving and accounting."""

from looplm.models.auto import register
from looplm.models.backbone import LoopLMModel
from looplm.models.causal_lm import LoopLMForCausalLM
from looplm.models.checkpoint import load, save
from looplm.models.config import LoopLMConfig
from looplm.models.int8 import quantize_int8
from looplm.models.outputs import LoopModelOutput, LoopOutput, Trace

__all__ = [
    "LoopLMConfig",
    "LoopLMForCausalLM",
    "LoopLMModel",
    "LoopModelOutput",
    "LoopOutput",
    "Trace",
    "load",
    "quantize_int8",
    "save",
]

register()
