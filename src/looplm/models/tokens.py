"""The one answer to which tokens end a text."""

import logging

from looplm.models.causal_lm import LoopLMForCausalLM

_log = logging.getLogger(__name__)


def end_token_ids(model: LoopLMForCausalLM, tokenizer_eos: int | None = None) -> set[int]:
    """The union of the end tokens that the config, the generation config and the tokenizer name.

    Released files disagree (Ouro's config names 0 where its chat template ends turns with 2), so each counts, and a
    disagreement is logged.
    """
    named = {
        "config": model.config.eos_token_id,
        "generation config": model.generation_config.eos_token_id,
        "tokenizer": tokenizer_eos,
    }
    sources = {source: _as_set(ids) for source, ids in named.items() if ids is not None}
    found = set().union(*sources.values())
    if any(ids != found for ids in sources.values()):
        told = ", ".join(f"{source} {sorted(ids)}" for source, ids in sources.items())
        _log.warning("end tokens differ (%s); each of %s ends a text", told, sorted(found))
    return found


def _as_set(ids: int | list[int]) -> set[int]:
    return {ids} if isinstance(ids, int) else set(ids)
