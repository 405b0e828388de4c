"""One of several processes puts a sharded model with adapters together (run by torchrun); its argument is a file.

Process 0 writes there that all agreed; the others must hold nothing whole beyond one tensor at a time.
"""

import sys
import weakref
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import looplm
from looplm.objectives import ExpectedLoss
from looplm.training.adapters import Lora, add_adapter, gathered_adapter, plain_model
from looplm.training.distribution import distribute, open_world
from looplm.training.module import ObjectiveModule

world = open_world()
torch.manual_seed(0)
config = looplm.LoopLMConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_attention_heads=2, core_layers=2, loops=2
)
model = looplm.LoopLMForCausalLM(config)
add_adapter(model, Lora(rank=2), seed=0)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.normal_()


def averages():
    return {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}


alone = [plain_model(model), plain_model(model, averages())]
alone_adapter = gathered_adapter(model)
distribute(ObjectiveModule(model, ExpectedLoss()), "fsdp", world)
assert all(isinstance(average, DTensor) for average in averages().values())

held, most, real = [], 0, DTensor.full_tensor


def watched(self, **options):
    global most
    whole = real(self, **options)
    held.append(weakref.ref(whole))
    most = max(most, sum(one() is not None for one in held))
    return whole


DTensor.full_tensor = watched
leads = world.leads
found = [plain_model(model, weights, kept=world.leads) for weights in ({}, averages())]
adapter = gathered_adapter(model, kept=world.leads)
assert len(held) == 2 * len(model.state_dict()) + len(alone_adapter), len(held)
if world.leads:
    for wanted, made in zip(alone, found, strict=True):
        torch.testing.assert_close(made.state_dict(), wanted.state_dict())
    torch.testing.assert_close(adapter, alone_adapter)
    Path(sys.argv[1]).write_text("agreed")
else:
    assert (found, adapter) == ([None, None], {})
    assert most <= 2, most  # the next one arrives while the name of the last still stands
