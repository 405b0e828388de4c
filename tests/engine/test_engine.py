"""The engine as its users meet it: golden tokens, streams, counts of work, limits, and failures that stay alone."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_models import huginn_like, ouro_like

import looplm
from looplm.data.tokenizer import train_tokenizer
from looplm.engine import (
    AdjacentKV,
    AnyOf,
    Engine,
    ExitCDF,
    ExitSampled,
    FixedLoops,
    Margin,
    RingKV,
    SamplingParams,
    Speculation,
    StateConverged,
)
from looplm.engine.runner import Runner
from looplm.training.adapters import Lora, add_adapter, plain_model

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


# Equal to the reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("speculate", [None, Speculation(), Speculation(entry=2, width=2)])
def test_golden_tokens_of_the_reference(ouro, ouro_expected, deterministic, speculate):
    ids, wanted = ouro_expected["input_ids"], ouro_expected["greedy_ids_full_depth"]
    engine = Engine(ouro, max_length=64, deterministic=deterministic, speculate=speculate)
    done = engine.generate([row.tolist() for row in ids], GREEDY)
    assert [one.token_ids for one in done] == wanted[:, ids.shape[1] :].tolist()
    assert {count for one in done for count in one.loops} == {4}


@pytest.mark.parametrize("loops", [1, 3, 8])
def test_any_loop_count_equals_transformers_generate(loops):
    for model in (ouro_like(seed=5), huginn_like(seed=5)):
        prompt = [3, 1, 4, 1, 5, 9, 2, 6]
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, loops=loops)[0, 8:]
        done = Engine(model, loops=8, max_length=64).generate([prompt], GREEDY, depth=FixedLoops(loops))
        assert done[0].token_ids == wanted.tolist()
        assert done[0].loops == [loops] * 24


def test_the_first_token_is_that_of_logits_at_exit(ouro, ouro_expected):
    ids = ouro_expected["input_ids"]
    for q in (0.3, 0.5, 0.8):
        engine = Engine(ouro, depth=ExitCDF(q), max_length=64)
        done = engine.generate([row.tolist() for row in ids], SamplingParams(max_tokens=1))
        assert [one.loops[0] for one in done] == ouro_expected[f"exit_loop_q{q}"][:, -1].tolist()
        assert [one.token_ids[0] for one in done] == ouro_expected[f"logits_q{q}"][:, -1].argmax(-1).tolist()


# What is computed ----------------------------------------------------------------------------------------------


def gated(logit: float, loops: int = 4):
    """A model whose every gate logit is `logit`."""
    model = ouro_like(loops=loops)
    with torch.no_grad():
        model.model.exit_gate.weight.zero_()
        model.model.exit_gate.bias.fill_(logit)
    return model


@pytest.mark.parametrize(
    ("logit", "policy", "loops"),
    [
        (torch.logit(torch.tensor(0.3)).item(), ExitCDF(0.5), 2),  # 0.30, then 0.51
        (60.0, ExitCDF(1.0), 4),
        (60.0, ExitCDF(0.999999), 1),
        (-60.0, ExitCDF(0.0), 1),
        (-60.0, ExitCDF(0.0, min_loops=3), 3),
    ],
)
def test_hazards_decide_and_the_blocks_that_run_are_counted(logit, policy, loops):
    model = gated(logit)
    engine = Engine(model, depth=policy, max_length=64)
    visits = []
    for block in engine.runner.backbone.core:
        block.register_forward_hook(lambda _, inputs, __: visits.append(inputs[0].shape[:-1].numel()))
    engine.submit([1, 2, 3], SamplingParams(max_tokens=9))
    for _ in range(4):
        engine.tick()
    assert visits == [16] * (4 * 2)  # the prompt: one block of 16 places, a loop a tick, two layers
    while engine.busy:
        engine.tick()
    assert engine.stats.loops == 9 * loops
    assert engine.stats.core_steps == 8 * loops  # the first token is read from the prompt's own loops
    assert sum(visits[8:]) == engine.stats.core_steps * 2


def test_a_prompt_goes_through_the_loop_beside_tokens_in_the_same_calls():
    engine = Engine(ouro_like(), max_length=64)
    engine.submit([1], SamplingParams(max_tokens=20))
    for _ in range(4):
        engine.tick()
    sizes = []
    for block in engine.runner.backbone.core:
        block.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[0]))
    engine.submit([2] * 17, SamplingParams(max_tokens=1))
    engine.tick()
    assert sizes == [1 + 2 * 16] * 2  # two layers, one loop of two blocks and of one token
    for _ in range(4):
        engine.tick()
    assert sizes == [33] * 8 + [1] * 2


def test_calls_per_token_do_not_grow_with_the_text():
    engine = Engine(ouro_like(), max_length=256)
    sizes = []
    for block in engine.runner.backbone.core:
        block.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[0]))
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=200))
    assert sizes[8:] == [1] * (199 * 4 * 2)


def test_a_full_engine_refills_at_every_loop():
    """Two places, three requests of unequal depth: the third enters as soon as one ends, in the middle of the other."""
    engine = Engine(ouro_like(), max_rows=2, max_length=64)
    slow, fast, third = (
        engine.submit([number], SamplingParams(max_tokens=4), replay=[depth] * 4)[0]
        for number, depth in ((1, 4), (2, 1), (3, 1))
    )
    ends = {}
    for tick in range(40):
        ends |= {event.number: tick for event in engine.tick() if event.completion is not None}
    assert ends[fast] < ends[third] < ends[slow]


# Streams and texts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worded():
    tokenizer = train_tokenizer(["to be or not to be, that is the question " * 20], 300)
    torch.manual_seed(1)
    return ouro_like(seed=2, vocab_size=len(tokenizer)), tokenizer


@pytest.mark.parametrize("speculate", [None, Speculation()])
def test_a_stream_is_the_completion_piece_by_piece(worded, speculate):
    model, tokenizer = worded
    engine = Engine(model, tokenizer, max_length=128, speculate=speculate)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logprobs=2)
    events = [event for event in engine.stream("to be", params) if not event.provisional]
    (whole,) = engine.generate(["to be"], params)
    last = events.pop()
    assert last.completion is not None
    assert last.completion.token_ids == whole.token_ids == [event.token for event in events]
    assert whole.text == "".join(event.text for event in [*events, last])
    assert whole.logprobs == pytest.approx([event.logprob for event in events], abs=1e-9)
    assert [len(alternatives) for alternatives in whole.top_logprobs] == [2] * 30
    assert whole.text == tokenizer.decode(whole.token_ids)


def test_closing_a_stream_frees_everything(worded):
    model, tokenizer = worded
    engine = Engine(model, tokenizer, max_length=128)
    stream = engine.stream("to be", SamplingParams(max_tokens=30, n=3))
    next(stream)
    stream.close()
    assert not engine.scheduler.rows
    assert engine.memory.core_pages.num_free == engine.memory.core_pages.num_pages
    engine.tick()
    assert not engine.busy


def test_streams_and_lists_of_one_engine_do_not_take_each_others_events(worded):
    model, tokenizer = worded
    engine = Engine(model, tokenizer, max_length=128)
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=seed) for seed in (1, 2, 3, 4)]
    wanted = [engine.generate(["to be"], one)[0].token_ids for one in params]
    (queued,) = engine.submit("to be", params[0])
    streams = [engine.stream("to be", one) for one in params[1:3]]
    first = [next(stream).token for stream in streams]
    assert engine.generate(["to be"], params[3])[0].token_ids == wanted[3]
    for stream, token, tokens in zip(streams, first, wanted[1:3], strict=True):
        assert [token, *(event.token for event in stream if event.token is not None)] == tokens
    told = []
    while engine.busy:
        told += engine.tick()
    assert {event.number for event in told} == {queued}
    assert told[-1].completion.token_ids == wanted[0]


@pytest.mark.parametrize("reads", [0, 1, 5])
@pytest.mark.parametrize("closed", [True, False])
def test_a_stream_that_nobody_reads_to_its_end_leaves_nothing(worded, reads, closed):
    model, tokenizer = worded
    engine = Engine(model, tokenizer, max_length=128)
    wanted = engine.generate(["or not"], SamplingParams(max_tokens=9))[0].token_ids
    stream = engine.stream("to be", SamplingParams(max_tokens=30, n=2))
    for _ in range(reads):
        next(stream)
    if closed:
        stream.close()
    del stream
    assert not engine.busy
    assert not engine._kept
    assert engine.generate(["or not"], SamplingParams(max_tokens=9))[0].token_ids == wanted
    assert not engine.scheduler.rows
    assert not engine._kept


def test_a_list_tells_of_each_completion_as_it_ends(worded):
    heard = []
    sampling = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (9, 2, 5)]
    done = Engine(*worded).generate(["one", "two", "three"], sampling, told=heard.append)
    assert [len(each.token_ids) for each in heard] == [2, 5, 9]
    assert sorted(heard, key=lambda each: each.number) == done


def test_a_list_that_is_broken_off_leaves_nothing(worded, monkeypatch):
    """Ctrl-C in the middle of a tick."""
    model, tokenizer = worded
    engine = Engine(model, tokenizer, max_rows=2, max_length=128)
    (queued,) = engine.submit("to be", SamplingParams(max_tokens=9))
    steps, step = [], Runner.step

    def interrupted(self, batch, blocks):
        steps.append(batch)
        if len(steps) == 9:
            raise KeyboardInterrupt
        step(self, batch, blocks)

    monkeypatch.setattr(Runner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["or not"] * 3, SamplingParams(max_tokens=30))
    assert not engine.scheduler.waiting
    assert [row.request.number for row in engine.scheduler.rows] == [queued]
    told = []
    while engine.busy:
        told += engine.tick()
    assert {event.number for event in told} == {queued}
    assert told[-1].completion.token_ids == engine.generate(["to be"], SamplingParams(max_tokens=9))[0].token_ids


def test_ticks_take_nothing_from_a_stream(worded):
    model, tokenizer = worded
    engine = Engine(model, tokenizer, max_length=128)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    wanted = engine.generate(["to be"], params)[0].token_ids
    stream = engine.stream("to be", params)
    first = next(stream).token
    (submitted,) = engine.submit("or not", SamplingParams(max_tokens=3))
    told = []
    while engine.busy:
        told += engine.tick()
    assert {event.number for event in told} == {submitted}
    assert [first, *(event.token for event in stream if event.token is not None)] == wanted


def test_stop_strings_and_ids_end_a_completion(worded):
    model, tokenizer = worded
    engine = Engine(model, tokenizer, max_length=128)
    free = engine.generate(["to be"], SamplingParams(max_tokens=30, temperature=1.0, seed=3))[0]
    word = free.text[10:13]
    cut = engine.generate(["to be"], SamplingParams(max_tokens=30, temperature=1.0, seed=3, stop=word))[0]
    assert (cut.text, cut.finish_reason) == (free.text[: free.text.index(word)], "stop")
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    token = free.token_ids[7]
    ended = engine.generate(["to be"], SamplingParams(max_tokens=30, temperature=1.0, seed=3, stop_token_ids=[token]))[
        0
    ]
    assert ended.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert ended.finish_reason == "stop"
    exactly = SamplingParams(
        max_tokens=free.token_ids.index(token) + 1, temperature=1.0, seed=3, stop_token_ids=[token]
    )
    assert engine.generate(["to be"], exactly)[0].finish_reason == "stop"


def test_a_special_token_is_no_stop_string(worded):
    """It never is in the text, so it would never stop it."""
    model, tokenizer = worded
    engine = Engine(model, tokenizer, max_length=128)
    with pytest.raises(ValueError, match=r"use stop_token_ids=\[0\]"):
        engine.generate(["to be"], SamplingParams(stop=["x", "<|endoftext|>"], ignore_eos=True))
    always = SamplingParams(stop_token_ids=[0], ignore_eos=True, logit_bias={0: 1e9})
    assert engine.generate(["to be"], always)[0].finish_reason == "stop"


def test_n_completions_differ_and_come_in_order(worded):
    model, tokenizer = worded
    engine = Engine(model, tokenizer, max_length=128)
    sampled = SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=3)
    done = engine.generate(["to be", "or not"], [sampled, SamplingParams(max_tokens=8)])
    assert [tokenizer.decode(one.prompt_token_ids) for one in done] == ["to be"] * 3 + ["or not"]
    assert len({tuple(one.token_ids) for one in done[:3]}) == 3
    assert [one.token_ids for one in engine.generate(["to be"], sampled)] == [one.token_ids for one in done[:3]]


@pytest.mark.parametrize("rope", ["split_half", "learned"])
def test_the_longest_text_fits_to_the_last_place(rope):
    model = ouro_like(rope=rope, max_position_embeddings=21)
    prompt = [1, 2, 3]
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=18, do_sample=False)[0, 3:]
    done = Engine(model, max_length=21).generate([prompt], SamplingParams(max_tokens=18))
    assert done[0].token_ids == wanted.tolist()
    if rope == "learned":
        with pytest.raises(ValueError, match="max_position_embeddings=21"):
            Engine(model, max_length=22)


# Limits and failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda engine: engine.submit([]), "empty"),
        (lambda engine: engine.submit([61]), "token 61 is outside the vocabulary of 61"),
        (lambda engine: engine.submit("text"), "needs a tokenizer"),
        (lambda engine: engine.submit([1] * 60, SamplingParams(max_tokens=5)), "max_length=64"),
        (lambda engine: engine.submit([1], depth=FixedLoops(5)), "loops must be at most the engine's loops, 4"),
        (lambda engine: engine.submit([1], max_loops=9), "max_loops=9"),
        (lambda engine: engine.submit([1], min_loops=5), "min_loops=5"),
        (lambda engine: engine.submit([1], replay=[1, 7]), "replay asks for 7 loops"),
        (lambda engine: engine.submit([1.5]), r"a list of token ids, not \[1\.5\]"),
        (lambda engine: engine.submit(["1"]), r"a list of token ids, not \['1'\]"),
        (lambda engine: engine.submit(None), "a list of token ids, not None"),
        (lambda engine: engine.submit(torch.tensor([[1, 2]])), "a list of token ids, not tensor"),
        (lambda engine: engine.generate([1, 2]), "a list of token ids, not 1"),
        (lambda engine: engine.generate([[1]], {"max_tokens": 3}), "sampling='max_tokens' must be SamplingParams"),
        (lambda engine: engine.generate([[1]], [{}]), r"sampling=\{\} must be SamplingParams"),
        (lambda engine: engine.submit([1], replay=2), "replay must be a list of whole numbers, not 2"),
        (lambda engine: engine.submit([1], replay=[1.5]), "replay must be a list of whole numbers"),
        (lambda engine: engine.submit([1], min_loops=1.5), r"min_loops=1\.5"),
        (lambda engine: engine.submit([1], max_loops="2"), "max_loops='2'"),
        (lambda engine: engine.submit([1], max_loops=0), "max_loops=0"),
        (lambda engine: engine.submit([1], state_seed=2**63), "state_seed=9223372036854775808"),
        (lambda engine: engine.submit([1], state_seed="1"), "state_seed='1'"),
        (lambda engine: engine.submit([1], warm_start=1), "warm_start=1 must be True or False"),
        (lambda engine: engine.submit([1], depth=0.5), r"depth=0\.5 must be a depth policy"),
        (lambda engine: Engine(ouro_like(), depth=ExitCDF), "depth=<class .* must be a depth policy"),
        (lambda engine: Engine(ouro_like(), speculate=True), "speculate=True must be a Speculation"),
        (lambda engine: Engine(ouro_like(), seed=0.5), r"seed=0\.5"),
        (lambda engine: Engine(ouro_like(), max_rows=1.5), r"max_rows=1\.5"),
        (lambda engine: Engine(ouro_like(), prefill_tokens=0), "prefill_tokens=0"),
        (lambda engine: Engine(ouro_like(), kv_bytes=1e9), r"kv_bytes=1000000000\.0"),
        (lambda engine: Engine(ouro_like(), kv_bytes=10**4), "kv_bytes=10000 is too little; .* takes 65536 at 4"),
        (lambda engine: Engine(ouro_like(), kv_bytes=2**60, max_length=2**50), "find no room on this machine; lower"),
        (lambda engine: engine.submit([1], warm_start=True), "warm_start needs"),
        (lambda engine: engine.submit([1], SamplingParams(stop="x")), "stop strings need a tokenizer"),
        (lambda engine: engine.submit([1], SamplingParams(logit_bias={61: 1.0})), "logit_bias names token 61"),
        (lambda engine: engine.submit([1], SamplingParams(stop_token_ids=[5, 61])), "stop_token_ids names token 61"),
        (lambda engine: engine.generate("text"), "prompts is a list"),
        (lambda engine: engine.generate([[1]], [SamplingParams()] * 2), "1 prompts came with 2"),
        (lambda engine: Engine(ouro_like(), kv="ful"), "kv='ful' is not known"),
        (lambda engine: Engine(ouro_like(), loops=0), "loops=0"),
        (lambda engine: Engine(huginn_like(), depth=ExitCDF(0.5)), "reads the exit gate"),
        (lambda engine: Engine(ouro_like(), kv=RingKV(1), speculate=Speculation()), "speculation needs kv='full'"),
        (lambda engine: Engine(ouro_like(), speculate=Speculation(entry=4)), "entry must be below"),
        (lambda engine: Engine(huginn_like(), depth=Margin(0.3), speculate=Speculation()), "reads predictions"),
        (
            lambda engine: Engine(huginn_like(), speculate=Speculation()).submit([1], depth=AnyOf(Margin(0.3))),
            "run without speculation",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(ask, message):
    engine = Engine(ouro_like(), max_length=64)
    with pytest.raises(ValueError, match=message) as refused:
        ask(engine)
    assert "\n" not in str(refused.value)
    assert not engine.busy


def test_whole_numbers_of_numpy_and_torch_are_whole_numbers():
    engine = Engine(ouro_like(), max_length=np.int64(64), seed=np.int64(5))
    params = SamplingParams(max_tokens=np.int64(6), temperature=1.0, top_k=np.int32(9), logit_bias={np.int64(3): 1.0})
    plain = SamplingParams(max_tokens=6, temperature=1.0, top_k=9, logit_bias={3: 1.0})
    for seed in (None, 7):
        prompts = [np.array([1, 2]), torch.tensor([1, 2]), [np.int32(1), torch.tensor(2)], (1, 2), range(1, 3)]
        seeded = replace(params, seed=None if seed is None else np.int64(seed))
        found = engine.generate(prompts, seeded, replay=np.array([1, 2]), max_loops=np.int64(3), state_seed=np.int64(2))
        wanted = Engine(ouro_like(), max_length=64, seed=5).generate(
            [[1, 2]] * 5, replace(plain, seed=seed), replay=[1, 2], max_loops=3, state_seed=2
        )
        assert [one.prompt_token_ids for one in found] == [[1, 2]] * 5
        if seed is None:
            assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        else:
            assert {tuple(one.token_ids) for one in found} == {tuple(one.token_ids) for one in wanted}
            assert len({tuple(one.token_ids) for one in found}) == 1


def test_what_can_never_fit_is_refused_at_admission():
    engine = Engine(ouro_like(dtype=torch.float32), max_length=4096, kv_bytes=2**18)  # 16 blocks of 16 tokens
    with pytest.raises(ValueError, match="holds 256 tokens"):
        engine.submit([1] * 200, SamplingParams(max_tokens=57))
    assert engine.generate([[1] * 200], SamplingParams(max_tokens=56))[0].finish_reason == "length"
    shared = Engine(ouro_like(dtype=torch.float32), kv="last", max_length=4096, kv_bytes=2**18)
    with pytest.raises(ValueError, match="the prompt of 257 tokens"):  # all loops of it, while it is prefilled
        shared.submit([1] * 257, SamplingParams(max_tokens=5))
    assert shared.generate([[1] * 256], SamplingParams(max_tokens=200))[0].finish_reason == "length"


def test_the_block_left_to_grow_into_is_one_of_the_kv_policy():
    """Of six pages the first row holds one, and the second needs four for its prompt's loops and one to grow into."""
    engine = Engine(ouro_like(dtype=torch.float32), kv="last", max_length=64, kv_bytes=6 * 2**12)
    params = SamplingParams(max_tokens=20)
    numbers = [engine.submit([number], params)[0] for number in (1, 2)]
    for _ in range(5):
        engine.tick()
    assert [row.request.number for row in engine.scheduler.rows] == numbers
    done = {event.number: event.completion for _ in range(200) for event in engine.tick() if event.completion}
    alone = [Engine(ouro_like(dtype=torch.float32), kv="last", max_length=64) for _ in numbers]
    wanted = [one.generate([[number]], params)[0].token_ids for one, number in zip(alone, (1, 2), strict=True)]
    assert [done[number].token_ids for number in numbers] == wanted


