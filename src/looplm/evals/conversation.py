"""A model's greedy answers to conversations, through its chat template, at a given depth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from looplm.data.tokenizer import encode
from looplm.engine import Completion, Engine, SamplingParams
from looplm.evals.depths import Depth
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
    kv_bytes: int = 2**30


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer: its text without the reasoning, all its tokens, mean loops of them, and whether the limit cut it."""

    text: str
    tokens: int
    loops: float | None
    cut: bool


def converse(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Sequence[str]],
    depth: Depth, speaking: Speaking,
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
        given = _answers(model, tokenizer, [said[number] for number in speakers], depth, speaking)
        for number, answer in zip(speakers, given, strict=True):
            answers[number].append(answer)
            said[number].append({"role": "assistant", "content": answer.text})
    return answers


def _answers(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]],
    depth: Depth, speaking: Speaking,
) -> list[Answer]:  # fmt: skip
    texts = [_rendered(tokenizer, turns, speaking, add_generation_prompt=True) for turns in conversations]
    prompts = encode(tokenizer, texts)
    engine = Engine(
        model, tokenizer, depth=depth.policy, kv=speaking.kv, loops=depth.loops, max_rows=speaking.max_rows,
        max_length=max(map(len, prompts)) + speaking.max_tokens, kv_bytes=speaking.kv_bytes,
    )  # fmt: skip
    ends = _turn_ends(tokenizer, conversations[0][-1], speaking)
    done = engine.generate(prompts, SamplingParams(max_tokens=speaking.max_tokens, stop_token_ids=ends))
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


def _turn_ends(tokenizer: PreTrainedTokenizerBase, question: Message, speaking: Speaking) -> list[int]:
    """The special token that closes an answer in the template, which configs often do not name as an end (Ouro's)."""
    mark = "closing"
    text = _rendered(tokenizer, [question, {"role": "assistant", "content": mark}], speaking)
    after = encode(tokenizer, [text.rpartition(mark)[2].lstrip()])[0]
    return [token for token in after[:1] if token in tokenizer.all_special_ids]


def _rendered(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], speaking: Speaking, **options: bool
) -> str:  # fmt: skip
    """A conversation as the template spells it, start of text included; it is encoded with nothing added."""
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; judged evaluations need a chat model's tokenizer")
    given: dict[str, Any] = {**speaking.template, **options, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template(list(turns), **given))
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from error
