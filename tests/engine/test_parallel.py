"""The parallel sampler against plain decoding in its limits, against itself written out slowly, and in its counts."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from engine_models import huginn_like, ouro_like
from plain_decoding import decode_plainly

from looplm.engine import Completion, Engine, ParallelSampler, ParallelSettings, RingKV, SamplingParams
from looplm.engine.kv_policies import FullKV
from looplm.models.context import LoopContext
from looplm.models.rotary import rotary_tables

PROMPT = [5, 17, 3, 44, 9]
LOOPS = 4
MODELS = {
    "huginn": huginn_like,
    "no_grouped_heads": lambda: ouro_like(injection="concat", num_key_value_heads=4, norm_placement="pre"),
    "added_to_zeros": lambda: ouro_like(injection="add", state_init="zero", exit_gate=False),
    "diagonal": lambda: ouro_like(injection="diagonal", state_init="embedding", prelude_layers=2),
    "learned_positions": lambda: ouro_like(injection="add", rope="learned", coda_layers=1),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def complete(model, num_tokens=12, **settings) -> tuple[Completion, ParallelSampler]:
    sampler = ParallelSampler(model, settings=ParallelSettings(**settings))
    (done,) = sampler.generate([PROMPT], SamplingParams(max_tokens=num_tokens))
    return done, sampler


# Limits: plain decoding ---------------------------------------------------------------------------------------


def test_one_position_at_full_depth_is_plain_decoding_with_a_single_slot(model):
    done, _ = complete(model, wavefront=1, inner_loops=LOOPS, threshold=0.0)
    tokens, depths, logits = decode_plainly(model, PROMPT, RingKV(size=1), LOOPS, lambda index, gates: LOOPS, 12)
    assert done.token_ids == tokens
    assert done.loops == depths
    expected = [float(row.log_softmax(-1).max()) for row in logits]
    assert done.logprobs == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("inner_loops", [1, 3])
def test_when_all_settles_at_once_it_is_plain_decoding_at_the_inner_loops(model, inner_loops):
    done, sampler = complete(model, wavefront=7, inner_loops=inner_loops, threshold=math.inf, momentum=0.5)
    tokens, depths, _ = decode_plainly(
        model, PROMPT, RingKV(size=1), LOOPS, lambda index, gates: inner_loops if index else LOOPS, 12
    )
    assert (done.token_ids, done.loops) == (tokens, depths)
    assert sampler.stats.ticks == sampler.stats.core_steps == 11 * inner_loops


def test_at_one_position_it_samples_and_ends_as_the_engine_does(model):
    engine = Engine(model, kv="last", max_rows=1, max_length=64)
    sampler = ParallelSampler(model, settings=ParallelSettings(wavefront=1, inner_loops=LOOPS, threshold=0.0))
    # Few tokens: with one slot these random weights amplify rounding tenfold a token.
    for params in (
        SamplingParams(max_tokens=9, temperature=1.3, top_k=30, seed=3, n=3, logprobs=2),
        SamplingParams(max_tokens=9, temperature=1.0, stop_token_ids=range(0, 61, 4), min_tokens=2, seed=8, n=3),
        SamplingParams(max_tokens=9, repetition_penalty=1.5, frequency_penalty=0.7, logit_bias={7: 2.0}),
        SamplingParams(max_tokens=1),
    ):
        ours, theirs = sampler.generate([PROMPT], params), engine.generate([PROMPT], params)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.token_ids, one.loops, one.finish_reason) == (other.token_ids, other.loops, other.finish_reason)
            assert [[token for token, _ in row] for row in one.top_logprobs] == [
                [token for token, _ in row] for row in other.top_logprobs
            ]


@pytest.mark.parametrize("settings", [{"momentum": 0.3}, {"noise": 0.5}, {"wavefront": 3}, {"inner_loops": 3}])
def test_what_settles_is_where_plain_decoding_settles(settings):
    """A core that contracts forgets its start, wrong drafts, momentum and noise; full keys and values then are one."""
    model = huginn_like(initializer_range=0.06)
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    tokens, _, logits = decode_plainly(model, PROMPT, FullKV(), 60, lambda index, gates: 60, 12)
    assert min(float(row.topk(2).values.diff().abs()) for row in logits) > 1e-6
    values = {"inner_loops": 1, "wavefront": 30, "threshold": 1e-12, "loops": 300} | settings
    done, sampler = complete(model, **values)
    assert done.token_ids == tokens
    assert done.token_ids == sampler.plain_choices(done)
    assert sampler.stats.redrafted > 0 or settings == {"wavefront": 3}


# The sampler, written out -------------------------------------------------------------------------------------


@dataclass
class NewestByPlace:
    """Keys and values by layer and position; calls are of one position, which sees those before it."""

    kept: dict[int, dict[int, tuple]] = field(default_factory=dict)
    place: int = 0

    def update(self, key, value, layer, loop):
        held = self.kept.setdefault(layer, {})
        held[self.place] = (key, value)
        seen = [held[place] for place in range(self.place + 1)]
        return torch.cat([key for key, _ in seen], dim=2), torch.cat([value for _, value in seen], dim=2)


@torch.no_grad()
def decode_slowly(model, prompt, num_tokens, inner_loops, wavefront, threshold, momentum):
    """Tokens, loops of each, and all loops done: every position through every block alone, everything embedded anew."""
    backbone, config, store = model.model, model.config, NewestByPlace()

    def context(place):
        store.place = place
        positions = torch.tensor([[place]])
        tables = rotary_tables(positions, config.head_dim, config.rope_theta, config.rope, torch.float64)
        return LoopContext(position_ids=positions, rotary=tables, mask=None, store=store, past_length=place)

    def embedded(tokens):
        return [
            backbone.embed(backbone.embed_tokens(torch.tensor([[token]])), context(place))
            for place, token in enumerate(tokens)
        ]

    def read(place):
        return int(model.lm_head(backbone.readout(state[place], context(place)))[0, -1].argmax())

    fresh = embedded(prompt)
    state = [backbone.init_state(one, context(place)) for place, one in enumerate(fresh)]
    for _ in range(config.loops):
        state = [backbone.step(state[place], fresh[place], 1, context(place)) for place in range(len(prompt))]
    text = [*prompt, [read(place) for place in range(len(prompt))][-1]]
    first, inputs, since, spent, work = len(prompt), {}, {}, [config.loops], 0
    while len(spent) < num_tokens:
        stop = len(state)
        if stop - first < wavefront and stop < len(prompt) + num_tokens - 1:
            state.append(backbone.init_state(embedded(text)[stop], context(stop)))
            since[stop], stop = [0, 0], stop + 1
        fresh = embedded(text[:stop])
        places = range(first, stop)
        inputs = {
            place: fresh[place] + momentum * (inputs[place] - fresh[place]) if place in inputs else fresh[place]
            for place in places
        }
        before = list(state)
        for _ in range(inner_loops):
            for place in places:
                state[place] = backbone.step(state[place], inputs[place], 1, context(place))
                since[place] = [count + 1 for count in since[place]]
                work += 1
        following = {place: read(place) for place in places}
        settled = {
            place: bool((state[place] - before[place]).norm() / state[place].norm() < threshold)
            or since[place][0] >= config.loops
            for place in places
        }
        for place in places[1:]:
            if text[place] != following[place - 1]:
                since[place][0], settled[place] = 0, False
        text = text[: first + 1] + list(following.values())
        while first < stop and settled[first]:
            spent.append(since[first][1])
            first += 1
    return text[len(prompt) : len(prompt) + num_tokens], spent[:num_tokens], work


@pytest.mark.parametrize(
    ("inner_loops", "wavefront", "threshold", "momentum"),
    [(1, 128, 0.0, 0.0), (1, 128, 0.2, 0.0), (1, 2, 0.0, 0.3), (2, 3, 0.4, 0.1), (3, 128, 0.0, 0.0)],
)
def test_it_is_the_sampler_written_out_position_by_position(model, inner_loops, wavefront, threshold, momentum):
    values = {"inner_loops": inner_loops, "wavefront": wavefront, "threshold": threshold, "momentum": momentum}
    done, sampler = complete(model, **values)
    tokens, loops, work = decode_slowly(model, PROMPT, 12, **values)
    assert done.token_ids == tokens
    assert done.loops == loops
    assert sampler.stats.core_steps == work


# Counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner_loops", "wavefront", "ticks"), [(1, 128, 4 + 9), (2, 128, 4 + 2 * 9), (1, 2, 5 * 4 + 1), (4, 1, 40)]
)
def test_drafts_that_stand_cost_one_step_a_token(inner_loops, wavefront, ticks):
    """Ten tokens after the first at 4 loops: a step a token once the wave is long enough, two in 4 ticks by two."""
    model = huginn_like()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # tied: every token is read as token 0, whatever the state
    done, sampler = complete(model, 11, inner_loops=inner_loops, wavefront=wavefront, threshold=0.0)
    assert done.token_ids == [0] * 11
    assert sampler.stats.redrafted == 0
    assert done.loops == [4] * 11
    assert sampler.stats.core_steps == 40
    assert sampler.stats.ticks == ticks


def test_what_is_counted_is_what_is_computed(model):
    rows = []
    block = model.model.core[0]
    block.register_forward_hook(lambda module, inputs, out: rows.append(out.shape[1]))
    done, sampler = complete(model, inner_loops=1, threshold=0.1)
    assert rows[:LOOPS] == [len(PROMPT)] * LOOPS
    assert sum(rows[LOOPS:]) == sampler.stats.core_steps >= sum(done.loops[1:])
    assert len(rows[LOOPS:]) == sampler.stats.ticks == sampler.stats.steps
    assert sampler.stats.tokens == len(done.token_ids) == len(done.loops) == 12


def test_plain_choices_of_plain_decoding_are_its_tokens(model):
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=5)
    for sampling in (params, SamplingParams(max_tokens=16)):
        (plain,) = Engine(model, max_rows=1, max_length=32).generate([PROMPT], sampling)
        assert ParallelSampler(model).plain_choices(plain, sampling) == plain.token_ids


def test_noise_is_fixed_by_seed_and_changes_states():
    model = huginn_like()
    one, again, other = (
        ParallelSampler(model, settings=ParallelSettings(inner_loops=1, threshold=0.0, noise=noise)).generate(
            [PROMPT], SamplingParams(max_tokens=8)
        )[0]
        for noise in (0.5, 0.5, 0.0)
    )
    assert one == again
    assert one.logprobs != other.logprobs


# Refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "injection='none'"),
        ({"injection": "add", "inject_once": True}, "inject_once=True"),
        ({"injection": "add", "step_conditioning": True}, "step_conditioning=True"),
        ({"injection": "add", "state_noise": 0.1}, "state_noise=0.1"),
    ],
)
def test_models_that_it_cannot_run_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        ParallelSampler(ouro_like(**changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [("inner_loops", 0), ("wavefront", 0), ("threshold", -1.0), ("threshold", math.nan), ("momentum", 1.0),
     ("noise", 1.5), ("loops", 0)],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        ParallelSettings(**{name: value})


def test_bad_prompts_are_refused():
    sampler = ParallelSampler(huginn_like())
    for prompt, params, named in (
        ([], SamplingParams(), "empty"),
        ("text", SamplingParams(), "encode the text"),
        ([3, 61], SamplingParams(), "token 61"),
        ([3], SamplingParams(stop="x"), "tokenizer"),
        ([3], SamplingParams(logit_bias={99: 1.0}), "token 99"),
    ):
        with pytest.raises(ValueError, match=named):
            sampler.generate([prompt], params)
    with pytest.raises(ValueError, match="learned positions"):
        ParallelSampler(MODELS["learned_positions"]()).generate([[3]], SamplingParams(max_tokens=512))


def test_a_state_that_is_no_number_ends_its_text_alone():
    model = ouro_like(injection="add", coda_layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = math.nan
    sampler, forced = ParallelSampler(model), SamplingParams(max_tokens=3, logit_bias={7: 1e9})
    before = sampler.generate([PROMPT])[0].token_ids
    (bad,) = sampler.generate([PROMPT], forced)
    assert (bad.token_ids, bad.finish_reason) == ([7], "error")
    assert "not finite" in str(bad.error)
    assert sampler.generate([[7]])[0].token_ids == []
    assert sampler.generate([PROMPT])[0].token_ids == before
