"""TRL's GRPO trainer with RLTT's policy gradient, and rollouts of any depth replayed as they were sampled."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from looplm.engine import DepthPolicy
from looplm.engine.policies import check_policy
from looplm.models import LoopLMForCausalLM
from looplm.models.exits import exit_log_pdf
from looplm.objectives import PolicyGradient
from looplm.objectives.linear_ce import IGNORED
from looplm.objectives.loop_weights import (
    ExitWeights,
    LastLoopWeight,
    LoopWeights,
    ProgressiveWeights,
    UniformWeights,
)
from looplm.objectives.policy_gradient import borrowed
from looplm.objectives.targets import Batch
from looplm.objectives.token_loss import entropies, loop_logprobs
from looplm.rl.module import trajectories
from looplm.rl.rollouts import EngineRollouts, drift_found

try:
    import trl
    from accelerate.utils import is_peft_model
    from trl import GRPOConfig, GRPOTrainer
except ImportError as missing:
    raise ImportError("RLTTTrainer needs trl 1.16: pip install 'looplm[rl]'") from missing

TESTED = "1.16."
_ENGINE = ("kv", "max_prompt", "max_rows", "kv_bytes")
_UNTESTED = ("use_vllm", "cast_lm_head_to_fp32")
_OTHER_SAMPLERS = ("use_transformers_continuous_batching", "generation_kwargs", "min_p", "tools", "environment_factory",
                   "rollout_func")  # fmt: skip
_NO_FILTER = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


class RLTTTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` whose policy gradient credits every loop of a token's trajectory (RLTT, arXiv 2602.10520).

    Ratio, clipping, KL and normalisation are TRL's, of the loop that emitted the token; `LastLoopWeight()` is TRL's own
    GRPO. A gate that the loss does not train is frozen. Arguments beside TRL's:

    loop_weights: any of `looplm.objectives.loop_weights` but learned ones; the gate's distribution by default.
    depth: when rollouts' tokens leave the loop; looplm's engine then samples, and training replays each token at its
        own. By default TRL generates at the model's own loops. A `rollout_func` may also return `loops`, a list for
        each completion. Reward functions see `loops` as a column.
    engine: for `EngineRollouts`: kv, max_prompt, max_rows, kv_bytes.
    max_drift: how far the policy's log-probabilities may lie from the sampler's, on average, where it gives any.

    Raises:
        ValueError: for another TRL than the tested one, a model without the gate that is asked for, or a setting that
            the replay cannot follow.
    """

    args: GRPOConfig
    model: Any

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *,
        loop_weights: LoopWeights | None = None, depth: DepthPolicy | None = None,
        engine: Mapping[str, Any] = MappingProxyType({}), max_drift: float = 1e-3, **others: Any,
    ) -> None:  # fmt: skip
        if not trl.__version__.startswith(TESTED):
            raise ValueError(f"RLTTTrainer works with trl {TESTED}*, not {trl.__version__}; pip install 'looplm[rl]'")
        rule = ExitWeights() if loop_weights is None else loop_weights
        if not isinstance(rule, ExitWeights | LastLoopWeight | ProgressiveWeights | UniformWeights):
            raise ValueError(f"RLTTTrainer takes no loop_weights={rule}; learned weights are trained by `looplm rl`")
        super().__init__(model, reward_funcs, args, **others)
        base = _base(self.model)
        self._check(rule, depth, engine, others)
        self.policy_gradient = PolicyGradient(loop_weights=rule, temperature=self.temperature)
        self.policy_gradient.check_model(base.config)
        for name, parameter in base.named_parameters():
            if not self.policy_gradient.trains(name):
                parameter.requires_grad_(False)  # TRL would leave it without a gradient, at which DDP stops
        self.max_drift, self.loops, self.full_keys = max_drift, base.config.loops, engine.get("kv") == "recomputed"
        self._batch: dict[str, Any] = {}  # of the rows that TRL has scored: what its signatures do not carry
        if depth is not None:
            assert self.args.max_completion_length is not None
            self.rollouts = EngineRollouts(
                base, self._tokenizer, depth, temperature=self.temperature, max_tokens=self.args.max_completion_length,
                **engine,
            )  # fmt: skip
            self.loops, self.rollout_func = self.rollouts.max_loops, self._roll_out
        for scored in (self.model, self.ref_model):
            if scored is not None:
                _let_inside(_base(scored))

    def _check(
        self, rule: LoopWeights, depth: DepthPolicy | None, engine: Mapping[str, Any], others: Mapping[str, Any]
    ) -> None:  # fmt: skip
        """Refuse what would train something else than what it says."""
        settings: dict[str, Any] = {**vars(self.args), **others}
        for name in _UNTESTED:
            if settings[name]:
                raise ValueError(f"RLTTTrainer does not support {name}=True; leave it out")
        mixed = settings["use_bias_correction_kl"] and settings["importance_sampling_level"] == "sequence"
        if mixed and settings["beta"] and not isinstance(rule, LastLoopWeight):
            raise ValueError("a sequence's ratio would carry other loops into the KL; set use_bias_correction_kl=False")
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("RLTTTrainer needs whole weights on every process; take DDP")
        if set(engine) - set(_ENGINE):
            raise ValueError(f"engine={dict(engine)} may name {', '.join(_ENGINE)}")
        if depth is None:
            return
        check_policy(depth)
        if is_peft_model(self.model):
            raise ValueError("adapters do not go with depth, whose engine reads plain weights; leave one of them out")
        odd = [name for name in _OTHER_SAMPLERS if settings.get(name)]
        odd += [name for name, neutral in _NO_FILTER.items() if settings[name] != neutral]
        odd += ["max_completion_length"] if self.args.max_completion_length is None else []
        if odd:
            raise ValueError(f"{odd[0]}={settings[odd[0]]!r} does not go with depth, whose rollouts are the engine's")

    # Rollouts -------------------------------------------------------------------------------------------------

    def _roll_out(self, prompts: list[Any], _: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: a completion of every prompt (TRL repeats those of a group) by the engine."""
        prompt_ids = self._tokenize_prompts(prompts)[0]
        seeds = torch.randint(2**62, (len(prompt_ids),)).tolist()
        self.rollouts.weights_changed()
        done = [one for (one,) in self.rollouts.sample(prompt_ids, seeds, 1)]
        return {
            "prompt_ids": prompt_ids, "completion_ids": [one.token_ids for one in done],
            "logprobs": [one.logprobs for one in done], "loops": [one.loops for one in done],
        }  # fmt: skip

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        generated = super()._generate(prompts)
        completions, extra = generated[1], generated[5]
        self._batch = {"loops": self._padded(extra["loops"], completions)} if "loops" in extra else {}
        return generated

    def _padded(self, loops: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
        """[B, C], right-padded with all loops."""
        rows = [torch.tensor(row, device=self.accelerator.device) for row in loops]
        fit = [len(row) for row in loops] == [len(ids) for ids in completions]
        if not fit or any(((row < 1) | (row > self.loops)).any() for row in rows):
            raise ValueError(f"rollouts must tell 1 to {self.loops} loops for each token of each completion")
        return pad_sequence(rows, batch_first=True, padding_value=self.loops)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with what a replay needs, a row for each completion: TRL shuffles, splits and keeps it alike."""
        output = super()._generate_and_score_completions(inputs) | self._batch
        rule = self.policy_gradient.loop_weights
        # TRL asks for old log-probabilities where later updates follow, and these weigh loops by the gate that sampled.
        if "old_per_token_logps" in output and isinstance(rule, ExitWeights) and not rule.live:
            ids, mask = (
                torch.cat([output[f"prompt_{of}"], output[f"completion_{of}"]], dim=1) for of in ("ids", "mask")
            )
            keep, size = output["completion_ids"].shape[1], self.args.per_device_train_batch_size
            with torch.no_grad():
                (output["exit_log_pdf"],) = self._inside(self.model, _gate, ids, mask, keep, size)
        return output

    # The loss -------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._batch = dict(inputs)  # a copy, since TRL reads its own again in later updates
        try:
            return super()._compute_loss(model, self._batch)
        finally:
            self._batch = {}

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, compute_aux_loss: bool = False, **images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
        """log P [B, C] of the loop that emitted each token, with the gradient of all the loops that count."""
        assert not compute_aux_loss
        assert all(value is None for value in images.values())
        last, value, entropy = self._inside(model, _score, input_ids, attention_mask, logits_to_keep, batch_size)
        if "sampling_per_token_logps" in self._batch:
            self._refuse_drift(self._batch.get("old_per_token_logps", last), attention_mask[:, -logits_to_keep:])
        if "ref_per_token_logps" in self._batch and torch.is_grad_enabled():
            self._batch["ref_per_token_logps"] = self._held(self._batch["ref_per_token_logps"], last, value)
        return value, entropy if compute_entropy else None, None

    def _held(self, reference: Tensor, last: Tensor, value: Tensor) -> Tensor:
        """The reference's log-probabilities, such that the gradient of TRL's KL is that of `last` alone."""
        # The KL is c k3(d) with d = reference - value. A reference shifted by value - last, which is 0, takes the
        # gradient of value out of d and puts that of last in. Where TRL corrects for bias c is the ratio, with
        # value's gradient, too: a share d / (e^d - 1) of the shift sums up to -c d, as with last in both.
        shift = value - last
        if self.args.use_bias_correction_kl:
            d = (reference - last).detach()
            shift = shift * torch.where(d == 0, 1.0, d / torch.expm1(d))
        return reference + shift

    def _inside(
        self, model: Any, of: Callable[..., tuple[Tensor, ...]], ids: Tensor, mask: Tensor, keep: int, size: int | None
    ) -> list[Tensor]:  # fmt: skip
        """What `of` says of the last `keep` tokens, `size` rows at a time, called within the forward of `model`."""
        # Under no_grad TRL asks for old and reference log-probabilities, which are of the emitting loop alone.
        rule = self.policy_gradient.loop_weights if torch.is_grad_enabled() else LastLoopWeight()
        ask = functools.partial(of, loops=self.loops, objective=replace(self.policy_gradient, loop_weights=rule))
        batch = self._replayed(ids, mask, keep)
        parts = [values.split(size or len(ids)) for values in batch.values()]
        with self.accelerator.autocast():
            found = [
                model(inside=functools.partial(ask, dict(zip(batch, part, strict=True))))
                for part in zip(*parts, strict=True)
            ]
        return [torch.cat(values)[:, -keep - 1 : -1] for values in zip(*found, strict=True)]

    def _replayed(self, ids: Tensor, mask: Tensor, keep: int) -> dict[str, Tensor]:
        """Rows [B, S] as `looplm.rl.batches` has them: completions are the last `keep` places of each."""
        labels = ids.masked_fill(mask == 0, IGNORED)
        labels[:, :-keep] = IGNORED
        exits, read, key_loops = (torch.full_like(ids, self.loops) for _ in range(3))
        if "loops" in self._batch:
            loops = F.pad(self._batch["loops"], (0, keep - self._batch["loops"].shape[1]), value=self.loops)
            exits[:, -keep:] = read[:, -keep - 1 : -1] = loops
            if not self.full_keys:
                key_loops[:, -keep:-1] = loops[:, 1:]
        batch = {
            "input_ids": ids, "attention_mask": mask, "labels": labels, "exits": exits, "read": read,
            "key_loops": key_loops,
        }  # fmt: skip
        if "exit_log_pdf" in self._batch:
            batch["exit_log_pdf"] = F.pad(self._batch["exit_log_pdf"], (0, 0, ids.shape[1] - keep, 0))
        return batch

    def _refuse_drift(self, found: Tensor, mask: Tensor) -> None:
        """Stop where the policy before its updates is not the one that sampled."""
        far = ((found.detach() - self._batch["sampling_per_token_logps"]).abs() * mask).sum() / mask.sum().clamp(min=1)
        drift = self.accelerator.gather(far).mean().item()
        self._metrics["train" if self.model.training else "eval"]["sampling/drift"].append(drift)
        if not drift <= self.max_drift:
            raise ValueError(drift_found(drift, self.max_drift))


def _base(model: Any) -> LoopLMForCausalLM:
    """The model under adapters."""
    base = model.get_base_model() if is_peft_model(model) else model
    if not isinstance(base, LoopLMForCausalLM):
        raise ValueError(f"RLTTTrainer trains looplm's models, not {type(base).__name__}; open it by looplm.load")
    return base


def _let_inside(model: LoopLMForCausalLM) -> None:
    """Let `model(inside=function)` return function(model): what wraps the model sees it, as it sees TRL's own head."""
    plain = model.forward

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(self: LoopLMForCausalLM, *args: Any, inside: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if inside is None else inside(self)

    model.forward = MethodType(forward, model)


def _score(
    batch: Batch, model: LoopLMForCausalLM, loops: int, objective: PolicyGradient
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of the token that each position predicts [B, S]: log P of its loop; that with RLTT's gradient; the entropy."""
    reading = objective.reading(model, trajectories(model, dict(batch), loops, objective), batch)
    shape = batch["labels"].shape
    log_p = loop_logprobs(reading.hidden, model.lm_head.weight, reading.targets, reading.read)
    last, value = log_p[-1], borrowed(log_p[-1], (log_p * reading.weights).sum(0))
    entropy = entropies(reading.hidden[-1], model.lm_head.weight, reading.targets)
    return last.view(shape), value.view(shape), entropy.view(shape)


def _gate(batch: Batch, model: LoopLMForCausalLM, loops: int, objective: PolicyGradient) -> tuple[Tensor]:
    """log p_t [B, S, T] of the exit gate at every position."""
    trace = trajectories(model, dict(batch), loops, objective)
    assert trace.gate_logits is not None
    return (exit_log_pdf(trace.gate_logits),)
