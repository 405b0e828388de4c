"""Registration with transformers' Auto classes, so that they open our folders and the released ones natively."""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from looplm.models.backbone import LoopLMModel
from looplm.models.causal_lm import LoopLMForCausalLM
from looplm.models.config import LoopLMConfig
from looplm.models.reading import FOREIGN


class _TranslatedConfig(LoopLMConfig):
    """A released family's config.json; what comes out is our config."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Translate, then go on as transformers does for ours."""
        own = {key: value for key, value in config_dict.items() if not key.startswith("_")}
        return LoopLMConfig.from_dict(FOREIGN[cls.model_type].read_config(own).to_dict(), **kwargs)


class OuroConfig(_TranslatedConfig):
    """`model_type: ouro`."""

    model_type = "ouro"


class HuginnConfig(_TranslatedConfig):
    """`model_type: huginn_raven`."""

    model_type = "huginn_raven"


def register() -> None:
    """Make the Auto classes know looplm, Ouro and Huginn; transformers has no other hook than being imported."""
    AutoConfig.register(LoopLMConfig.model_type, LoopLMConfig, exist_ok=True)
    for config_class in (OuroConfig, HuginnConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModel.register(LoopLMConfig, LoopLMModel, exist_ok=True)
    AutoModelForCausalLM.register(LoopLMConfig, LoopLMForCausalLM, exist_ok=True)
