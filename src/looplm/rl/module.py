"""Policy and objective as one module, so that what wraps it sees every use of a parameter."""

import torch
from torch import Tensor, nn

from looplm.models import LoopLMForCausalLM, Trace
from looplm.models.exits import exit_log_pdf
from looplm.models.replay import replay
from looplm.objectives import PolicyGradient
from looplm.objectives.linear_ce import linear_cross_entropy
from looplm.objectives.loop_weights import LearnedWeights, Trajectories
from looplm.objectives.targets import Batch, Metrics, hidden_rows, next_token_targets
from looplm.training.module import TrainedModule


class PolicyModule(TrainedModule):
    """The policy under its objective, with the logits of learned loop weights beside it."""

    def __init__(
        self, model: LoopLMForCausalLM, objective: PolicyGradient, loops: int, autocast: torch.dtype | None = None
    ) -> None:  # fmt: skip
        super().__init__(model, autocast)
        self.objective = objective
        learned = isinstance(objective.loop_weights, LearnedWeights)
        # In the model's precision, since the objective computes in that of the weights.
        logits = objective.loop_weights.first_logits(loops).to(model.dtype) if learned else None
        self.loop_logits = None if logits is None else nn.Parameter(logits)

    def forward(self, batch: Batch, loops: int) -> tuple[Tensor, list[tuple[Metrics, Tensor]]]:
        """The loss of a micro-batch; its metrics as sums weighted by `batch["weights"]`, each with their weight."""
        with self.precision():
            trace = trajectories(self.model, batch, loops, self.objective)
            loss, metrics = self.objective(self.model, trace, batch, self.loop_logits)
        return self.joined(loss), metrics

    def loop_weights(self) -> list[float]:
        """The learned weights of the loops as they are, if there are any."""
        if self.loop_logits is None:
            return []
        loops = torch.arange(1.0, 1 + len(self.loop_logits))[:, None]
        seen = Trajectories(loop=loops, exits=loops[-1], logits=self.loop_logits.detach().cpu())
        return seen.weights(self.objective.loop_weights)[:, 0].tolist()

    @torch.no_grad()
    def of_gate(self, batch: Batch, loops: int) -> Tensor:
        """The exit distribution's log [B, S, loops] of the gate as it is, aligned with the labels."""
        gate_logits = trajectories(self.model, batch, loops, self.objective).gate_logits
        assert gate_logits is not None
        return torch.roll(exit_log_pdf(gate_logits), 1, dims=1)


@torch.no_grad()
def simulated_exits(model: LoopLMForCausalLM, batch: Batch, loops: int, q: float) -> dict[str, Tensor]:
    """Where the gate would have let each token go: other `exits` [B, S], and the loops at which inputs are `read`.

    Keys stay those of all loops, as they were when the tokens were sampled.
    """
    trace = model.model(batch["input_ids"], batch["attention_mask"], loops=loops, use_cache=False)
    read = model.exit_loops(trace, q)
    return {"read": read, "exits": torch.roll(read, 1, dims=1)}


def trajectories(model: LoopLMForCausalLM, batch: Batch, loops: int, objective: PolicyGradient) -> Trace:
    """The loops of a batch's tokens as they were when sampled; only as many are kept as the objective reads."""
    early = bool((batch["exits"] < loops).any())
    if not early:
        return model.model(
            batch["input_ids"], batch["attention_mask"], loops=loops, use_cache=False,
            keep_loops=sorted(objective.needs(loops, leaves_early=False)),
        )  # fmt: skip
    return replay(
        model.model, batch["input_ids"], batch["attention_mask"], exits=batch["key_loops"], read=batch["read"],
        loops=loops,
    )  # fmt: skip


@torch.no_grad()
def emitted_logprobs(model: LoopLMForCausalLM, batch: Batch, loops: int, objective: PolicyGradient) -> Tensor:
    """What `model` says of each target [B, S] at the loop that emitted it, under the temperature; 0 elsewhere."""
    trace, targets = trajectories(model, batch, loops, objective), next_token_targets(batch["labels"])
    (hidden,) = hidden_rows(model, trace, [max(trace.states)])
    nothing = torch.zeros(1, len(targets), device=targets.device)
    _, nll = linear_cross_entropy([hidden / objective.temperature], model.lm_head.weight, targets, nothing)
    return torch.roll(-nll.view_as(batch["labels"]), 1, dims=1)
