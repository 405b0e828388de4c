"""Judges' verdicts as marks, and what decides a judged result."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedTokenizerFast

from looplm.data.tokenizer import fingerprint
from looplm.evals.conversation import Speaking
from looplm.evals.judge import Judge
from looplm.evals.results import digest
from looplm.evals.verdicts import Scale
from looplm.models import LoopLMForCausalLM

UNPARSEABLE, CUT = "unparseable", "cut"


def marks(judge: Judge, prompts: Sequence[str], scale: Scale) -> list[float | None]:
    """The judge's mark for each prompt, None where its reply holds no clear one."""
    return [scale.read(reply) for reply in judge.ask(prompts)]


def judged_settings(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerFast, judge: Judge, speaking: Speaking, rubric: str
) -> dict[str, Any]:  # fmt: skip
    """What decides every judged result: how the model speaks, and who judges by which words."""
    return {
        "dtype": str(model.dtype).removeprefix("torch."), "tokenizer": fingerprint(tokenizer),
        "chat_template": digest(str(tokenizer.chat_template)), "speaking": asdict(speaking), "sampling": "greedy",
        "judge": judge.name, "rubric": digest(rubric),
    }  # fmt: skip
