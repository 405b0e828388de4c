"""What stands beside every score: loops, FLOPs and key/value bytes per token, and compute against a dense model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from looplm.engine.kv_policies import KVPolicy, kv_policy
from looplm.models.accounting import count_parameters, flops_by_part, flops_per_token, kv_bytes_per_token
from looplm.models.config import LoopLMConfig


def dense(layers: int, **shape: Any) -> LoopLMConfig:
    """An ordinary decoder of so many layers, tied head, as the looped model of one loop that it is.

    shape: hidden_size, intermediate_size, vocab_size, num_attention_heads, num_key_value_heads, head_dim.
    """
    return LoopLMConfig(
        core_layers=layers, loops=1, norm_placement="pre", qk_norm=True, exit_gate=False, tie_word_embeddings=True,
        **shape,
    )  # fmt: skip


def qwen3_1_7b() -> LoopLMConfig:
    """Qwen3-1.7B's shape, 1,720,574,976 parameters."""
    return dense(28, hidden_size=2048, intermediate_size=6144, vocab_size=151936, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=128)  # fmt: skip


def qwen3_4b() -> LoopLMConfig:
    """Qwen3-4B's shape, 4,022,468,096 parameters."""
    return dense(36, hidden_size=2560, intermediate_size=9728, vocab_size=151936, num_attention_heads=32,
                 num_key_value_heads=8, head_dim=128)  # fmt: skip


DENSE = {"Qwen3-1.7B": qwen3_1_7b, "Qwen3-4B": qwen3_4b}


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A prompt and what was generated after it with a cache, in tokens.

    attention_counted: how often the attention is counted, in truth once. DeepSpeed's profiler leaves its wrapper on
        attention, so that its k-th measurement counts it k times: over RLTT's 30 rollouts 15.5 times on average.
    """

    prompt: int
    generated: int
    attention_counted: float = 1.0

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.generated < 1:
            raise ValueError(f"{self}: prompt and generated must be at least 1 token")


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """Forward compute per token of a looped model over that of a dense one, by what is counted.

    flops: everything, at the context length asked for · weights: matrices of the layers, each visit of them, with no
    head and no attention over the context · attention: that alone, the limit of long contexts
    parameters: all parameters times loops over all parameters, the rule of thumb.
    """

    flops: float
    weights: float
    attention: float
    parameters: float


def multiplier(
    config: LoopLMConfig, against: LoopLMConfig, loops: int | None = None, context_length: int = 0
) -> Multiplier:  # fmt: skip
    """What a token of `config` at `loops` costs over a token of `against`, of one loop as `dense` gives it.

    Ouro-2.6B at 4 loops, over Qwen3-1.7B and Qwen3-4B; RLTT (arXiv 2602.10520) gives 6.75 and 2.63:

        flops, no context   5.79  2.48     weights     7.00  2.72
        flops, 2,048 tokens 5.92  2.51     attention   6.86  2.67
                                           parameters  6.20  2.65

    No count of shapes alone gives both: RLTT's are measured (see `rollout_multiplier`).
    """
    loops = config.loops if loops is None else loops
    pair = (config, loops), (against, against.loops)
    bare, attended = ([flops_per_token(each, count, length) for each, count in pair] for length in (0, 1))
    full = [flops_per_token(each, count, context_length) for each, count in pair]
    heads = [flops_by_part(each)["head"] for each, _ in pair]
    return Multiplier(
        flops=full[0] / full[1],
        weights=(bare[0] - heads[0]) / (bare[1] - heads[1]),
        attention=(attended[0] - bare[0]) / (attended[1] - bare[1]),
        parameters=count_parameters(config) * loops / count_parameters(against) / against.loops,
    )


def rollout_flops_per_token(config: LoopLMConfig, rollout: Rollout, loops: int | None = None) -> float:
    """Forward FLOPs of a rollout, its prompt included, by generated token.

    With a cache every token but the last generated one passes through the layers once, each generated token takes one
    reading of the head, and the prompt's attention is counted in full, as programs compute it that do not skip masked
    scores.
    """
    prompt, generated = rollout.prompt, rollout.generated
    bare = flops_per_token(config, loops)
    each_key = flops_per_token(config, loops, context_length=1) - bare
    head = flops_by_part(config)["head"]
    keys = prompt**2 + sum(range(prompt + 1, prompt + generated))
    layers = (prompt + generated - 1) * (bare - head)
    return (layers + generated * head + rollout.attention_counted * keys * each_key) / generated


def rollout_multiplier(
    config: LoopLMConfig, against: LoopLMConfig, rollout: Rollout, against_rollout: Rollout | None = None,
    loops: int | None = None,
) -> float:  # fmt: skip
    """FLOPs by generated token of a rollout over those of a dense model's, of the same length unless it is given.

    How RLTT measured its 6.75 and 2.63: DeepSpeed's profiler over 30 rollouts of AIME26, up to 3,072 tokens each. Their
    lengths are not published. With prompts of 200 tokens, `attention_counted` 15.5 and every rollout at the limit it is
    6.49 and 2.61 (4 % and 1 % below); where Qwen3-1.7B's end after 2,850 tokens on average and Qwen3-4B's after 3,020,
    it is 6.75 and 2.63. Counted once, rollouts at the limit give 5.95 and 2.51.
    """
    other = rollout if against_rollout is None else against_rollout
    return rollout_flops_per_token(config, rollout, loops) / rollout_flops_per_token(against, other)


def costs_of(
    config: LoopLMConfig, depth: int | Mapping[int, float], context_length: int = 0, *, kv: str | KVPolicy = "full",
    dtype: torch.dtype = torch.bfloat16, against: Mapping[str, LoopLMConfig] | None = None,
) -> dict[str, float]:  # fmt: skip
    """What a token costs at a depth, for `Evaluation.costs`.

    depth: a count of loops, or how many tokens (or what share) left after each 1-based loop.
    context_length: the tokens that it attends to · kv, dtype: what is kept of keys and values, and in which type; a
    model that leaves early still keeps slots for as many loops as its config has · against: dense models by name.

    Raises:
        ValueError: for a depth below one loop, or a histogram without tokens.
    """
    exits = depth if isinstance(depth, Mapping) else {depth: 1.0}
    tokens = sum(exits.values())
    if not tokens > 0 or min(exits) < 1 or min(exits.values()) < 0:
        raise ValueError(
            f"depth={depth!r} must be at least 1 loop, or tokens by the loop (from 1) that they left after"
        )
    flops = sum(count * flops_per_token(config, loops, context_length) for loops, count in exits.items()) / tokens
    kept = max(exits) if not isinstance(depth, Mapping) else max(config.loops, *exits)
    compared = {} if against is None else against
    return {
        "mean loops": sum(loops * count for loops, count in exits.items()) / tokens,
        "flops per token": flops,
        "kv bytes per token": kv_bytes_per_token(config, kv_policy(kv).slots(kept), dtype),
        **{f"x {name}": flops / flops_per_token(each, None, context_length) for name, each in compared.items()},
    }
