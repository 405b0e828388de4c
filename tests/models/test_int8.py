"""Int8 weights against weights rounded by hand: the products, the model at any depth, and what is refused."""

import copy
import sys

import pytest
import torch
from torch import nn

import looplm
from conftest import random_ids, tiny_model
from looplm.models.int8 import held_bytes

HUGINN = {
    "prelude_layers": 1, "coda_layers": 2, "injection": "concat", "state_init": "normal", "norm_in_loop": False,
    "norm_placement": "sandwich_dual", "exit_gate": False, "rope": "adjacent", "qk_bias": True,
    "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = [{}, HUGINN, {"mlp": "gelu", "bias": True}]
ROUNDED = tuple(f".{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def held_as(weight):
    """Integers and scales [O, 1] as torchao holds them, in float64."""
    return weight.qdata.double(), weight.scale.double()


def rounded_by_hand(model, held):
    """`model` in float64, its weights replaced by what the integers of `held` stand for."""
    model = copy.deepcopy(model).double()
    for (name, weight), (_, other) in zip(model.named_parameters(), held.named_parameters(), strict=True):
        if name.endswith(ROUNDED):
            integers, scales = held_as(other)
            weight.data = integers * scales
    return model


@pytest.mark.parametrize("changes", SHAPES)
def test_the_blocks_projections_are_rounded_to_nearest_and_nothing_else_moves(changes):
    model = tiny_model(**changes)
    held = looplm.quantize_int8(copy.deepcopy(model))
    seen = set()
    for (name, weight), (_, other) in zip(model.named_parameters(), held.named_parameters(), strict=True):
        if name.endswith(ROUNDED):
            integers, scales = held_as(other)
            by_hand = weight.double().abs().amax(1, keepdim=True) / 127.5
            assert torch.allclose(scales, by_hand, rtol=1e-6)
            assert ((weight.double() / by_hand - integers).abs() <= 0.5 + 1e-4).all()
            assert integers.min() >= -128
            seen.add(name)
        else:
            assert type(other) is nn.Parameter
            assert weight.equal(other)
    blocks = sum(len(getattr(model.model, part)) for part in ("prelude", "core", "coda"))
    assert len(seen) == blocks * (6 if changes.get("mlp") == "gelu" else 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_weights(dtype):
    model = looplm.quantize_int8(tiny_model(bias=True).to(dtype))
    for layer in (model.model.core[0].attention.q_proj, model.model.core[1].mlp.down_proj):
        layer.bias.data.uniform_(-1, 1)
        x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(3)).to(dtype)
        integers, scales = held_as(layer.weight)
        weight, bias = integers * scales, layer.bias.double()
        wanted = x.double() @ weight.t() + bias
        # A sum of I products in float32, then roundings to dtype of it, of the scale, of their product, with the bias.
        size = x.double().abs() @ weight.abs().t() + bias.abs()
        bound = (layer.in_features * 2**-24 + 5 * torch.finfo(dtype).eps / 2) * size
        assert ((layer(x).double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("changes", SHAPES)
def test_every_loop_equals_that_of_a_model_with_the_rounded_weights(changes):
    """In float64 the products differ in the order of rounding alone."""
    model = tiny_model(**changes)
    held = looplm.quantize_int8(copy.deepcopy(model)).double()
    plain, ids = rounded_by_hand(model, held), random_ids(3, 17)
    ours, theirs = (one(ids, loops=6, keep_loops="all") for one in (held, plain))
    for loop in range(1, 7):
        assert torch.allclose(held.logits_at(ours, loop), plain.logits_at(theirs, loop), rtol=0, atol=1e-8)
    if ours.gate_logits is not None:
        assert torch.allclose(ours.gate_logits, theirs.gate_logits, rtol=0, atol=1e-8)
    moved = (model.double()(ids, loops=6).logits - theirs.logits).abs().max()
    assert moved > 1e-3, "the rounding itself is far above that tolerance"


def test_bytes_are_counted_as_held():
    model = tiny_model()
    core, held = model.model.core, looplm.quantize_int8(copy.deepcopy(model)).model.core
    matrices = [layer for layer in core.modules() if isinstance(layer, nn.Linear)]
    weights, rows = sum(m.weight.numel() for m in matrices), sum(m.out_features for m in matrices)
    norms = sum(p.numel() for p in core.parameters()) - weights
    assert held_bytes(core) == 4 * (weights + norms)
    assert held_bytes(held) == weights + rows * (4 + 1) + 4 * norms  # a float32 scale and an int8 zero point a row


@pytest.mark.parametrize("layout", ["looplm", "ouro"])
def test_int8_weights_are_not_saved(tmp_path, layout):
    model = looplm.quantize_int8(tiny_model())
    with pytest.raises(ValueError, match="int8 weights are not saved"):
        looplm.save(model, tmp_path / "out", layout=layout)
    with pytest.raises(ValueError, match="int8 weights are not saved"):
        model.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_rounded_is_refused_and_stays_as_it_was(monkeypatch):
    with pytest.raises(ValueError, match="int8 already"):
        looplm.quantize_int8(looplm.quantize_int8(tiny_model()))
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(ValueError, match=f"float32 or bfloat16, not {dtype}"):
            looplm.quantize_int8(tiny_model().to(dtype))
    monkeypatch.setitem(sys.modules, "torchao.quantization.quant_api", None)
    model = tiny_model()
    with pytest.raises(ValueError, match=r"^int8 weights need the 'int8' extra: pip install 'looplm\[int8\]'$"):
        looplm.quantize_int8(model)
    assert held_bytes(model.model.core) == 4 * sum(weight.numel() for weight in model.model.core.parameters())
