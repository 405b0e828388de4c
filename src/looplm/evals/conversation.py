"""A model's greedy answers to conversations, through its chat template, at a given depth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from looplm.data.chat import rendered
from looplm.data.tokenizer import encode
from looplm.engine import Completion, Engine, SamplingParams
from looplm.evals.asking import turn_ends
from looplm.evals.depths import Depth
from looplm.evals.progress import Advance, each_of, unheard
from looplm.models import LoopLMForCausalLM

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Speaking:
    """How answers are made, the same at every depth.

    max_tokens: of an answer · system: the turn before all others, if any
    template: what the chat template is given beside the turns, such as {"enable_thinking": False}
    reasoning_end: an answer begins after the last one of these, where it has any ("</think>"); else it is all of it
    kv, max_rows, kv_bytes: as the engine has them.
    """

    max_tokens: int = 512
    system: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    reasoning_end: str | None = None
    kv: str = "full"
    max_rows: int = 16
    kv_bytes: int = 2**40


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer: its text without the reasoning, all its tokens, mean loops of them, and whether the limit cut it."""

    text: str
    tokens: int
    loops: float | None
    cut: bool


def converse(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Sequence[str]],
    depth: Depth, speaking: Speaking, advance: Advance = unheard,
) -> list[list[Answer]]:  # fmt: skip
    """Answers to every turn of every dialogue, each given after the turns and answers before it.

    Raises:
        ValueError: if the tokenizer has no chat template, or it refuses a conversation, or the engine an answer.
    """
    start: list[Message] = [] if speaking.system is None else [{"role": "system", "content": speaking.system}]
    said = [list(start) for _ in dialogues]
    answers: list[list[Answer]] = [[] for _ in dialogues]
    for turn in range(max(map(len, dialogues), default=0)):
        speakers = [number for number, dialogue in enumerate(dialogues) if turn < len(dialogue)]
        for number in speakers:
            said[number].append({"role": "user", "content": dialogues[number][turn]})
        told = each_of(len(speakers), f"answers at {depth.name}, turn {turn + 1}", advance)
        given = _answers(model, tokenizer, [said[number] for number in speakers], depth, speaking, told)
        for number, answer in zip(speakers, given, strict=True):
            answers[number].append(answer)
            said[number].append({"role": "assistant", "content": answer.text})
    return answers


def _answers(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]],
    depth: Depth, speaking: Speaking, told: Callable[[object], None],
) -> list[Answer]:  # fmt: skip
    template = dict(speaking.template)
    prompts = encode(
        tokenizer, [rendered(tokenizer, turns, **template, add_generation_prompt=True) for turns in conversations]
    )
    engine = Engine(
        model, tokenizer, depth=depth.policy, kv=speaking.kv, loops=depth.loops, max_rows=speaking.max_rows,
        max_length=max(map(len, prompts)) + speaking.max_tokens, kv_bytes=speaking.kv_bytes,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=speaking.max_tokens, stop_token_ids=turn_ends(tokenizer, **template))
    done = engine.generate(prompts, sampling, told=told)
    return [_answer(one, speaking.reasoning_end) for one in done]


def _answer(done: Completion, reasoning_end: str | None) -> Answer:
    if done.error is not None:
        raise ValueError(f"an answer failed: {done.error}")
    text = done.text or ""
    return Answer(
        text=(text if reasoning_end is None else text.rpartition(reasoning_end)[2]).strip(),
        tokens=len(done.token_ids), loops=sum(done.loops) / len(done.loops) if done.loops else None,
        cut=done.finish_reason == "length",
    )  # fmt: skip
