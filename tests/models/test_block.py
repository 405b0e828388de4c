"""The block's norm slots and attention against plain formulas written out here."""

import pytest
import torch
from torch.nn import functional as F

from conftest import random_ids, tiny_config, tiny_model
from looplm.models.block import Block
from looplm.models.context import build_context


def rms(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_attention(block, x):
    """Causal attention position by position, head by head; rotary pairs (i, i + d/2)."""
    attention, length = block.attention, x.shape[1]
    d, groups = attention.head_dim, attention.num_key_value_groups
    q, k, v = (p(x).unflatten(-1, (-1, d)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))

    def turn(y):
        out = y.clone()
        for position in range(length):
            for i in range(d // 2):
                angle = torch.tensor(position / 1e4 ** (2 * i / d))
                a, b = y[:, position, :, i], y[:, position, :, i + d // 2]
                out[:, position, :, i] = a * angle.cos() - b * angle.sin()
                out[:, position, :, i + d // 2] = b * angle.cos() + a * angle.sin()
        return out

    q, k = turn(q), turn(k)
    out = torch.zeros_like(q)
    for head in range(q.shape[2]):
        for position in range(length):
            scores = (k[:, : position + 1, head // groups] @ q[:, position, head, :, None]).squeeze(-1) / d**0.5
            out[:, position, head] = (scores.softmax(-1)[..., None] * v[:, : position + 1, head // groups]).sum(1)
    return attention.o_proj(out.flatten(2))


PLACEMENTS = {
    "pre": lambda x, f, n: x + f(n[0](x)),
    "post": lambda x, f, n: n[2](x + f(x)),
    "sandwich_branch": lambda x, f, n: x + n[1](f(n[0](x))),
    "sandwich_dual": lambda x, f, n: n[2](x + f(n[0](x))),
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("placement", list(PLACEMENTS))
@torch.no_grad()
def test_block_equals_the_drawn_formula(placement, kv_heads):
    torch.manual_seed(1)
    config = tiny_config(norm_placement=placement, num_key_value_heads=kv_heads)
    config._attn_implementation = "sdpa"
    block = Block(config, 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.randn(2, 5, 32)

    def slots(norms):
        return [(lambda y, m=m: rms(y, m.weight)) if hasattr(m, "weight") else None for m in
                (norms.pre, norms.branch, norms.post)]  # fmt: skip

    wanted = PLACEMENTS[placement](x, lambda y: plain_attention(block, y), slots(block.attention_norms))
    mlp = block.mlp
    wanted = PLACEMENTS[placement](
        wanted, lambda y: mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y)), slots(block.mlp_norms)
    )
    torch.testing.assert_close(block(x, 1, build_context(config, x, None, None, None)), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@torch.no_grad()
def test_attention_implementations_agree(kv_heads):
    model = tiny_model(num_key_value_heads=kv_heads)
    ids = random_ids(2, 9)
    sdpa = model(ids).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(ids).logits, sdpa, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_plain_pre_norm_model_unrolls_to_layers_in_a_row():
    """Without norm in the loop, k layers looped T times are k*T layers in a row and one final norm."""
    model = tiny_model(norm_placement="pre", norm_in_loop=False, exit_gate=False, loops=3)
    backbone, ids = model.model, random_ids(2, 7)
    x = backbone.embed_tokens(ids)
    context = build_context(model.config, x, None, None, None)
    for _ in range(3):
        for block in backbone.core:
            x = block(x, 1, context)
    out = model(ids)
    torch.testing.assert_close(out.logits, model.lm_head(rms(x, backbone.norm.weight)), atol=1e-5, rtol=1e-5)
    assert out.gate_logits is None
    assert out.exit_pdf is None
