"""Padding on either side, fully masked rows and packed documents: each text as if it were alone."""

import pytest
import torch

from conftest import random_ids, tiny_model

ATTENTION = ["sdpa", "eager", "flex_attention"]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone(attention, side, use_cache):
    model, long, short = tiny_model(), random_ids(1, 33), random_ids(1, 2, seed=5)
    model.set_attn_implementation(attention)
    pad = torch.zeros(1, 31, dtype=torch.long)
    parts = (pad, short) if side == "left" else (short, pad)
    ids = torch.cat([long, torch.cat(parts, 1)])
    mask = torch.cat([torch.ones_like(long), torch.cat([(part != 0).long() for part in parts], 1)])
    out = model(ids, attention_mask=mask, loops=4, use_cache=use_cache)
    assert out.logits.isfinite().all()
    assert out.gate_logits.isfinite().all()
    real = out.logits[1, 31:] if side == "left" else out.logits[1, :2]
    torch.testing.assert_close(real, model(short, loops=4).logits[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(out.logits[0], model(long, loops=4).logits[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(attention, masked):
    model, documents = tiny_model(), [random_ids(1, n, seed=n) for n in (5, 1, 7)]
    model.set_attn_implementation(attention)
    pad = torch.zeros(1, 3, dtype=torch.long)
    ids = torch.cat([*documents, pad] if masked else documents, 1)
    positions = torch.cat([torch.arange(n) for n in ((5, 1, 7, 3) if masked else (5, 1, 7))])[None]
    mask = (ids != 0).long() if masked else None
    packed = model(ids, attention_mask=mask, position_ids=positions).logits  # by default arguments: no cache is built
    assert packed.isfinite().all()
    alone = torch.cat([model(document).logits for document in documents], 1)
    torch.testing.assert_close(packed[:, :13], alone, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_padding_may_lie_before_packed_documents():
    model, documents = tiny_model(), [random_ids(1, n, seed=n) for n in (4, 6)]
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), *documents], 1)
    for pad_positions in ([0, 0, 0], [0, 1, 2], [1, 1, 1]):
        positions = torch.tensor([[*pad_positions, *range(4), *range(6)]])
        packed = model(ids, attention_mask=(ids != 0).long(), position_ids=positions).logits[:, 3:]
        alone = torch.cat([model(document).logits for document in documents], 1)
        torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_left_padding_without_given_positions_counts_real_tokens():
    """Through a cache, position by position: as if the padding were not there."""
    model, ids = tiny_model(), random_ids(1, 8)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    mask = (padded != 0).long()
    out = model(padded[:, :9], attention_mask=mask[:, :9], use_cache=True)
    logits = [out.logits[:, 4:]]
    for end in range(10, 13):
        out = model(padded[:, end - 1 : end], attention_mask=mask[:, :end], cache=out.cache)
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits, atol=2e-5, rtol=1e-4)


def test_a_misshapen_mask_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 3\]; expected \[1, 4\]"):
        tiny_model()(random_ids(1, 4), attention_mask=torch.ones(1, 3))


@torch.no_grad()
def test_packed_documents_share_no_cache():
    model, ids = tiny_model(), random_ids(1, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    assert model(ids, position_ids=positions).cache is None
    for arguments in ({"use_cache": True}, {"cache": model(ids).cache}):
        with pytest.raises(ValueError, match="packed documents"):
            model(ids, position_ids=positions, **arguments)
    cache = model(ids, position_ids=torch.arange(7)[None], use_cache=True).cache
    assert model(ids[:, :2], position_ids=torch.tensor([[7, 8]]), cache=cache).cache.get_seq_length() == 9
