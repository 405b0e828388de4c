"""Shared fixtures: golden checkpoints, tiny models, determinism set once."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing may need a hub, and no test may ask one

import pytest
import torch
from safetensors.torch import load_file

import looplm

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tests run side by side, one process a core."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="session")
def ouro_folder() -> Path:
    return GOLDEN / "ouro-tiny"


@pytest.fixture(scope="session")
def ouro_expected(ouro_folder):
    return load_file(ouro_folder / "expected.safetensors")


@pytest.fixture
def ouro(ouro_folder):
    return looplm.load(ouro_folder)


@pytest.fixture
def text(tmp_path):
    """A file of text to train on."""
    path = tmp_path / "text.txt"
    path.write_text("A loop thinks again before it answers. " * 60)
    return path


def tiny_config(**changes) -> looplm.LoopLMConfig:
    values = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "core_layers": 2,
        "loops": 3, "rope_theta": 1e4, "max_position_embeddings": 128, "initializer_range": 0.3,
    }  # fmt: skip
    return looplm.LoopLMConfig(**(values | changes))


def tiny_model(seed: int = 0, **changes) -> looplm.LoopLMForCausalLM:
    torch.manual_seed(seed)
    return looplm.LoopLMForCausalLM(tiny_config(**changes)).eval()


def random_ids(*shape: int, vocab: int = 61, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, vocab, shape, generator=torch.Generator().manual_seed(seed))
