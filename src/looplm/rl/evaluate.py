"""Greedy answers to held-out questions at every loop count, by the engine."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from looplm.engine import Engine, FixedLoops, SamplingParams
from looplm.models import LoopLMForCausalLM
from looplm.rl.collect import prompt_tokens
from looplm.rl.environments import Environment
from looplm.rl.recipe import RLRecipe


def evaluate(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, environment: Environment, recipe: RLRecipe,
    loops: Sequence[int], max_tokens: int,
) -> dict[str, float]:  # fmt: skip
    """`eval/reward_loop{t}`, and the mean `eval/length_loop{t}` of answers of at most `max_tokens`, for t in `loops`.

    Questions that are longer than `sampling.max_prompt` or cannot be marked are left out; `eval/questions` counts those
    that are in.
    """
    asked = [environment.question(number, "test") for number in range(recipe.evaluation.questions)]
    pairs = [(question, prompt_tokens(tokenizer, question)) for question in asked]
    pairs = [(question, tokens) for question, tokens in pairs if len(tokens) <= recipe.sampling.max_prompt]
    found: dict[str, float] = {"eval/questions": float(len(pairs))}
    with torch.no_grad():
        for loop in loops:
            engine = Engine(
                model, tokenizer, depth=FixedLoops(loop), loops=loop, max_rows=recipe.sampling.max_rows,
                max_length=recipe.sampling.max_prompt + max_tokens, kv_bytes=recipe.sampling.kv_bytes,
            )  # fmt: skip
            done = engine.generate(
                [tokens for _, tokens in pairs], SamplingParams(max_tokens=max_tokens, stop=recipe.sampling.stop)
            )
            marks = environment.reward(
                [question for question, _ in pairs], [one.text or "" for one in done], [one.token_ids for one in done]
            )
            known = [mark for mark in marks if mark is not None]
            found[f"eval/reward_loop{loop}"] = sum(known) / max(1, len(known))
            found[f"eval/length_loop{loop}"] = sum(len(one.token_ids) for one in done) / max(1, len(done))
    return found
