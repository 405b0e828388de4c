"""Cached decoding against full recomputation; slots, positions and the bond between a cache and its loop count."""

import threading

import pytest
import torch
from transformers import DynamicCache

from conftest import random_ids, tiny_model
from looplm.models.context import CacheStore
from looplm.models.rotary import rotate_halves

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SHAPES = {
    "ouro": {},
    "grouped": {"num_key_value_heads": 2},
    "pre-norm": {"norm_placement": "pre", "norm_in_loop": False},
    "prelude-coda": {"prelude_layers": 1, "coda_layers": 2, "norm_in_loop": False},
}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("loops", [1, 2, 3, 4, 5, 6])
@torch.no_grad()
def test_cached_decoding_equals_full_recomputation(shape, loops):
    model, ids = tiny_model(**SHAPES[shape]), random_ids(2, 10)
    cached = model.generate(ids, max_new_tokens=32, loops=loops, **GREEDY)
    assert torch.equal(cached, model.generate(ids, max_new_tokens=32, loops=loops, use_cache=False, **GREEDY))
    full = model(cached, loops=loops, use_cache=False).logits
    out = model(cached[:, :10], loops=loops, use_cache=True)
    stepwise = [out.logits]
    for position in range(10, cached.shape[1]):
        out = model(cached[:, position : position + 1], loops=loops, cache=out.cache)
        stepwise.append(out.logits)
    torch.testing.assert_close(torch.cat(stepwise, 1), full, atol=1e-4, rtol=1e-4)
    config = model.config
    slots = config.prelude_layers + config.coda_layers + loops * config.core_layers
    assert len(out.cache) == slots
    assert [out.cache.get_seq_length(slot) for slot in range(slots)] == [cached.shape[1]] * slots


@torch.no_grad()
def test_slots_are_prelude_coda_then_core_loop_by_loop():
    config = tiny_model(prelude_layers=2, coda_layers=1).config  # layers 0, 1 | 2, 3 | 4
    store = CacheStore(DynamicCache(), config)
    assert [store.slot(layer, 0) for layer in (0, 1, 4)] == [0, 1, 2]
    assert [store.slot(layer, loop) for loop in (1, 2) for layer in (2, 3)] == [3, 4, 5, 6]


@torch.no_grad()
def test_positions_advance_once_per_token(monkeypatch):
    """The angle that reaches the rotation is the token's own position at every visit of every layer and loop."""
    model, seen = tiny_model(), []

    def spy(x, tables):
        cos, sin = tables
        half = cos.shape[-1] // 2  # the frequency 1, in the half where the sine has its own sign
        seen.append(torch.atan2(sin[0, 0, :, half], cos[0, 0, :, half]))
        return rotate_halves(x, tables)

    cache = model(random_ids(1, 4), loops=3, use_cache=True).cache
    for layer in model.model.core:
        monkeypatch.setattr(layer.attention, "rotate", spy)
    for position in (4, 5, 6):
        seen.clear()
        model(random_ids(1, 1), loops=3, cache=cache)
        assert len(seen) == 2 * 2 * 3  # query and key, two layers, three loops
        for angle in seen:
            torch.testing.assert_close(angle, torch.atan2(*(f(torch.tensor([float(position)])) for f in
                                                            (torch.sin, torch.cos))))  # fmt: skip
        assert cache.get_seq_length() == position + 1


@pytest.mark.parametrize("other", [2, 4])
@torch.no_grad()
def test_another_loop_count_on_a_cache_is_refused(other):
    model = tiny_model()
    for cache in (model(random_ids(1, 4), use_cache=True).cache, model(random_ids(1, 4), cache=DynamicCache()).cache):
        with pytest.raises(ValueError, match=rf"loops=3.*loops={other} needs {2 * other}"):
            model(random_ids(1, 1), cache=cache, loops=other)
        assert model(random_ids(1, 1), cache=cache).logits.isfinite().all()


@torch.no_grad()
def test_a_stock_cache_of_physical_layers_is_refused():
    model = tiny_model()
    stock = DynamicCache(config=model.config.at_loops(1))
    with pytest.raises(ValueError, match="has 2 slots"):
        model(random_ids(1, 4), cache=stock)


@torch.no_grad()
def test_threads_may_generate_at_different_depths_on_one_model():
    model, ids = tiny_model(), random_ids(1, 6)
    alone = {loops: model.generate(ids, max_new_tokens=12, loops=loops, **GREEDY) for loops in (2, 5)}
    found: dict[int, list[torch.Tensor]] = {2: [], 5: []}

    def work(loops):
        for _ in range(4):
            found[loops].append(model.generate(ids, max_new_tokens=12, loops=loops, **GREEDY))

    threads = [threading.Thread(target=work, args=(loops,)) for loops in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loops, runs in found.items():
        assert len(runs) == 4
        assert all(torch.equal(run, alone[loops]) for run in runs)
    assert model.config.loops == 3


def test_training_builds_no_cache():
    model = tiny_model().train()
    assert model(random_ids(1, 4)).cache is None
    assert model.eval()(random_ids(1, 4)).cache is not None


@torch.no_grad()
def test_a_coda_reads_out_an_earlier_loop_as_a_call_of_that_depth_would():
    model, ids = tiny_model(**SHAPES["prelude-coda"]), random_ids(2, 9)
    out = model(ids, loops=4, keep_loops="all")
    for loop in range(1, 5):
        torch.testing.assert_close(model.logits_at(out, loop), model(ids, loops=loop).logits, atol=1e-5, rtol=1e-5)
    later = model(ids[:, :1], loops=4, keep_loops="all", cache=out.cache)
    with pytest.raises(ValueError, match="coda"):
        model.logits_at(later, 2)
