"""Completions sampled from the policy, with what training must replay: each token's loops and log-probability."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from looplm.engine import Completion, DepthPolicy, Engine, ExitSampled, FixedLoops, SamplingParams
from looplm.engine.calibration import FAMILIES
from looplm.models import LoopLMForCausalLM
from looplm.objectives.kinds import ByKind
from looplm.training.adapters import plain_model


@dataclass(frozen=True, kw_only=True)
class FixedRolloutDepth:
    """Every token at `loops` loops; the model's own count by default."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # for recipes

    kind: Literal["fixed"] = "fixed"
    loops: int | None = None

    def __post_init__(self) -> None:
        if self.loops is not None and self.loops < 1:
            raise ValueError(f"loops={self.loops} must be at least 1; null is the model's own count")

    def policy(self, loops: int) -> DepthPolicy:
        """For a model of so many loops."""
        return FixedLoops(loops if self.loops is None else self.loops)


@dataclass(frozen=True, kw_only=True)
class EarlyRolloutDepth:
    """Tokens leave by one of the depth policies with a threshold (`looplm calibrate` names and fits them)."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    family: str
    threshold: float
    min_loops: int = 1
    kind: Literal["early"] = "early"

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"no depth policy '{self.family}'; choose one of {', '.join(FAMILIES)}")
        self.policy(1)

    def policy(self, loops: int) -> DepthPolicy:
        """For a model of so many loops."""
        return FAMILIES[self.family].policy(self.threshold, self.min_loops)


@dataclass(frozen=True, kw_only=True)
class SampledRolloutDepth:
    """Tokens leave by draws from the exit gate, whose own learning needs it (`objective.learn_exits`)."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kind: Literal["sampled"] = "sampled"

    def policy(self, loops: int) -> DepthPolicy:
        """For a model of so many loops."""
        return ExitSampled()


RolloutDepth = Annotated[
    FixedRolloutDepth | EarlyRolloutDepth | SampledRolloutDepth,
    ByKind(FixedRolloutDepth, EarlyRolloutDepth, SampledRolloutDepth),
]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One completion: `loops` and `logprobs` of each of its tokens, the latter under the sampler's temperature.

    text: what graders see · finished: it ended by itself, at an end token or a stop string
    max_loops: the depth of its prompt.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    loops: list[int]
    logprobs: list[float]
    text: str
    finished: bool
    max_loops: int


class RolloutSource(Protocol):
    """Who samples: this process's engine, or the client of a server that runs the same weights."""

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], group: int
    ) -> list[list[Rollout]]:  # fmt: skip
        """`group` rollouts of every prompt, a pure function of the weights and the prompt's seed."""
        ...

    def weights_changed(self) -> None:
        """The policy has taken a step: later rollouts are of its new weights."""
        ...


class EngineRollouts:
    """Rollouts by looplm's engine; no filter cuts the distribution, so that training sees the one sampled from.

    Args:
        depth: when tokens leave · kv: "full", where a token that leaves copies its last keys into the deeper slots, or
            "recomputed"; what else is shared between loops no parallel call can replay
        temperature: of sampling · stop: strings that end a completion · max_tokens: of one
        max_prompt: tokens of a prompt at most · max_rows: rollouts in the loop at once
        kv_bytes: what keys and values may take · refresh: brings `model` up to date with what is trained, where the two
            are not one (adapters).
    """

    def __init__(
        self, model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, depth: DepthPolicy, *, kv: str = "full",
        temperature: float = 1.0, stop: Sequence[str] = (), max_tokens: int = 64, max_prompt: int = 512,
        max_rows: int = 16, kv_bytes: int = 2**31, refresh: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        check_replayable(kv)
        self.refresh = refresh
        self.max_loops = most_loops(depth, model.config.loops)
        self.engine = Engine(
            model, tokenizer, depth=depth, kv=kv, loops=self.max_loops, max_rows=max_rows,
            max_length=max_prompt + max_tokens, kv_bytes=kv_bytes,
        )  # fmt: skip
        self.params = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, stop=tuple(stop), logprobs_mode="processed"
        )

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], group: int) -> list[list[Rollout]]:
        """`group` rollouts of every prompt [B], drawn by its own seed; the random start state, too."""
        params = [replace(self.params, seed=seed, n=group) for seed in seeds]
        done = iter(self.engine.generate(prompts, params))
        return [[self._rollout(next(done)) for _ in range(group)] for _ in prompts]

    def weights_changed(self) -> None:
        """Nothing that earlier weights computed is used again."""
        self.refresh()
        self.engine.forget_prefixes()

    def _rollout(self, done: Completion) -> Rollout:
        if done.finish_reason == "error":
            raise ValueError(f"a rollout failed: {done.error}; look at the model's weights, or lower the learning rate")
        return Rollout(
            prompt_ids=done.prompt_token_ids, token_ids=done.token_ids, loops=done.loops, logprobs=done.logprobs,
            text=done.text or "", finished=done.finish_reason == "stop", max_loops=self.max_loops,
        )  # fmt: skip


def merged_model(model: LoopLMForCausalLM) -> LoopLMForCausalLM:
    """What the engine takes: a plain model that computes what `model` does, in weights of its own for adapters."""
    plain = plain_model(model)
    assert plain is not None
    return plain.eval().requires_grad_(False)


def drift_found(drift: float, most: float) -> str:
    """What is said where the policy that is trained is not the one that sampled."""
    return (
        f"log-probabilities in training lie {drift:.2g} from the sampler's on average, more than "
        f"max_drift={most:g}; a lower precision may need a larger max_drift"
    )


def most_loops(depth: DepthPolicy, loops: int) -> int:
    """What prompts do, and a token at most, with a model of so many loops; a fixed depth may be more than those."""
    return depth.deepest(max(loops, depth.loops) if isinstance(depth, FixedLoops) else loops)


def check_replayable(kv: str) -> None:
    """Refuse a sharing of keys and values that one parallel call cannot replay."""
    if kv not in ("full", "recomputed"):
        raise ValueError(
            f"kv='{kv}' shares keys between loops in a way that training cannot replay; rollouts take 'full' or "
            "'recomputed'"
        )
