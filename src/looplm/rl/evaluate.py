"""Greedy answers to held-out questions at chosen loop counts, by the engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from looplm.engine import Engine, FixedLoops, SamplingParams
from looplm.models import LoopLMForCausalLM
from looplm.rl.collect import prompt_tokens
from looplm.rl.environments import Environment
from looplm.rl.recipe import RLRecipe, Sampling


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one held-out question got: its mark, None where it cannot be marked, and the answer's tokens."""

    mark: float | None
    length: int


@torch.no_grad()
def answers(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, environment: Environment, sampling: Sampling,
    questions: int, loops: int, max_tokens: int,
) -> list[Answer]:  # fmt: skip
    """Greedy answers of at most `max_tokens` at `loops` to the first questions of the test split, in their order.

    A split of fewer `questions` is asked whole, and once. Those longer than `sampling.max_prompt` are left out.
    """
    numbers = range(questions)[: environment.num_questions("test")]
    asked = [environment.question(number, "test") for number in numbers]
    pairs = [(question, prompt_tokens(tokenizer, question)) for question in asked]
    pairs = [(question, tokens) for question, tokens in pairs if len(tokens) <= sampling.max_prompt]
    engine = Engine(
        model, tokenizer, depth=FixedLoops(loops), loops=loops, max_rows=sampling.max_rows,
        max_length=sampling.max_prompt + max_tokens, kv_bytes=sampling.kv_bytes,
    )  # fmt: skip
    done = engine.generate([tokens for _, tokens in pairs], SamplingParams(max_tokens=max_tokens, stop=sampling.stop))
    marks = environment.reward(
        [question for question, _ in pairs], [one.text or "" for one in done], [one.token_ids for one in done]
    )
    return [Answer(mark=mark, length=len(one.token_ids)) for mark, one in zip(marks, done, strict=True)]


def evaluate(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, recipe: RLRecipe, loops: Sequence[int],
    max_tokens: int,
) -> dict[str, float]:  # fmt: skip
    """`eval/reward_loop{t}` and the mean length of answers `eval/length_loop{t}` for t in `loops`.

    `eval/questions` counts those that were asked, unmarked ones included, which no mean counts.
    """
    found: dict[str, float] = {}
    for loop in loops:
        told = answers(
            model, tokenizer, recipe.environment, recipe.sampling, recipe.evaluation.questions, loop, max_tokens
        )
        marks = [answer.mark for answer in told if answer.mark is not None]
        found["eval/questions"] = float(len(told))
        found[f"eval/reward_loop{loop}"] = sum(marks) / max(1, len(marks))
        found[f"eval/length_loop{loop}"] = sum(answer.length for answer in told) / max(1, len(told))
    return found
