"""The doors of transformers: caches, decoding, continuous batching, recording, checkpointing, compilation."""

import copy

import pytest
import torch
import torch._dynamo.testing
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.generation import ContinuousBatchingConfig

from conftest import random_ids, tiny_model

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = {
    "ouro": {},
    "huginn": {
        "prelude_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
        "injection": "concat", "state_init": "normal", "rope": "adjacent", "qk_bias": True, "exit_gate": False,
        "embed_scale": 5.0,
    },
    "gpt": {"norm": "layer", "norm_placement": "pre", "norm_in_loop": False, "rope": "learned", "mlp": "gelu",
            "bias": True, "tie_word_embeddings": True, "num_key_value_heads": 2},
}  # fmt: skip


@pytest.fixture(params=list(FAMILIES))
def model(request):
    return tiny_model(**FAMILIES[request.param])


@pytest.fixture
def ids():
    return random_ids(2, 7)


@pytest.mark.parametrize("loops", [1, 3, 5])
def test_static_caches_of_any_loop_count(model, ids, loops):
    dynamic = model.generate(ids, max_new_tokens=10, loops=loops, **GREEDY)
    static = model.generate(ids, max_new_tokens=10, loops=loops, cache_implementation="static", **GREEDY)
    assert torch.equal(static, dynamic)
    held = StaticCache(config=model.config.at_loops(loops), max_cache_len=20)
    with torch.no_grad():
        first = model(ids, loops=loops, cache=held)
    assert len(first.cache) == model.config.at_loops(loops).num_hidden_layers


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("loops", [2, 4])
def test_quantised_cache_stays_near(family, ids, loops):
    """fp8 keys and values: nearly the logits of the exact cache, one quantised slot a (layer, loop)."""
    model = tiny_model(initializer_range=0.1, **FAMILIES[family])
    quantised = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    wanted = {"max_new_tokens": 4, "loops": loops, "return_dict_in_generate": True, "output_logits": True}
    exact = model.generate(ids, **wanted, **GREEDY)
    near = model.generate(ids, **wanted, **quantised, **GREEDY)
    assert len(near.past_key_values if "past_key_values" in near else near.cache) == (
        model.config.at_loops(loops).num_hidden_layers
    )
    assert torch.equal(near.logits[0], exact.logits[0])  # the prompt itself is read unquantised
    cosine = torch.nn.functional.cosine_similarity(near.logits[1], exact.logits[1], dim=-1)
    assert (cosine > 0.9).all()


@pytest.mark.parametrize("loops", [1, 4])
def test_beams_samples_and_assistants(model, ids, loops):
    beams = {"max_new_tokens": 8, "loops": loops, "num_beams": 3, **GREEDY}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))
    sampled = {"max_new_tokens": 6, "loops": loops, "do_sample": True, "num_return_sequences": 3, "eos_token_id": None,
               "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(0)
    cached = model.generate(ids, **sampled)
    torch.manual_seed(0)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **sampled))
    plain = model.generate(ids[:1], max_new_tokens=12, loops=loops, **GREEDY)
    draft = tiny_model(seed=1, loops=2)
    assert torch.equal(plain, model.generate(ids[:1], max_new_tokens=12, loops=loops, assistant_model=draft, **GREEDY))
    assert torch.equal(
        plain, model.generate(ids[:1], max_new_tokens=12, loops=loops, prompt_lookup_num_tokens=3, **GREEDY)
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_continuous_batching_gives_the_same_tokens(model, attention):
    model.set_attn_implementation(attention)
    prompts = [random_ids(1, n, seed=n)[0].tolist() for n in (3, 9, 5)]
    settings = GenerationConfig(max_new_tokens=8, **GREEDY)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=128)
    done = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=batching)
    for prompt, found in zip(prompts, done.values(), strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=8, **GREEDY)[0, len(prompt) :]
        assert found.generated_tokens == alone.tolist()


def test_continuous_batching_honours_or_refuses_a_depth(model):
    with pytest.raises(ValueError, match=r"runs the config's loops \(3\); set model.config.loops = 5 first"):
        model.generate_batch([[1, 2, 3]], loops=5)
    with pytest.raises(TypeError, match="'loop'"):
        model.generate_batch([[1, 2, 3]], loop=3)
    model.config.loops = 5
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=128)
    settings = GenerationConfig(max_new_tokens=6, **GREEDY)
    done = model.generate_batch([[1, 2, 3]], loops=5, generation_config=settings, continuous_batching_config=batching)
    wanted = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, loops=5, **GREEDY)[0, 3:]
    assert next(iter(done.values())).generated_tokens == wanted.tolist()


@torch.no_grad()
def test_attention_implementations_agree(model, ids):
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    found = {}
    for attention in ("sdpa", "eager", "flex_attention"):
        model.set_attn_implementation(attention)
        found[attention] = torch.cat(
            [model(ids, loops=4).logits, model(ids, attention_mask=mask, loops=4).logits[:, 3:]], 1
        )
    for attention in ("eager", "flex_attention"):
        torch.testing.assert_close(found[attention], found["sdpa"], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("loops", [1, 3, 5])
@torch.no_grad()
def test_hidden_states_and_attentions_of_every_visit(model, ids, loops):
    model.set_attn_implementation("eager")
    visits = model.config.at_loops(loops).num_hidden_layers
    out = model(ids, loops=loops, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == visits + 1
    assert len(out.attentions) == visits
    assert all(weights.shape == (2, 4, 7, 7) for weights in out.attentions)
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 4, 7))
    torch.testing.assert_close(out.hidden_states[-1], model.model(ids, loops=loops).last_hidden_state)
    assert model(ids, loops=loops).hidden_states is None


