"""The looped model: config, parts, verbs, the transformers doorway, loading, saving and accounting."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from looplm.models.backbone import LoopLMModel
from looplm.models.causal_lm import LoopLMForCausalLM
from looplm.models.checkpoint import load, save
from looplm.models.config import LoopLMConfig
from looplm.models.outputs import LoopModelOutput, LoopOutput, Trace

__all__ = ["LoopLMConfig", "LoopLMForCausalLM", "LoopLMModel", "LoopModelOutput", "LoopOutput", "Trace", "load", "save"]


def _register() -> None:
    """Make transformers' Auto classes open our folders; it has no other hook than being imported."""
    AutoConfig.register(LoopLMConfig.model_type, LoopLMConfig, exist_ok=True)
    AutoModel.register(LoopLMConfig, LoopLMModel, exist_ok=True)
    AutoModelForCausalLM.register(LoopLMConfig, LoopLMForCausalLM, exist_ok=True)


_register()
