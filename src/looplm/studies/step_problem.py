"""A model of given sizes, whose training steps benchmarks compare."""

from dataclasses import dataclass

import torch

from looplm.models import LoopLMConfig, LoopLMForCausalLM


@dataclass(frozen=True, kw_only=True)
class StepProblem:
    """`layers` shared layers looped `loops` times on `rows` rows of `length` tokens."""

    width: int
    layers: int
    loops: int
    vocab: int
    length: int
    rows: int

    def __post_init__(self) -> None:
        if self.width % 64 and self.width > 64:
            raise ValueError(f"--width {self.width} must be a multiple of 64, the width of an attention head")

    def model(self) -> LoopLMForCausalLM:
        """A new model of these sizes in training mode, with an exit gate, the same at every call."""
        config = LoopLMConfig(
            vocab_size=self.vocab, hidden_size=self.width, intermediate_size=8 * self.width // 3, loops=self.loops,
            core_layers=self.layers, num_attention_heads=max(1, self.width // 64), rope_theta=1e4, exit_gate=True,
            max_position_embeddings=self.length,
        )  # fmt: skip
        torch.manual_seed(0)
        return LoopLMForCausalLM(config).train()
