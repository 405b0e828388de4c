"""looplm: looped language models, whose depth of thought is chosen at run time."""

from looplm.data.tokenizer import load_tokenizer
from looplm.models import LoopLMConfig, LoopLMForCausalLM, LoopLMModel, LoopOutput, load, save

__version__ = "0.1.0"
__all__ = [
    "LoopLMConfig",
    "LoopLMForCausalLM",
    "LoopLMModel",
    "LoopOutput",
    "__version__",
    "load",
    "load_tokenizer",
    "save",
]
