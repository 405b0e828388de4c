"""The engine on int8 weights: its tokens are those of `generate`, and of weights rounded by hand."""

import copy

import pytest
import torch
from engine_models import huginn_like, ouro_like

import looplm
from looplm.engine import Engine, FixedLoops, ParallelSampler, SamplingParams, Speculation
from looplm.engine.kernels import Apart, Projection, for_decoding

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [30, 4, 17, 2, 50]]


def gelu_like(seed, dtype):
    return ouro_like(seed, dtype, mlp="gelu", bias=True, initializer_range=0.5)


def by_generate(model, loops):
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "loops": loops}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]


def by_engine(model, loops, **options):
    engine = Engine(model, max_rows=2, max_length=64, loops=loops, **options)
    return [done.token_ids for done in engine.generate(PROMPTS, GREEDY, depth=FixedLoops(loops))]


@pytest.mark.parametrize("loops", [1, 4])
@pytest.mark.parametrize("make", [ouro_like, huginn_like, gelu_like])
def test_tokens_are_those_of_generate_and_of_weights_rounded_by_hand(make, loops):
    made = set()
    for seed in range(3):
        model = make(seed, torch.float32)
        held = looplm.quantize_int8(copy.deepcopy(model)).double()
        plain = model.double()
        for part, other in zip(plain.parameters(), held.parameters(), strict=True):
            if type(other) is not torch.nn.Parameter:
                part.data = other.qdata.double() * other.scale.double()
        wanted = by_generate(plain, loops)
        assert by_generate(held, loops) == wanted
        assert by_engine(held, loops) == wanted
        made |= {token for tokens in wanted for token in tokens}
    assert len(made) > 5, "tokens that never change would agree by chance"


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"speculate": Speculation()}, {"kv": "recomputed"}])
def test_float32_tokens_are_those_of_generate_under_every_option(options):
    model = looplm.quantize_int8(ouro_like(2, torch.float32))
    assert by_engine(model, 4, **options) == by_generate(model, 4)


def test_an_engine_reads_weights_anew_that_were_rounded_under_it():
    model = ouro_like(2, torch.float32)
    engine = Engine(model, max_rows=2, max_length=64)
    before = [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]
    looplm.quantize_int8(model)
    engine.forget_prefixes()
    after = [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]
    assert after == by_generate(model, 4)
    assert engine.runner.backbone.core[0].mlp.down.layers[0].__self__ is model.model.core[0].mlp.down_proj
    model.model.core[0].mlp.down_proj.weight.scale.mul_(-3)
    model.model.core[0].attention.o_proj.weight.scale.mul_(-3)
    engine.forget_prefixes()
    changed = [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]
    assert changed == by_generate(model, 4)
    assert changed not in (after, before)


def test_the_parallel_sampler_decodes_int8_weights():
    model = looplm.quantize_int8(huginn_like(1, torch.float32))
    sampler = ParallelSampler(model)
    (done,) = sampler.generate([PROMPTS[0]], GREEDY)
    assert len(done.token_ids) == 20
    assert sampler.plain_choices(done, GREEDY)[0] == by_generate(model, 4)[0][0]


def test_int8_products_stay_apart_and_float_ones_are_joined():
    for make, kind in ((lambda: ouro_like(0, torch.float32), Projection), (quantized, Apart)):
        block = for_decoding(make()).core[0]
        parts = (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down)
        assert [type(part) for part in parts] == [kind] * 4


def quantized():
    return looplm.quantize_int8(ouro_like(0, torch.float32))
