"""A reinforcement-learning run as one typed value, filled by a YAML file and `a.b=value` overrides."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from looplm.objectives import PolicyGradient
from looplm.objectives.loop_weights import ExitWeights
from looplm.rl.advantages import Advantages
from looplm.rl.batches import Mean
from looplm.rl.environments import Environment
from looplm.rl.rollouts import FixedRolloutDepth, RolloutDepth, SampledRolloutDepth, check_replayable
from looplm.rl.vllm import VLLMServer
from looplm.training.recipe import STRICT, RunSettings, read_recipe

BUILT_IN = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sampling:
    """How rollouts are made: `prompts` x `group` of them a step, over all processes.

    temperature: also that of all log-probabilities in training; there is no top-k or top-p, which training could not
        replay · depth: when tokens leave the loop · kv: "full" or "recomputed"
    stop: strings that end a completion, beside the model's end tokens
    max_tokens: of a completion · max_prompt: tokens of a prompt; a longer one is left out, and counted
    max_rows: completions in the loop at once, on each process · kv_bytes: what their keys and values may take.
    server: a vLLM server that samples instead; it does the same loops for every token, those of `depth`.
    """

    prompts: PositiveInt = 32
    group: Annotated[int, Field(ge=2)] = 8
    temperature: PositiveFloat = 1.0
    max_tokens: PositiveInt = 64
    max_prompt: PositiveInt = 512
    depth: RolloutDepth = field(default_factory=FixedRolloutDepth)
    kv: str = "full"
    stop: tuple[str, ...] = ()
    max_rows: PositiveInt = 32
    kv_bytes: PositiveInt = 2**31
    server: VLLMServer | None = None

    def __post_init__(self) -> None:
        check_replayable(self.kv)
        if self.server is not None and not isinstance(self.depth, FixedRolloutDepth):
            raise ValueError("sampling.server does the same loops for every token: sampling.depth.kind=fixed")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluation:
    """Greedy answers to `questions` held-out questions at every one of `loops` (1 to the model's own by default)."""

    questions: PositiveInt = 64
    loops: tuple[PositiveInt, ...] | None = None
    max_tokens: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RLRecipe(RunSettings):
    """Everything that decides a run. What was run lies in its folder as recipe.json.

    Every step samples completions from the policy, marks them, and takes `updates` optimiser steps on them: `epochs`
    times over all of them, each cut into `minibatches` of whole groups. With one of each, as in the paper, every update
    is on the policy that sampled.

    mean: what a token's weight divides by · mask_truncated: leave completions that hit `max_tokens` out of the loss and
    of its means · loop_price: taken from a completion's reward for each loop that its tokens did on average
    simulated_exit: train each token at the loop where the gate's CDF reaches this, although it was sampled at another:
        off the policy by intent, corrected by the clipped ratio alone (one of Ouro's two attempts)
    max_drift: how far log-probabilities may lie, on average, from those of the sampler before the first update; further
        off, what is trained is not what sampled, and the run stops. Simulated exits may drift, and the log says so.
    """

    init_from: str
    environment: Annotated[Environment, Field(discriminator="kind")]
    sampling: Sampling = field(default_factory=Sampling)
    advantages: Advantages = field(default_factory=Advantages)
    objective: PolicyGradient = field(default_factory=PolicyGradient)
    mean: Mean = "sequence"
    mask_truncated: bool = False
    loop_price: NonNegativeFloat = 0.0
    simulated_exit: Annotated[float, Field(ge=0, le=1)] | None = None
    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    max_drift: PositiveFloat = 1e-3
    evaluation: Evaluation = field(default_factory=Evaluation)
    steps: PositiveInt = 140
    clip_norm: PositiveFloat = 0.1
    log_every: PositiveInt = 1
    evaluate_every: PositiveInt = 20
    save_every: PositiveInt = 20

    def __post_init__(self) -> None:
        if self.objective.temperature not in (1.0, self.sampling.temperature):
            raise ValueError(
                f"objective.temperature={self.objective.temperature} differs from "
                f"sampling.temperature={self.sampling.temperature}; leave the former out"
            )
        if self.objective.learn_exits and not isinstance(self.sampling.depth, SampledRolloutDepth):
            raise ValueError("objective.learn_exits needs exits that the gate has drawn: sampling.depth.kind=sampled")
        if self.simulated_exit is not None and not isinstance(self.sampling.depth, FixedRolloutDepth):
            raise ValueError("simulated_exit is for tokens sampled at one depth: sampling.depth.kind=fixed")
        if self.sampling.prompts % self.minibatches:
            raise ValueError(f"{self.sampling.prompts} prompts cannot be cut into {self.minibatches} minibatches")
        if self.parallel == "fsdp":
            raise ValueError("rollouts need whole weights on every process; take parallel: ddp")

    @property
    def free_fields(self) -> tuple[str, ...]:
        """As of any run, and what decides where rollouts are made and what memory they take."""
        return (*super().free_fields, "sampling.max_rows", "sampling.kv_bytes", "sampling.server", "evaluation")

    @property
    def policy_gradient(self) -> PolicyGradient:
        """The objective under the sampler's temperature."""
        return replace(self.objective, temperature=self.sampling.temperature)

    @property
    def asks_old_gate(self) -> bool:
        """Whether later updates weigh loops by the gate of the first."""
        weights = self.objective.loop_weights
        return self.epochs * self.minibatches > 1 and isinstance(weights, ExitWeights) and not weights.live


def load_rl_recipe(
    source: str | Path, overrides: Sequence[str] = (), values: Mapping[str, Any] = MappingProxyType({})
) -> RLRecipe:
    """The recipe in a YAML file, or the built-in one of that name, with `a.b=value` overrides.

    Raises:
        ValueError: for a missing file, broken YAML, an unknown key or a value of the wrong kind; each is named.
    """
    return read_recipe(RLRecipe, BUILT_IN, source, overrides, values)
