"""The decoding forms of a model's parts against the parts themselves."""

import sys
from types import SimpleNamespace

import pytest
import torch
from engine_models import huginn_like, ouro_like
from torch import nn
from torch.nn import functional as F

from looplm.engine import Engine, SamplingParams
from looplm.engine.compiled import add_normed, attend, compiled, normed
from looplm.engine.kernels import (
    BY_COLUMNS,
    FourCallNorm,
    JoiningNorms,
    OneProductSwiGLU,
    PlainNorm,
    Projection,
    decoding_norm,
    for_decoding,
)
from looplm.models.block import ResidualNorms
from looplm.models.norm import RMSNorm
from looplm.models.rotary import rotate_halves

PLAIN = SimpleNamespace(add_normed=add_normed, normed=normed, attend=attend)

ROWS = [1, 2, BY_COLUMNS.start - 1, BY_COLUMNS.start, BY_COLUMNS.stop - 1, BY_COLUMNS.stop]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_projection_is_a_linear_map_whatever_its_rows(rows, biased, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=biased, dtype=dtype)
    x = torch.randn(rows, 24, dtype=dtype)
    found = Projection(layer.weight, layer.bias)(x)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    assert found.shape == (rows, 40)
    assert torch.allclose(found, layer(x), rtol=tolerance, atol=tolerance)


def rms_norm(size=24, eps=1e-3):
    torch.manual_seed(1)
    norm = RMSNorm(size, eps).double()
    with torch.no_grad():
        norm.weight.normal_()
    return norm


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-3, 1.0, 1e9])
def test_four_calls_are_the_norm_and_its_sum(size):
    """Also where eps decides: at states of zero, and near it."""
    norm = rms_norm()
    x, y = torch.randn(3, 24).double(), size * torch.randn(3, 24).double()
    four = decoding_norm(norm)
    assert isinstance(four, FourCallNorm)
    by_hand = y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-3) * norm.weight
    assert torch.allclose(four(y), by_hand, rtol=1e-13, atol=1e-300)
    assert torch.allclose(four(y), norm(y), rtol=1e-13, atol=1e-300)
    assert torch.allclose(four.onto(x, y, 0.3), x + 0.3 * by_hand, rtol=1e-13)


def test_other_norms_stay_as_they_are():
    """Layer norms, no norm, and RMS below float32, whose rounding is the model's own."""
    x, y = torch.randn(3, 24), torch.randn(3, 24)
    for norm in (nn.LayerNorm(24), nn.Identity(), RMSNorm(24, 1e-6).bfloat16()):
        plain = decoding_norm(norm)
        assert isinstance(plain, PlainNorm)
        assert torch.equal(plain(y), norm(y))
        assert torch.equal(plain.onto(x, y, 1.0), x + norm(y))


