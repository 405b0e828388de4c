"""The policy gradient that credits every loop of a token's latent trajectory (RLTT, arXiv 2602.10520), and GRPO's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from looplm.models import LoopLMConfig, LoopLMForCausalLM, Trace
from looplm.models.exits import exit_log_pdf
from looplm.objectives.linear_ce import IGNORED
from looplm.objectives.loop_weights import ExitWeights, LastLoopWeight, LearnedWeights, LoopWeights, Trajectories
from looplm.objectives.targets import Batch, Metrics, all_loops, hidden_rows, is_gate, last_loop, next_token_targets
from looplm.objectives.token_loss import token_loss


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the head is to read of a trace, and how much it counts.

    hidden: [B*S, D] of each of the loops `kept`, tempered · targets: [B*S] · seen: what the loop weights looked at
    weights, read: [kept, B*S], each loop's credit, and whether it is read at all; a token's exit is read of the last
        loop, where it still stands as it left.
    """

    hidden: list[Tensor]
    kept: list[int]
    targets: Tensor
    seen: Trajectories
    weights: Tensor
    read: Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """sum over tokens of w (-min(r A, clip(r) A) + kl k3), r the ratio of the policy that emitted the token.

    A token that left at loop e has log-probability L = log P^(e). Its ratio is exp(L - L_sampled), and that ratio's
    gradient is RLTT's: log P^(t) of the loops t <= e count by `loop_weights` instead of the last alone. With all weight
    on the last this is GRPO. k3 = exp(d) - d - 1 with d = log P_reference^(e) - log P^(e), of the token and not of its
    exit, and with no other loop's gradient.

    clip_low, clip_high: how far the ratio may leave 1 for its gradient to count; None is no bound (the paper clips not)
    kl: weight of k3 · temperature: that of the sampler, under which all log-probabilities are.
    learn_exits: the exit is part of the policy: L also holds log p_e of the gate, which so learns from the reward.
        Tokens must have left by `ExitSampled`.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    loop_weights: LoopWeights = field(default_factory=ExitWeights)
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    kl: float = 0.0
    temperature: float = 1.0
    learn_exits: bool = False

    kind: Literal["policy_gradient"] = "policy_gradient"

    def __post_init__(self) -> None:
        for name, least in (("clip_low", 0), ("clip_high", 0), ("kl", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must not be negative")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} must be above 0: a greedy policy has no gradient")

    def needs(self, loops: int, leaves_early: bool) -> set[int]:
        """Every loop, unless the last alone counts and all tokens do as many."""
        only_last = isinstance(self.loop_weights, LastLoopWeight) and not leaves_early
        return {loops} if only_last else all_loops(loops)

    def check_model(self, config: LoopLMConfig) -> None:
        """Refuse a model without the gate that is asked for."""
        if not config.exit_gate and (self.learn_exits or isinstance(self.loop_weights, ExitWeights)):
            raise ValueError(
                "exit weights and learn_exits read an exit gate, which this model has not; take loop_weights "
                "{kind: uniform} or {kind: progressive}"
            )

    def trains(self, parameter_name: str) -> bool:
        """All but the gate, which learns where its exits or its weights are part of the objective."""
        live = isinstance(self.loop_weights, ExitWeights) and self.loop_weights.live
        return live or self.learn_exits or not is_gate(parameter_name)

    def __call__(
        self, model: LoopLMForCausalLM, trace: Trace, batch: Batch, logits: Tensor | None = None
    ) -> tuple[Tensor, list[tuple[Metrics, Tensor]]]:  # fmt: skip
        """The loss; metrics as sums weighted by `batch["weights"]`, each with the weight of the tokens it sums over.

        Args:
            trace: with the states of the loops that `needs` names, each token standing still after its exit, as
                `looplm.models.replay` gives them: L is read of the last loop.
            batch: `labels` [B, S], -100 but on completions; and of the same shape, aligned with the labels, `weights`
                (the normalisation), `advantages`, `exits` (the loop that emitted the token) and `sampled` (its
                log-probability then, with that of its exit where `learn_exits`). `reference` [B, S] where kl > 0.
                `exit_log_pdf` [B, S, T], of the gate that sampled, for exit weights; today's, detached, without it.
            logits: [T], of learned loop weights.
        """
        reading = self.reading(model, trace, batch, logits)
        targets, seen, weights = reading.targets, reading.seen, reading.weights
        wide = weights.dtype
        mass, advantage, sampled = (shifted(batch[name]).to(wide) for name in ("weights", "advantages", "sampled"))
        mass = mass * (targets != IGNORED)
        reference = shifted(batch["reference"]).to(wide) if self.kl else torch.zeros_like(mass)
        left = self._exit_log_prob(trace, seen.exits).to(wide)
        given = [weights, mass, advantage, sampled, reference, left]
        loss, nll = token_loss(reading.hidden, model.lm_head.weight, targets, reading.read, self._of_tokens, given)
        with torch.no_grad():
            return loss, [(self._of_policy(nll[-1], given), mass.sum()), *_by_loop(nll, reading, mass)]

    def reading(self, model: LoopLMForCausalLM, trace: Trace, batch: Batch, logits: Tensor | None = None) -> Reading:
        """What is read of `trace`; the arguments as in a call."""
        kept = sorted(trace.states)
        hidden = [
            rows if self.temperature == 1 else rows / self.temperature for rows in hidden_rows(model, trace, kept)
        ]
        seen = self.seen(trace, batch, logits, torch.promote_types(hidden[0].dtype, torch.float32))
        weights = _read_last(seen.weights(self.loop_weights), seen)[[loop - 1 for loop in kept]]
        read = weights > 0
        read[-1] = True
        return Reading(
            hidden=hidden, kept=kept, targets=next_token_targets(batch["labels"]), seen=seen, weights=weights, read=read
        )

    def _of_tokens(self, nll_TC: Tensor, given: Sequence[Tensor]) -> Tensor:
        """The loss [C] of tokens with nll [T, C], and `given` as `__call__` lists it."""
        weights, mass, advantage, sampled, reference, left = given
        last = -nll_TC[-1]
        value = self._value(last, -(nll_TC * weights).sum(0), left)
        ratio = (value - sampled).exp()
        low = -torch.inf if self.clip_low is None else 1 - self.clip_low
        high = torch.inf if self.clip_high is None else 1 + self.clip_high
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        loss = -surrogate
        if self.kl:
            loss = loss + self.kl * _k3(reference - last)
        return mass * loss

    def _value(self, last: Tensor, mixed: Tensor, left: Tensor) -> Tensor:
        """What the emitting policy says of a token, with the gradient of all the loops that count."""
        value = borrowed(last, mixed)
        return value + left if self.learn_exits else value

    def seen(self, trace: Trace, batch: Batch, logits: Tensor | None, dtype: torch.dtype) -> Trajectories:
        """What the loop weights look at, of every position [B*S] that predicts a token; the arguments as in a call."""
        loops = last_loop(trace)
        exits = shifted(batch["exits"], fill=loops)
        log_pdf = None
        if isinstance(self.loop_weights, ExitWeights):
            log_pdf = self._log_pdf(trace, batch, self.loop_weights.live).flatten(0, 1).T.to(dtype)
        assert (logits is not None) == isinstance(self.loop_weights, LearnedWeights)
        loop = torch.arange(1, loops + 1, device=exits.device, dtype=dtype)[:, None]
        return Trajectories(loop=loop, exits=exits, log_pdf=log_pdf, logits=logits)

    def _log_pdf(self, trace: Trace, batch: Batch, live: bool) -> Tensor:
        """Of the gate [B, S, T] that decides the weights."""
        assert trace.gate_logits is not None
        if live:
            return exit_log_pdf(trace.gate_logits)
        if "exit_log_pdf" in batch:
            return F.pad(batch["exit_log_pdf"][:, 1:], (0, 0, 0, 1))
        return exit_log_pdf(trace.gate_logits.detach())

    def _exit_log_prob(self, trace: Trace, exits: Tensor) -> Tensor:
        """log p_e [N] of the gate today; zeros where exits are not part of the policy."""
        if not self.learn_exits:
            return torch.zeros(len(exits), device=exits.device)
        assert trace.gate_logits is not None
        return exit_log_pdf(trace.gate_logits).flatten(0, 1).gather(-1, exits[:, None] - 1).squeeze(-1)

    def _of_policy(self, last: Tensor, given: Sequence[Tensor]) -> Metrics:
        """How far the policy moved, of all tokens, whose nll [N] is `last`."""
        _, mass, advantage, sampled, reference, left = given
        drift = self._value(-last, -last, left) - sampled
        ratio = drift.exp()
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if self.clip_low is not None:
            outside |= (ratio < 1 - self.clip_low) & (advantage < 0)
        if self.clip_high is not None:
            outside |= (ratio > 1 + self.clip_high) & (advantage > 0)
        found = {"ratio": ratio, "ratio_drift": drift.abs(), "clipped": outside.to(mass), "sampled_kl": _k3(-drift)}
        if self.kl:
            found["reference_kl"] = _k3(reference + last)
        return {name: (values * mass).sum() for name, values in found.items()}


def _by_loop(nll: Tensor, reading: Reading, mass: Tensor) -> list[tuple[Metrics, Tensor]]:
    """Of every loop, read or not, so that all processes name the same: its credit over all tokens, and how sure it is.

    The latter is of the tokens that were read there: none that had left before, nor any that it has no credit for.
    """
    found: list[tuple[Metrics, Tensor]] = []
    for loop in range(1, len(reading.seen.loop) + 1):
        row = reading.kept.index(loop) if loop in reading.kept else 0
        here, later = reading.seen.exits == loop, (reading.seen.exits > loop) & (loop in reading.kept)
        weight = torch.where(here, reading.weights[-1], reading.weights[row] * later)
        share = mass * (here | (reading.read[row] & later))
        found.append(({f"weight_loop{loop}": (weight * mass).sum()}, mass.sum()))
        found.append(({f"nll_loop{loop}": (torch.where(here, nll[-1], nll[row]) * share).sum()}, share.sum()))
    return found


def borrowed(value: Tensor, gradient: Tensor) -> Tensor:
    """The numbers of `value` with the gradient of `gradient`."""
    return value.detach() + (gradient - gradient.detach())


def _read_last(weights: Tensor, seen: Trajectories) -> Tensor:
    """Weights [T, N] with that of each token's exit moved to the last loop, where the token still stands as it left."""
    own = (weights * (seen.loop == seen.exits)).sum(0)
    moved = torch.where(seen.loop < seen.exits, weights, torch.zeros_like(weights))
    return torch.cat([moved[:-1], own[None]])


def shifted(values: Tensor, fill: float = 0) -> Tensor:
    """Values [B, S] aligned with labels as rows [B*S] aligned with the positions that predict them."""
    return F.pad(values[:, 1:], (0, 1), value=fill).flatten()


def _k3(difference: Tensor) -> Tensor:
    """exp(d) - d - 1, an estimate of KL(policy || other) with d = log other - log policy; never negative."""
    return difference.exp() - difference - 1