def test_a_prompt_that_must_wait_anyway_costs_no_remembered_ones():
    engine = Engine(ouro_like(dtype=torch.float32), max_length=256, kv_bytes=2**18)  # 16 blocks of 16 tokens
    known, busy, large = [2] * 33, [3] * 100, [4] * 130  # 3 blocks, 2 of them remembered; 7 with 100 to come; 9
    engine.generate([known], SamplingParams(max_tokens=1))
    (first,) = engine.submit(busy, SamplingParams(max_tokens=40))
    engine.tick()
    (second,) = engine.submit(large, SamplingParams(max_tokens=1))
    for _ in range(20):
        engine.tick()
    assert [row.request.number for row in engine.scheduler.rows] == [first]
    for number in (first, second):
        engine.cancel(number)
    engine.generate([known], SamplingParams(max_tokens=1))
    assert engine.stats.reused_tokens == 32


def test_a_state_that_is_not_a_number_ends_its_row_alone():
    model = ouro_like(dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = torch.nan
    prompts = [[1, 2, 3], [4, 60, 5], [6, 7, 8]]
    for kv in ("full", "last", "averaged"):
        engine = Engine(model, kv=kv, max_rows=2, max_length=64, deterministic=True)
        params = SamplingParams(max_tokens=20, logit_bias={60: -1e9})
        done = engine.generate([*prompts, *prompts], params)
        assert [one.finish_reason for one in done] == ["length", "error", "length"] * 2
        assert "not finite" in done[1].error
        apart = Engine(model, kv=kv, max_rows=2, max_length=64, deterministic=True)
        assert [one.token_ids for one in apart.generate([prompts[0], prompts[2]], params)] == [
            done[0].token_ids,
            done[2].token_ids,
        ]
        biased = SamplingParams(max_tokens=20, logit_bias={60: 1e9})  # it chooses the bad token itself
        assert engine.generate([[9, 9]], biased)[0].finish_reason == "error"


def test_out_of_memory_fails_the_request_that_needs_it(monkeypatch):
    model = ouro_like(dtype=torch.float32)
    step = Runner.step

    def hungry(self, batch, blocks):
        if batch is not None and 13 in batch.tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        step(self, batch, blocks)

    engine = Engine(model, max_length=64)
    params = SamplingParams(max_tokens=6, logit_bias={13: -1e9})
    wanted = engine.generate([[1], [2], [3]], params)
    monkeypatch.setattr(Runner, "step", hungry)
    done = engine.generate(
        [[1], [2], [3], [4]], [params, params, params, SamplingParams(max_tokens=6, logit_bias={13: 1e9})]
    )
    assert [one.finish_reason for one in done] == ["length"] * 3 + ["error"]
    assert done[3].error == "out of memory"
    assert [one.token_ids for one in done[:3]] == [one.token_ids for one in wanted]
    assert engine.memory.core_pages.num_free == engine.memory.core_pages.num_pages


def test_cancellation_takes_effect_within_a_tick():
    engine = Engine(ouro_like(), max_rows=1, max_length=64)
    first, second = (engine.submit([number], SamplingParams(max_tokens=40))[0] for number in (1, 2))
    for _ in range(5):
        engine.tick()
    steps = engine.stats.core_steps
    engine.cancel(first)
    engine.cancel(first)
    events = engine.tick()
    assert [event.completion.finish_reason for event in events if event.completion] == ["cancelled"]
    assert engine.stats.core_steps <= steps + 1
    assert [row.request.number for row in engine.scheduler.rows] == [second]


# The model's own weights ---------------------------------------------------------------------------------------


def test_the_engine_reads_the_models_weights_where_they_are(tmp_path):
    """No second copy: training or loading into the model is seen, and it can be saved as before."""
    model = ouro_like(dtype=torch.float32)
    before = copy.deepcopy(model.state_dict())
    engine = Engine(model, max_length=64)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    again = Engine(model, max_length=64)
    ours, theirs = (one.runner.backbone.core[0].attention.qkv.weight for one in (engine, again))
    assert ours.data_ptr() == theirs.data_ptr() == model.model.core[0].attention.q_proj.weight.data_ptr()
    first = engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    engine.forget_prefixes()
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids != first
    looplm.save(model, tmp_path / "saved")
    loaded = looplm.load(tmp_path / "saved")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("ticks", [1, 2, 3, 9])
def test_what_old_weights_computed_is_nothing_to_later_prompts(ticks):
    """The weights change while a prompt is in the middle of its prefill, or just after it."""
    model, prompt = ouro_like(dtype=torch.float32), list(range(1, 50))
    engine = Engine(model, max_length=128, prefill_tokens=16, deterministic=True)
    engine.submit(prompt, GREEDY)
    for _ in range(ticks):
        engine.tick()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    engine.forget_prefixes()
    while engine.busy:
        engine.tick()
    after, again = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    fresh = Engine(model, max_length=128, deterministic=True).generate([prompt], GREEDY)[0]
    assert after.logprobs == again.logprobs == fresh.logprobs
    assert engine.stats.reused_tokens == 48  # of the last one alone


def test_a_model_with_adapters_is_refused_not_run_without_them():
    model = ouro_like(dtype=torch.float32)
    add_adapter(model, Lora(rank=2), 0)
    with pytest.raises(ValueError, match="merge its adapters"):
        Engine(model, max_length=64)
    plain = plain_model(model)
    assert plain is not None
    assert Engine(plain.eval(), max_length=64).generate([[1, 2]], GREEDY)[0].finish_reason == "length"


def test_two_engines_of_different_depth_share_one_model():
    model = ouro_like(dtype=torch.float32)
    deep, shallow = Engine(model, max_length=64), Engine(model, loops=2, kv="last", max_length=64)
    wanted = [engine.generate([[1, 2, 3]], GREEDY)[0].token_ids for engine in (deep, shallow)]
    streams = [engine.stream([1, 2, 3], GREEDY) for engine in (deep, shallow)]
    got = [[event.token for event in stream if event.token is not None] for stream in streams]
    assert got == wanted


def test_a_convergence_exit_that_never_fires_runs_all_loops():
    engine = Engine(ouro_like(), depth=StateConverged(1e-9), max_length=64)
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=5))[0].loops == [4] * 5


