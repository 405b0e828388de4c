"""Our Ouro against outputs of the published reference code (tests/golden/ouro-tiny)."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import looplm

TOLERANCE = 2e-4
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("loop", [1, 2, 3, 4])
def test_every_loop_matches_the_reference(ouro, ouro_expected, loop):
    out = ouro(ouro_expected["input_ids"], keep_loops="all")
    for ours, theirs in (
        (ouro.hidden_at(out, loop), f"hidden_loop{loop}"),
        (ouro.logits_at(out, loop), f"logits_loop{loop}"),
        (out.gate_logits[..., loop - 1], f"gate_logit_loop{loop}"),
    ):
        torch.testing.assert_close(ours, ouro_expected[theirs], atol=TOLERANCE, rtol=0)


def test_exit_distribution_and_default_logits(ouro, ouro_expected):
    out = ouro(ouro_expected["input_ids"], keep_loops="all")
    torch.testing.assert_close(out.exit_pdf, ouro_expected["exit_pdf"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(out.logits, ouro_expected["logits_default"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("q", [0.3, 0.5, 0.8])
def test_exit_loops_are_identical(ouro, ouro_expected, q):
    out = ouro(ouro_expected["input_ids"], keep_loops="all")
    assert torch.equal(ouro.exit_loops(out, q), ouro_expected[f"exit_loop_q{q}"])
    torch.testing.assert_close(ouro.logits_at_exit(out, q), ouro_expected[f"logits_q{q}"], atol=TOLERANCE, rtol=0)


def test_greedy_by_a_hand_written_cached_loop(ouro, ouro_expected):
    tokens, cache = ouro_expected["input_ids"], None
    new = tokens
    for _ in range(24):
        out = ouro(new, cache=cache, use_cache=True)
        cache, new = out.cache, out.logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], dim=1)
    assert torch.equal(tokens, ouro_expected["greedy_ids_full_depth"])


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_through_generate_alone_and_in_a_batch(ouro, ouro_expected, use_cache):
    prompts, expected = ouro_expected["input_ids"], ouro_expected["greedy_ids_full_depth"]
    together = ouro.generate(prompts, max_new_tokens=24, use_cache=use_cache, **GREEDY)
    assert torch.equal(together, expected)
    for prompt, row in zip(prompts, expected, strict=True):
        alone = ouro.generate(prompt[None], max_new_tokens=24, use_cache=use_cache, **GREEDY)
        assert torch.equal(alone[0], row)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_in_one_left_padded_batch(ouro, ouro_expected, attention, use_cache):
    ouro.set_attn_implementation(attention)
    expected = ouro_expected["greedy_ids_full_depth"]
    lengths = [17, 25, 21]
    ids, mask = torch.zeros(3, 25, dtype=torch.long), torch.zeros(3, 25, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 25 - length :] = expected[row, :length]
        mask[row, 25 - length :] = 1
    done = ouro.generate(ids, attention_mask=mask, max_new_tokens=24, use_cache=use_cache, **GREEDY)
    for row, length in enumerate(lengths):
        known = 41 - length  # all 24 of the row that was not lengthened by its own golden tokens
        assert torch.equal(done[row, 25 : 25 + known], expected[row, length:])


def test_our_saved_layout_computes_the_same(ouro, ouro_expected, tmp_path):
    looplm.save(ouro, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is looplm.LoopLMForCausalLM
    assert torch.equal(again(ouro_expected["input_ids"]).logits, ouro(ouro_expected["input_ids"]).logits)
