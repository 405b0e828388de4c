"""Costs against the published parameter counts and numbers computed by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import tiny_config
from looplm import LoopLMForCausalLM
from looplm.models.accounting import count_parameters, flops_per_token, kv_bytes_per_token
from looplm.models.presets import PRESETS, ouro_1_4b, ouro_2_6b


def test_presets_have_the_published_parameter_counts():
    assert count_parameters(ouro_1_4b()) == 1_434_652_673
    assert count_parameters(ouro_2_6b()) == 2_667_974_657
    assert set(PRESETS) == {"ouro_1_4b", "ouro_2_6b", "huginn_3_5b"}


def test_key_value_bytes():
    assert kv_bytes_per_token(ouro_1_4b()) == 768 * 1024
    assert kv_bytes_per_token(ouro_2_6b()) == 1.5 * 1024**2
    assert kv_bytes_per_token(ouro_1_4b(), loops=1) == 192 * 1024
    assert kv_bytes_per_token(tiny_config(prelude_layers=1, num_key_value_heads=1), 5, torch.float32) == 11 * 2 * 8 * 4


def test_ouro_flops_by_hand():
    """2 x (24 layers x 51,380,224 matrix weights x 4 loops + head) + 4 gates; the paper's 10.1 GFLOP."""
    wanted = 2 * (24 * 51_380_224 * 4 + 2048 * 49152) + 4 * 2 * 2048
    assert flops_per_token(ouro_1_4b()) == wanted
    assert round(wanted / 1e9, 1) == 10.1
    assert round(flops_per_token(ouro_2_6b()) / 1e9, 1) == 19.9


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_key_value_heads": 2, "prelude_layers": 1, "coda_layers": 1},
        {"injection": "concat", "bias": True, "exit_gate": False},
        {"injection": "concat", "inject_once": True, "state_init": "zero"},
        {"injection": "diagonal", "mlp": "gelu", "norm": "layer", "rope": "learned"},
        {"injection": "add", "head_dim": 12, "qk_norm": True, "tie_word_embeddings": True},
    ],
)
@torch.no_grad()
def test_flops_equal_what_torch_counts(shape):
    config, length = tiny_config(**shape), 16
    model = LoopLMForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    for loops in (1, 4):
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(1, length, dtype=torch.long), loops=loops, use_cache=False)
        assert counter.get_total_flops() == length * flops_per_token(config, loops, context_length=length)