@pytest.mark.parametrize("loops", [1, 4])
def test_gradient_checkpointing_changes_no_gradient(model, ids, loops):
    plain, checkpointed = model.train(), copy.deepcopy(model).train()
    checkpointed.gradient_checkpointing_enable()
    plain(ids, labels=ids, loops=loops).loss.backward()
    checkpointed(ids, labels=ids, loops=loops).loss.backward()
    for (name, ours), (_, other) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert (ours.grad is None) == (other.grad is None), name
        if ours.grad is not None:
            assert torch.equal(ours.grad, other.grad), name


def test_a_cache_does_not_go_with_gradient_checkpointing(ids):
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="use_cache=True does not go with gradient checkpointing"):
        model(ids, use_cache=True)


@torch.no_grad()
def test_both_names_of_the_cache(ids):
    model = tiny_model()
    out = model(ids, use_cache=True)
    with pytest.warns(FutureWarning, match="past_key_values"):
        old = model(ids[:, :1], past_key_values=copy.deepcopy(out.cache)).logits
    assert torch.equal(old, model(ids[:, :1], cache=out.cache).logits)


@torch.no_grad()
def test_a_cache_may_be_cropped_and_reordered(model, ids):
    """Field report R15."""
    cache = model(ids, loops=4, use_cache=True).cache
    cache.crop(-2)
    assert cache.get_seq_length() == 5
    torch.testing.assert_close(
        model(ids[:, 5:], loops=4, cache=cache).logits, model(ids, loops=4).logits[:, 5:], atol=1e-4, rtol=1e-4
    )
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(
        model(ids[[1, 0], 5:], loops=4, cache=cache).logits, model(ids[[1, 0]], loops=4).logits[:, 5:], atol=1e-4,
        rtol=1e-4,
    )  # fmt: skip


@torch.no_grad()
def test_the_step_compiles_once_for_all_loop_counts(ids):
    """One graph of the core serves any depth; the whole forward would be compiled anew for each."""
    model = tiny_model()
    wanted = {loops: model(ids, loops=loops, use_cache=False).logits for loops in (1, 3, 6, 9)}
    frames = torch._dynamo.testing.CompileCounter()
    for block in model.model.core:
        block.compile(backend=frames, fullgraph=True, dynamic=True)
    counts = []
    for loops, logits in wanted.items():
        torch.testing.assert_close(model(ids, loops=loops, use_cache=False).logits, logits)
        counts.append(frames.frame_count)
    assert counts[1:] == [counts[1]] * 3  # the loop's number turns symbolic when a second value is seen


def test_what_predict_leaves_out():
    """Trainer.predict gathers tensors only: the rest is named in the config."""
    model = tiny_model()
    out = model(random_ids(2, 4), labels=random_ids(2, 4), keep_loops="all")
    gathered = {name for name in out.to_tuple.__self__ if name not in model.config.keys_to_ignore_at_inference}
    assert gathered == {"loss", "logits"}


def test_num_items_in_batch_is_the_denominator(ids):
    model = tiny_model()
    mean = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=24).loss, mean * 12 / 24)
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=torch.tensor(6)).loss, mean * 12 / 6)


@torch.no_grad()
def test_a_lazily_grown_cache_works_and_is_bound(ids):
    model = tiny_model()
    cache = DynamicCache()
    model(ids, loops=2, cache=cache)
    assert len(cache) == 4
    with pytest.raises(ValueError, match="loops=3 needs 6"):
        model(ids, cache=cache)


def test_loops_in_a_generation_config_are_honoured_or_refused(ids):
    model = tiny_model()
    wanted = {loops: model.generate(ids, max_new_tokens=6, loops=loops, **GREEDY) for loops in (1, 3, 5)}
    assert not torch.equal(wanted[1], wanted[3])
    settings = GenerationConfig(max_new_tokens=6, loops=1, **GREEDY)
    assert torch.equal(model.generate(ids, generation_config=settings), wanted[1])
    assert torch.equal(model.generate(ids, generation_config=settings, loops=5), wanted[5])
    with pytest.raises(ValueError, match=r"set model.config.loops = 1 first"):
        model.generate_batch([[1, 2]], generation_config=settings)
    model.generation_config.loops = 5
    assert torch.equal(model.generate(ids, max_new_tokens=6, **GREEDY), wanted[5])
    with pytest.raises(ValueError, match="generate draws start states by state_seed"):
        model.generate(ids, max_new_tokens=2, init_state=torch.zeros(2, 7, 32))


@torch.no_grad()
def test_a_config_may_ask_for_hidden_states(ids):
    model = tiny_model()
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 7
    assert model(ids, output_hidden_states=False).hidden_states is None


@torch.no_grad()
def test_random_starts_compile_whole(ids):
    model = tiny_model(**FAMILIES["huginn"], state_noise=0.1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)


@torch.no_grad()
def test_notes_on_a_config_do_not_disturb_other_depths(ids):
    model = tiny_model()
    wanted = model.generate(ids, max_new_tokens=4, loops=5, **GREEDY)
    model.config.my_note = "x"
    assert torch.equal(model.generate(ids, max_new_tokens=4, loops=5, **GREEDY), wanted)


@pytest.mark.parametrize("seed", [1.5, "a", None])
def test_a_seed_is_a_whole_number(ids, seed):
    model = tiny_model(**FAMILIES["huginn"])
    assert torch.equal(model(ids, state_seed=torch.tensor(3)).logits, model(ids, state_seed=3).logits)
    with pytest.raises(ValueError, match=r"state_seed=.* must be a whole number"):
        model(ids, state_seed=seed)