@pytest.mark.parametrize("placement", ["pre", "post", "branch", "sandwich_branch", "sandwich_dual"])
def test_norms_join_as_the_models_own(placement):
    config = ouro_like(norm_placement=placement, residual_scale=0.5).config
    norms = ResidualNorms(config).double().eval()
    x, y = torch.randn(2, 5, config.hidden_size).double()
    ours = JoiningNorms(norms)
    assert torch.allclose(ours.pre(x), norms.pre(x), rtol=1e-13)
    assert torch.allclose(ours.join(x, y), norms.join(x, y), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rows", ROWS)
def test_one_product_for_gate_and_up(rows):
    mlp = ouro_like(dtype=torch.float64).model.core[0].mlp
    x = torch.randn(rows, mlp.gate_proj.in_features).double()
    wanted = F.linear(F.silu(F.linear(x, mlp.gate_proj.weight)) * F.linear(x, mlp.up_proj.weight), mlp.down_proj.weight)
    assert torch.allclose(OneProductSwiGLU(mlp)(x), wanted, rtol=1e-12)


@pytest.mark.parametrize("build", [ouro_like, huginn_like])
def test_the_users_model_is_left_as_it_was(build):
    """No module of it changes its mode or place, and its outputs are the same."""
    model = build(dropout=0.1).train()
    ids = torch.tensor([[1, 2, 3]])
    before = {name: module.training for name, module in model.named_modules()}
    wanted = model.eval()(ids).logits
    model.train()
    for_decoding(model)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.equal(model.eval()(ids).logits, wanted)


# Compiled loops -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loops", [PLAIN, compiled()], ids=["plain", "compiled"])
def test_compiled_norms_are_the_norm_and_its_sum(loops):
    norm = rms_norm()
    x, y = torch.randn(3, 24), torch.randn(3, 24)
    x, y = x * torch.tensor([[1.0], [1e-4], [0.0]]), y * torch.tensor([[1.0], [1e-4], [0.0]])
    weight, out = norm.weight.detach().float().numpy(), torch.empty(3, 24)
    wanted = norm(y.double()).float()
    loops.normed(y.numpy(), weight, 1e-3, out.numpy())
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-7)
    loops.add_normed(x.numpy(), y.numpy(), weight, 1e-3, 0.3, out.numpy())
    assert torch.allclose(out, x + 0.3 * wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loops", [PLAIN, compiled()], ids=["plain", "compiled"])
@pytest.mark.parametrize("one_row", [False, True])
def test_compiled_attention_is_attention_over_the_pages(loops, one_row):
    """Three tokens, of three rows or of one; keys after a token's own position hold what is no number."""
    torch.manual_seed(2)
    heads, groups, width, page = 4, 2, 6, 16
    tokens = torch.randn(9 * page, 2 * groups, width)
    tables = torch.tensor([[5, 3]]) if one_row else torch.tensor([[5, 3], [2, 7], [8, 1]])
    positions = torch.tensor([17, 18, 19]) if one_row else torch.tensor([17, 4, 30])
    rows = tables.expand(3, -1)
    write = rows.gather(1, positions[:, None] // page)[:, 0] * page + positions % page
    given = torch.randn(3, heads + 2 * groups, width)
    cos, sin = torch.randn(3, 1, width), torch.randn(3, 1, width)
    turned = given.clone()
    turned[:, : heads + groups] = rotate_halves(given[:, : heads + groups], (cos, sin))
    held = tokens.clone()
    held[write] = turned[:, heads:]
    places = (rows[..., None] * page + torch.arange(page)).flatten(1)
    seen = held[places]
    wanted = torch.stack(
        [
            F.scaled_dot_product_attention(
                turned[row, :heads, None], *seen[row, : positions[row] + 1].transpose(0, 1).chunk(2), scale=0.3,
                enable_gqa=True,
            )[:, 0]
            for row in range(3)
        ]
    )  # fmt: skip
    last = int(positions.max())
    for row in range(len(tables)):
        hidden = [int(places[row, key]) for key in range((last if one_row else int(positions[row])) + 1, 2 * page)]
        tokens[hidden] = float("nan")
    out = torch.empty(3, heads, width)
    loops.attend(
        given.numpy(), cos.numpy(), sin.numpy(), tokens.numpy(), write.numpy(), tables.numpy(), positions.numpy(), page,
        0.3, out.numpy(),
    )  # fmt: skip
    assert torch.allclose(out, wanted, rtol=1e-4, atol=1e-5)
    assert torch.allclose(tokens[write], turned[:, heads:], rtol=1e-5, atol=1e-6)


# Huginn's random weights amplify rounding, in either form alike.
@pytest.mark.parametrize(("build", "apart"), [(ouro_like, 1e-4), (huginn_like, 1e-2)])
def test_an_engine_makes_the_same_tokens_compiled_or_not(build, apart):
    model = build(dtype=torch.float32)
    prompts, params = [[1, 2, 3], list(range(1, 30)), [7]], SamplingParams(max_tokens=20)
    one, other = (
        Engine(model, max_length=64, compiled=compiles).generate(prompts, params) for compiles in (True, False)
    )
    assert [done.token_ids for done in one] == [done.token_ids for done in other]
    for ours, theirs in zip(one, other, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=apart)


def test_compiled_loops_where_they_cannot_be_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"needs a float32 model on a CPU; this one is torch.float64 on 'cpu'"):
        Engine(ouro_like(), max_length=64, compiled=True)
    with pytest.raises(ValueError, match="compiled=True does not go with deterministic=True"):
        Engine(ouro_like(dtype=torch.float32), max_length=64, compiled=True, deterministic=True)
    monkeypatch.setitem(sys.modules, "numba", None)
    compiled.cache_clear()
    with pytest.raises(ValueError, match=r"compiled=True needs numba: pip install 'looplm\[cpu\]'"):
        Engine(ouro_like(dtype=torch.float32), max_length=64, compiled=True)
    compiled.cache_clear()
