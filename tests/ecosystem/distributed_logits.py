"""One rank of a sharded forward: loads a folder under a parallel plan and saves its logits (run by torchrun)."""

import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import looplm  # noqa: F401  (registers the Auto classes)

folder, kind, out = sys.argv[1:]
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**{kind: 2}))
ids = torch.arange(1, 13).reshape(2, 6)
found = {}
for loops in (1, 3, 5):
    logits = model(ids, loops=loops, use_cache=False).logits
    found[f"loops{loops}"] = (logits.full_tensor() if hasattr(logits, "full_tensor") else logits).detach().contiguous()
loss = model(ids, labels=ids, loops=3, use_cache=False).loss
loss.backward()
sharded = [p for p in model.parameters() if hasattr(p, "placements") and any(x.is_shard() for x in p.placements)]
found["loss"] = loss.detach().reshape(1)
found["sharded"] = torch.tensor([len(sharded)])
name, gate = next((n, p) for n, p in model.named_parameters() if n.endswith("core.0.mlp.down_proj.weight"))
found["gradient"] = (gate.grad.full_tensor() if hasattr(gate.grad, "full_tensor") else gate.grad).contiguous()
if dist.get_rank() == 0:
    save_file(found, out)
dist.destroy_process_group()
