"""Reading under shared keys and values against attention written out token by token, and the study's judgement."""

import pytest
import torch

from conftest import random_ids, tiny_model
from looplm.engine import Engine, SamplingParams
from looplm.engine.kv_policies import BY_NAME
from looplm.models.rotary import rotary_tables
from looplm.studies.kv import PHASES, SHARED, KVStudy
from looplm.studies.kv_reading import read_shared
from looplm.studies.study import Outcome

LOOPS = 3
# What a token at `loop` sees of an earlier one, given its keys (or values) by loop.
SEEN = {
    "full": lambda by_loop, loop: by_loop[loop],
    "last": lambda by_loop, loop: by_loop[LOOPS],
    "first": lambda by_loop, loop: by_loop[1],
    "averaged": lambda by_loop, loop: sum(by_loop.values()) / LOOPS,
}


@torch.no_grad()
def read_plainly(model, ids, prompt, rule, phase):
    """Logits [S - prompt, V] of one row: every token alone, every key and value kept by layer, place and loop."""
    backbone, config, kept, read = model.model, model.config, {}, []
    for place, token in enumerate(ids[:-1]):
        tables = rotary_tables(torch.tensor([[place]]), config.head_dim, config.rope_theta, config.rope, torch.float64)
        shared = phase in ("prefill", "both") if place < prompt else phase != "prefill"
        state = backbone.embed_tokens(torch.tensor([[token]]))
        for loop in range(1, LOOPS + 1):
            for layer, block in enumerate(backbone.core):
                query, key, value = block.attention.project(block.attention_norms.pre(state))
                query, key = (block.attention.rotate(x.transpose(1, 2), tables)[0, :, 0] for x in (query, key))
                keys, values = kept.setdefault((layer, place), ({}, {}))
                keys[loop], values[loop] = key, value[0, 0]
                before = [kept[layer, other] for other in range(place)]
                rules = [rule if shared and not (phase == "generated" and p < prompt) else "full" for p in range(place)]
                seen = [[SEEN[r](held[i], loop) for r, held in zip(rules, before, strict=True)] for i in (0, 1)]
                all_keys, all_values = torch.stack([*seen[0], key], dim=1), torch.stack([*seen[1], value[0, 0]], dim=1)
                weights = (all_keys @ query[..., None])[..., 0].div(config.head_dim**0.5).softmax(-1)
                out = (weights[:, None] @ all_values).flatten()
                state = block.attention_norms.join(state, block.attention.o_proj(out)[None, None])
                state = block.mlp_norms.join(state, block.mlp(block.mlp_norms.pre(state)))
            state = backbone.norm(state)
        if place >= prompt - 1:
            read.append(model.lm_head(state)[0, 0])
    return torch.stack(read)


@pytest.mark.parametrize("rule", SEEN)
@pytest.mark.parametrize("phase", PHASES)
def test_every_strategy_in_every_phase_is_attention_written_out(rule, phase):
    model = tiny_model(seed=1).double()
    ids = random_ids(2, 9)
    read = read_shared(model, ids, 5, BY_NAME[rule], phase)
    for row, logits in zip(ids.tolist(), read, strict=True):
        torch.testing.assert_close(logits, read_plainly(model, row, 5, rule, phase), atol=1e-10, rtol=0)


def test_full_in_any_phase_is_one_call_on_the_whole_text():
    model = tiny_model(prelude_layers=1, coda_layers=1).double()
    ids = random_ids(2, 9)
    with torch.no_grad():
        whole = model(ids[:, :-1], use_cache=False).logits[:, 4:]
    for phase in PHASES:
        torch.testing.assert_close(read_shared(model, ids, 5, BY_NAME["full"], phase), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", BY_NAME)
def test_decoding_is_what_the_engine_does(name):
    model = tiny_model(seed=2).double()
    prompt = random_ids(6).tolist()
    (done,) = Engine(model, kv=name, max_length=64).generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))
    ids = torch.tensor([prompt + done.token_ids])
    read = read_shared(model, ids, len(prompt), BY_NAME[name], "decoding")[0]
    assert read.argmax(-1).tolist() == done.token_ids
    wanted = read.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    assert done.logprobs == pytest.approx(wanted.tolist(), abs=1e-7)


def outcomes(**accuracy):
    ways = {"full": 0.9, **{f"{name}, {phase}": 0.9 for name in SHARED for phase in PHASES}}
    ways |= {way.replace("_", ", "): value for way, value in accuracy.items()}
    return Outcome(
        values={f"{way}: {name}": value for way, value in ways.items() for name in ("accuracy", "text loss")}
    )


def test_the_papers_table_holds_and_nothing_else_does():
    study = KVStudy()
    as_in_the_paper = outcomes(first_decoding=0.2, last_prefill=0.5, averaged_prefill=0.6, first_prefill=0.1)
    assert all(verdict.holds for verdict in study.verdicts({"1x4": [as_in_the_paper] * 2}))
    verdicts = study.verdicts({"1x4": [as_in_the_paper, outcomes()]})
    assert [verdict.holds for verdict in verdicts] == [True, True, False, False, False, False]
    lost = study.verdicts({"1x4": [as_in_the_paper], "2x4": [outcomes(last_decoding=0.87)]})[6]
    assert (lost.claim, lost.holds) == ("2x4: 'last, decoding' costs less than 2 points", False)
    assert lost.effect == pytest.approx(-0.03)
    rows = study.rows({"1x4": [as_in_the_paper]})
    assert len(rows) == 1 + len(SHARED) * len(PHASES)
    assert rows["1x4: first, decoding"][0].values["accuracy"] == 0.2


def test_bytes_are_those_of_the_slots_that_are_kept(tmp_path):
    (job,) = KVStudy().jobs("smoke", 1)["1x4"]
    outcome = job(tmp_path)
    in_full = 4 * 2 * 96 * 4 / 1024  # loops, keys and values, width, bytes of a float32, in KiB
    held = {name: value for name, value in outcome.values.items() if name.endswith("KiB per token")}
    assert {value for name, value in held.items() if "full" in name or "prefill" in name} == {in_full}
    assert {value for name, value in held.items() if "full" not in name and "prefill" not in name} == {in_full / 4}
