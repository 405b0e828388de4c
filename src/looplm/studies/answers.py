"""What a model answers after any number of loops: exact match of whole answers, one walk through all depths."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from looplm.analysis.capture import walk
from looplm.data.tokenizer import encode
from looplm.models import LoopLMForCausalLM
from looplm.tasks import Example


def answered_at(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], loops: Sequence[int],
    at_once: int = 256,
) -> Tensor:  # fmt: skip
    """Whether each answer is right after each number of loops [N, len(loops)].

    An answer is right where every one of its tokens is the likeliest given the question and the answer before it, which
    is where greedy decoding at that depth writes exactly it.
    """
    shapes: dict[tuple[int, int], list[int]] = {}
    prompts = encode(tokenizer, [example.prompt for example in examples])
    answers = encode(tokenizer, [example.answer for example in examples])
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        shapes.setdefault((len(prompt), len(answer)), []).append(number)
    right = torch.zeros(len(examples), len(loops), dtype=torch.bool)
    for (_, length), numbers in shapes.items():
        for first in range(0, len(numbers), at_once):
            part = numbers[first : first + at_once]
            ids = torch.tensor([prompts[number] + answers[number] for number in part])
            right[part] = _right(model, ids, length, loops)
    return right


@torch.no_grad()
def _right(model: LoopLMForCausalLM, ids: Tensor, length: int, loops: Sequence[int]) -> Tensor:
    """[B, len(loops)] for questions of one length whose answers are the last `length` tokens."""
    found = {}
    for visit in walk(model, ids[:, :-1], max(loops)):
        if visit.loop in loops:
            logits = model.lm_head(visit.hidden()[:, -length:])
            found[visit.loop] = (logits.argmax(-1) == ids[:, -length:]).all(-1)
    return torch.stack([found[loop] for loop in loops], dim=-1)
