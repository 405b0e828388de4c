"""What a forward returns."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput

from looplm.models.context import AnyCache, LoopContext
from looplm.models.exits import exit_pdf


class _ExitDistribution:
    gate_logits: Tensor | None

    @property
    def exit_pdf(self) -> Tensor | None:
        """Probability of leaving after each loop [B, S, loops], float32; None where the model has no gate."""
        return None if self.gate_logits is None else exit_pdf(self.gate_logits)


@dataclass
class LoopModelOutput(_ExitDistribution, ModelOutput):
    """Output of the backbone.

    last_hidden_state: [B, S, D] of the last loop, ready for the head · cache: keys and values, if asked for
    gate_logits: [B, S, loops] float32, or None · states: {loop: [B, S, D]}, what the next loop receives
    hidden_states, attentions: of every visit of every layer, in order of time, if asked for
    context: the call's context, from which `hidden_at` reads out a kept loop
    inputs: [B, S, D], what the prelude gave and each loop may inject
    """

    # Always set by the model; transformers wants a default for every field.
    last_hidden_state: Tensor = None  # ty: ignore[invalid-assignment]
    cache: AnyCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    gate_logits: Tensor | None = None
    states: dict[int, Tensor] = None  # ty: ignore[invalid-assignment]
    context: LoopContext = None  # ty: ignore[invalid-assignment]
    inputs: Tensor = None  # ty: ignore[invalid-assignment]


@dataclass
class LoopOutput(_ExitDistribution, ModelOutput):
    """Output of the language model: logits [B, S, V] of the last loop, the plain loss if labels were given, and the
    backbone's fields (see `LoopModelOutput`).
    """

    loss: Tensor | None = None
    logits: Tensor = None  # ty: ignore[invalid-assignment]
    cache: AnyCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    gate_logits: Tensor | None = None
    states: dict[int, Tensor] = None  # ty: ignore[invalid-assignment]
    context: LoopContext = None  # ty: ignore[invalid-assignment]
    inputs: Tensor = None  # ty: ignore[invalid-assignment]


Trace = LoopModelOutput | LoopOutput
