"""The looped language model as a transformers model: backbone, head and generation."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from looplm.models.backbone import KeepLoops, LoopLMModel, check_loops
from looplm.models.config import LoopLMConfig
from looplm.models.context import AnyCache
from looplm.models.outputs import LoopOutput, Trace
from looplm.models.precision import at_least_float32
from looplm.models.pretrained import LoopLMPreTrainedModel


class LoopLMForCausalLM(LoopLMPreTrainedModel, GenerationMixin):
    """`LoopLMModel` with a language-model head that can read any loop."""

    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LoopLMConfig) -> None:
        super().__init__(config)
        self.model = LoopLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: AnyCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        loops: int | None = None,
        keep_loops: KeepLoops = "last",
        init_state: Tensor | None = None,
        state_seed: int | Tensor = 0,
        grad_loops: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **paged: Any,
    ) -> LoopOutput:
        """Logits of the last loop; arguments as in `LoopLMModel.forward`.

        `labels` [B, S] (-100 masked) gives the shifted next-token loss of the last loop and nothing else: loop
        objectives live in `looplm.objectives`. `num_items_in_batch` replaces the number of targets in that mean, as
        Trainer asks when it accumulates. `logits_to_keep` limits the logits to the last positions.
        """
        recording = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        out = self.model(
            input_ids,
            attention_mask,
            position_ids,
            cache,
            inputs_embeds,
            use_cache,
            loops,
            keep_loops,
            init_state,
            state_seed,
            grad_loops,
            **{name: value for name, value in recording.items() if value is not None},
            **paged,
        )
        logits = self.lm_head(slice_logits_to_keep(out.last_hidden_state, logits_to_keep))
        return LoopOutput(
            loss=None if labels is None else _next_token_loss(logits, labels, num_items_in_batch),
            logits=logits,
            cache=out.cache,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            gate_logits=out.gate_logits,
            states=out.states,
            context=out.context,
            inputs=out.inputs,
        )

    def hidden_at(self, out: Trace, loop: int) -> Tensor:
        """[B, S, D] of a kept 1-based loop, ready for `lm_head`."""
        return self.model.hidden_at(out, loop)

    def logits_at(self, out: Trace, loop: int) -> Tensor:
        """[B, S, V] of a kept 1-based loop."""
        return self.lm_head(self.hidden_at(out, loop))

    def exit_loops(self, out: Trace, q: float, min_loops: int = 1) -> Tensor:
        """The 1-based loop [B, S] at which each token leaves: the first from `min_loops` on with an exit CDF of q."""
        return self.model.exit_loops(out, q, min_loops)

    def logits_at_exit(self, out: Trace, q: float, min_loops: int = 1) -> Tensor:
        """[B, S, V], each token read at its own exit loop; `out` must keep all loops."""
        return self.lm_head(self.model.hidden_at_exit(out, q, min_loops))

    def generate(self, *args: Any, generation_config: GenerationConfig | None = None, **kwargs: Any) -> Any:
        """As in transformers; `loops` and `state_seed` may come as keywords or lie in the generation config."""
        if kwargs.get("init_state") is not None:
            raise ValueError("generate draws start states by state_seed; init_state belongs to a single forward")
        settings = [config for config in (self.generation_config, generation_config) if config is not None]
        ours = {name: vars(config)[name] for config in settings for name in _OURS if name in vars(config)}
        if not ours:
            return super().generate(*args, generation_config=generation_config, **kwargs)
        # Left in a config, transformers would take our keywords for its own and keep them from the model.
        view = copy.copy(self)
        view.generation_config = _without_ours(self.generation_config)
        chosen = None if generation_config is None else _without_ours(generation_config)
        return super(LoopLMForCausalLM, view).generate(*args, generation_config=chosen, **(ours | kwargs))

    def generate_batch(self, inputs: list[list[int]], *args: Any, loops: int | None = None, **kwargs: Any) -> Any:
        """Continuous batching as transformers does it, at the config's loops: its scheduler carries no depth.

        Raises:
            ValueError: if `loops` asks for another depth than the config's.
        """
        settings = kwargs.get("generation_config") or self.generation_config
        loops = vars(settings).get("loops") if loops is None else loops
        if loops is not None and check_loops(loops) != self.config.loops:
            raise ValueError(
                f"generate_batch runs the config's loops ({self.config.loops}); set model.config.loops = {loops} first"
            )
        known = set(inspect.signature(super().generate_batch).parameters) | {"max_new_tokens"}
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise TypeError(f"generate_batch() got an unexpected keyword argument '{unknown[0]}'")
        return super().generate_batch(inputs, *args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> bool:
        """Size the cache by the call's `loops`, which transformers knows only through the config."""
        sized = copy.copy(self)  # a view: other threads may be generating at other depths on this very model
        if model_kwargs.get("loops") is not None:
            sized.config = self.config.at_loops(check_loops(model_kwargs["loops"]))
        return super(LoopLMForCausalLM, sized)._prepare_cache_for_generation(  # ty: ignore[invalid-argument-type]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )


_OURS = ("loops", "state_seed")


def _without_ours(settings: GenerationConfig) -> GenerationConfig:
    stripped = copy.deepcopy(settings)
    for name in _OURS:
        vars(stripped).pop(name, None)
    return stripped


def _next_token_loss(logits: Tensor, labels: Tensor, num_items: int | Tensor | None) -> Tensor:
    """Mean cross-entropy over unmasked targets; 0 where all are masked."""
    targets = labels[:, 1:].flatten()
    nll = F.cross_entropy(at_least_float32(logits[:, :-1].flatten(0, 1)), targets, ignore_index=-100, reduction="sum")
    count = (targets != -100).sum() if num_items is None else torch.as_tensor(num_items, device=nll.device)
    return nll / count.clamp(min=1)
