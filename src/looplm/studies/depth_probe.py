"""What a model answers at every loop on a task's held-out questions, and what its gate says there."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from looplm.models import LoopLMForCausalLM
from looplm.tasks import Compose, Example


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Per question, at the token that gives the answer: `correct` [N, loops], `gate_logits` [N, loops], `hops` [N].

    `weights` [N] sum to 1 and give every hop count the same share.
    """

    correct: Tensor
    gate_logits: Tensor
    hops: Tensor

    @property
    def weights(self) -> Tensor:
        """Each hop count's share, spread over its questions."""
        counts = torch.bincount(self.hops)
        return 1.0 / (counts[self.hops] * (counts > 0).sum()).double()

    def accuracy_by_hops(self) -> dict[str, list[float]]:
        """Accuracy at every loop, for each hop count."""
        found = {}
        for hops in self.hops.unique().tolist():
            found[str(hops)] = self.correct[self.hops == hops].double().mean(0).tolist()
        return found


def held_out_questions(task: Compose) -> dict[int, list[Example]]:
    """Every question of one and two hops (the facts) and every longer one that training left out, by hops."""
    found = {}
    for hops in range(1, task.max_hops + 1):
        paths = itertools.product(range(task.relations), repeat=hops)
        asked = [(start, path) for path in paths for start in range(task.entities)]
        found[hops] = [task.question(*ask) for ask in asked if hops < 3 or task.is_held_out(*ask)]
    return found


@torch.no_grad()
def probe_questions(model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Compose, loops: int) -> Probe:
    """Ask every held-out question and read the answer at every loop."""
    correct, gates, hops = [], [], []
    for count, examples in held_out_questions(task).items():
        ids = tokenizer([example.prompt for example in examples], return_tensors="pt", add_special_tokens=False)
        answers = tokenizer([example.answer for example in examples], return_tensors="pt", add_special_tokens=False)
        out = model(ids["input_ids"], loops=loops, keep_loops="all", use_cache=False, logits_to_keep=1)
        said = [model.logits_at(out, loop)[:, -1].argmax(-1, keepdim=True) for loop in range(1, loops + 1)]
        correct.append(torch.cat(said, dim=-1) == answers["input_ids"])
        gates.append(out.gate_logits[:, -1])
        hops.append(torch.full((len(examples),), count))
    return Probe(correct=torch.cat(correct), gate_logits=torch.cat(gates), hops=torch.cat(hops))