def test_weights_that_take_the_place_of_others_are_read_once_prefixes_are_forgotten():
    model, other = ouro_like(), ouro_like(seed=5)
    engine = Engine(model, max_length=64)
    first = engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    engine.forget_prefixes()
    wanted = Engine(other, max_length=64).generate([[1, 2, 3]], GREEDY)[0].token_ids
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == wanted != first
    model.float()
    with pytest.raises(ValueError, match=r"the model is torch.float32 on 'cpu' now; build a new Engine"):
        engine.forget_prefixes()


def test_memories_do_not_pile_up_with_the_policies_of_requests():
    engine = Engine(ouro_like(), max_length=64)
    for number in range(30):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2), depth=ExitCDF(0.5 + number / 100))
    assert engine._flight.decisions._memory.shape == (len(engine.runner.state), 4)


@pytest.mark.parametrize("kv", [None, 2, RingKV])
def test_what_is_no_kv_policy_is_refused(kv):
    with pytest.raises(ValueError, match=r"must be a name \(full, recomputed, last, .*\) or a policy such as RingKV"):
        Engine(ouro_like(), kv=kv, max_length=64)


@pytest.mark.parametrize("size", [0, 1.5, "2", True])
@pytest.mark.parametrize("kind", [RingKV, AdjacentKV])
def test_sizes_of_kv_policies_are_whole(kind, size):
    with pytest.raises(ValueError, match="size must be a whole number of at least 1"):
        kind(size)


def test_sampled_exits_have_the_gates_distribution_whatever_runs_beside():
    model = ouro_like(seed=3)
    torch.nn.init.zeros_(model.model.exit_gate.weight)
    torch.nn.init.constant_(model.model.exit_gate.bias, -0.4)  # leaves with 0.401 after each loop
    params = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True, n=10, seed=5)
    done = Engine(model, depth=ExitSampled(), loops=4, max_length=80).generate([[1, 2, 3], [4, 5]], params)
    counts = torch.bincount(torch.tensor([loop for one in done for loop in one.loops]), minlength=5)[1:]
    leave = 1 / (1 + np.exp(0.4))
    wanted = 1200 * torch.tensor([leave * (1 - leave) ** t for t in range(3)] + [(1 - leave) ** 3])
    assert ((counts - wanted) ** 2 / wanted).sum() < 16.3  # chi squared of 3 degrees, p = 0.001
    alone = Engine(model, depth=ExitSampled(), loops=4, max_length=80, max_rows=1).generate([[1, 2, 3], [4, 5]], params)
    assert [one.loops for one in alone] == [one.loops for one in done]
