"""The tensor-parallel and FSDP2 plans: two gloo ranks give one process's logits, loss and gradients."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import looplm
from conftest import tiny_model
from looplm.models.pretrained import _check_tensor_parallel

FAMILIES = {
    "ouro": {"vocab_size": 64},
    "huginn": {
        "vocab_size": 64, "prelude_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual",
        "norm_in_loop": False, "injection": "concat", "state_init": "normal", "rope": "adjacent", "qk_bias": True,
        "exit_gate": False, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["tp_size", "fsdp_size"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_two_ranks_equal_one_process(tmp_path, family, kind):
    model = tiny_model(initializer_range=0.1, **FAMILIES[family])
    looplm.save(model, tmp_path / "model")
    script = Path(__file__).parent / "distributed_logits.py"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", str(script), str(tmp_path / "model"), kind,
        str(tmp_path / "found.safetensors"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(tmp_path / "found.safetensors")
    ids = torch.arange(1, 13).reshape(2, 6)
    for loops in (1, 3, 5):
        wanted = model(ids, loops=loops, use_cache=False).logits.detach()
        torch.testing.assert_close(found[f"loops{loops}"], wanted, atol=1e-4, rtol=1e-3)
    loss = model(ids, labels=ids, loops=3, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(found["loss"][0], loss.detach(), atol=1e-5, rtol=1e-5)
    gradient = model.model.core[0].mlp.down_proj.weight.grad
    torch.testing.assert_close(found["gradient"], gradient, atol=1e-5, rtol=1e-3)
    assert found["sharded"].item() >= 10


def test_pipeline_stages_are_refused_with_a_reason(tmp_path):
    looplm.save(tiny_model(), tmp_path)
    with pytest.raises(ValueError, match="pp_size=2: a looped core passes its layers again in every loop"):
        AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=DistributedConfig(pp_size=2))


def test_heads_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="tp_size=2 does not divide num_key_value_heads=1"):
        _check_tensor_parallel(tiny_model(num_key_value_heads=1).config, DistributedConfig(tp_size=2))
    _check_tensor_parallel(tiny_model().config, DistributedConfig(tp_size=2))
