"""Every part of the architecture against its formula, and random combinations of parts against their invariants."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import looplm
from conftest import random_ids, tiny_config, tiny_model
from looplm.analysis.allocations import peak_bytes
from looplm.models.context import build_context
from looplm.models.injection import DiagonalInjection
from looplm.models.noise import position_noise
from looplm.models.norm import build_norm
from looplm.models.rotary import rotary_tables, rotate_pairs

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def trained(model, std=0.2, seed=1):
    """Every parameter moved off its special start (norms of one, biases of zero), so that each counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))
    return model


def test_norm_kinds_by_formula():
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    centred = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    rms = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    for kind, wanted, count in (("rms", rms, 1), ("layer", centred, 2), ("plain", centred, 0)):
        norm = build_norm(tiny_config(norm=kind))
        torch.testing.assert_close(norm(x), wanted, atol=1e-5, rtol=1e-5)
        assert len(list(norm.parameters())) == count


@pytest.mark.parametrize(
    ("norm", "placement"),
    list(itertools.product(["rms", "layer", "plain"], ["pre", "post", "branch", "sandwich_branch", "sandwich_dual"])),
)
@torch.no_grad()
def test_every_norm_and_placement_runs_and_stays_itself(norm, placement):
    model = tiny_model(norm=norm, norm_placement=placement, norm_in_loop=False)
    ids = random_ids(2, 6)
    assert model(ids, loops=5).logits.isfinite().all()
    cached = model.generate(ids, max_new_tokens=5, **GREEDY)
    assert torch.equal(cached, model.generate(ids, max_new_tokens=5, use_cache=False, **GREEDY))


@torch.no_grad()
def test_injections_by_formula():
    state, inputs = random_states(2)
    block = {}
    for kind in ("none", "add", "concat", "diagonal"):
        block[kind] = trained(tiny_model(injection=kind)).model.injection
    assert torch.equal(block["none"](state, inputs), state)
    assert torch.equal(block["add"](state, inputs), state + inputs)
    adapter = block["concat"].adapter.weight
    torch.testing.assert_close(block["concat"](state, inputs), state @ adapter[:, :32].T + inputs @ adapter[:, 32:].T)
    diagonal = block["diagonal"]
    dt = (1 + diagonal.step_size.exp()).log()
    wanted = (-dt * diagonal.log_decay.exp()).exp() * state + dt * (inputs @ diagonal.input_proj.T)
    torch.testing.assert_close(diagonal(state, inputs), wanted)


def random_states(count):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(2, 5, 32, generator=generator) for _ in range(count)]


@given(st.lists(st.floats(-20, 20), min_size=32, max_size=32), st.lists(st.floats(-20, 20), min_size=32, max_size=32))
@settings(max_examples=50, deadline=None)
def test_the_diagonal_injection_never_expands(log_decay, step_size):
    injection = DiagonalInjection(tiny_config(injection="diagonal")).double()
    injection.log_decay.data = torch.tensor(log_decay).double()
    injection.step_size.data = torch.tensor(step_size).double()
    assert (injection.decay() >= 0).all()
    assert (injection.decay() <= 1).all()


def test_the_diagonal_injection_starts_below_one():
    model = tiny_model(injection="diagonal", state_init="zero")
    assert torch.allclose(model.model.injection.decay(), torch.tensor(0.5))
    assert torch.equal(model.model.injection.input_proj, torch.eye(32))


@torch.no_grad()
def test_inject_once_injects_before_the_first_loop_alone():
    model, ids = tiny_model(injection="add", inject_once=True), random_ids(2, 5)
    backbone, out = model.model, model(ids, loops=3, keep_loops="all")
    x = backbone.embed_tokens(ids)
    context = out.context.without_store()
    state = x + x
    for loop in (1, 2, 3):
        for block in backbone.core:
            state = block(state, loop, context)
        state = backbone.norm(state)
        torch.testing.assert_close(state, out.states[loop])


@torch.no_grad()
def test_zero_start_and_add_equal_the_embedding_start_at_loop_one():
    zero, ids = tiny_model(injection="add", state_init="zero"), random_ids(2, 5)
    plain = tiny_model()
    plain.load_state_dict(zero.state_dict())
    torch.testing.assert_close(zero(ids, loops=1).logits, plain(ids, loops=1).logits)
    assert not torch.allclose(zero(ids, loops=2).logits, plain(ids, loops=2).logits)


@torch.no_grad()
def test_residual_scale_multiplies_every_branch():
    model, ids = (
        tiny_model(norm_placement="pre", residual_scale=0.25, core_layers=1, norm_in_loop=False),
        random_ids(1, 4),
    )
    block, x = model.model.core[0], model.model.embed_tokens(ids)
    context = build_context(model.config, x, None, None, None)
    attended = x + 0.25 * block.attention(block.attention_norms.pre(x), 0, 1, context)[0]
    wanted = attended + 0.25 * block.mlp(block.mlp_norms.pre(attended))
    torch.testing.assert_close(model(ids, loops=1).states[1], wanted)


@torch.no_grad()
def test_step_conditioning_tells_loops_apart():
    model, ids = trained(tiny_model(step_conditioning=True)), random_ids(1, 4)
    embedding, state = model.model.loop_embedding, torch.zeros(1, 1, 32)
    steps = torch.arange(16) / 16
    for loop in (1, 2, 40):
        angles = loop * 10_000.0**-steps
        wanted = embedding.proj.weight @ torch.cat([angles.sin(), angles.cos()])
        torch.testing.assert_close(embedding(state, loop)[0, 0], wanted)
    assert model(ids, loops=7).logits.isfinite().all()
    assert model.half().model.loop_embedding.proj.weight.dtype == torch.float16


@torch.no_grad()
def test_state_noise_is_seeded_and_differs_by_loop():
    model, ids = tiny_model(state_noise=0.5), random_ids(2, 5)
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert not torch.allclose(model(ids).logits, model(ids, state_seed=1).logits)
    positions = torch.arange(5)[None]
    first, second = (position_noise(positions, 32, 0.5, 0, stream) for stream in (1, 2))
    assert not torch.allclose(first, second)


def test_position_noise_is_the_same_for_any_slice():
    whole = position_noise(torch.arange(300)[None], 8, 1.0, seed=3)
    assert whole.std().item() == pytest.approx(0.9866, abs=0.05)
    for positions in ([5], [299, 0], [64, 63, 128]):
        assert torch.equal(position_noise(torch.tensor([positions]), 8, 1.0, seed=3)[0], whole[0, positions])
    assert not torch.equal(whole, position_noise(torch.arange(300)[None], 8, 1.0, seed=4))
    with torch.inference_mode():
        noise = position_noise(torch.arange(3)[None], 9, 1.0, seed=77)
    assert not position_noise(torch.arange(3)[None], 9, 1.0, seed=77).is_inference()
    assert noise.shape == (1, 3, 9)


def test_position_noise_is_well_mixed_and_costs_the_same_anywhere():
    noise = position_noise(torch.arange(4096)[None], 64, 1.0, seed=0)[0]
    assert noise.mean().abs() < 0.01
    assert noise.std().item() == pytest.approx(0.9866, abs=0.005)
    assert noise.abs().max() <= 3.0 + 1e-3
    for other in (
        position_noise(torch.arange(4096)[None] + 1, 64, 1.0, seed=0)[0],
        position_noise(torch.arange(4096)[None], 64, 1.0, seed=1)[0],
        position_noise(torch.arange(4096)[None], 64, 1.0, seed=0, stream=1)[0],
        noise.roll(1, dims=-1),
    ):
        correlation = torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]
        assert correlation.abs() < 0.01  # 262,144 numbers: 0.01 is five standard errors
    assert peak_bytes(lambda: position_noise(torch.tensor([[10**6]]), 64, 1.0, seed=0)) < 64 * 1024


def test_adjacent_rotation_by_complex_numbers():
    generator = torch.Generator().manual_seed(0)
    x, positions = torch.randn(2, 3, 4, 8, generator=generator), torch.tensor([[0, 1, 5, 9], [3, 4, 5, 6]])
    turned = rotate_pairs(x, rotary_tables(positions, 8, 1e4, "adjacent", torch.float32))
    numbers = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    angles = positions[:, None, :, None] * torch.tensor([1e4 ** (-2 * i / 8) for i in range(4)])
    wanted = torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    torch.testing.assert_close(turned, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_learned_positions_add_a_vector_a_position_and_end():
    model, ids = tiny_model(rope="learned", max_position_embeddings=8), random_ids(1, 5)
    backbone = model.model
    out = model(ids)
    wanted = backbone.embed_tokens(ids) + backbone.embed_positions.weight[:5]
    torch.testing.assert_close(backbone.embed(backbone.embed_tokens(ids), out.context), wanted)
    with pytest.raises(ValueError, match="position 8 lies past max_position_embeddings=8"):
        model(random_ids(1, 9))


@torch.no_grad()
def test_without_positions_the_order_of_the_past_does_not_matter():
    model, ids = tiny_model(rope="none", core_layers=1, loops=1), random_ids(1, 6)
    swapped = ids[:, [1, 0, 2, 3, 4, 5]]
    torch.testing.assert_close(model(swapped, loops=1).logits[:, -1], model(ids, loops=1).logits[:, -1])


@torch.no_grad()
def test_query_and_key_norms_and_biases(monkeypatch):
    model = trained(tiny_model(qk_norm=True, qk_bias=True, num_key_value_heads=2, rope="none", core_layers=1, loops=1))
    attention, seen = model.model.core[0].attention, {}
    monkeypatch.setattr(attention, "rotate", lambda x, _: seen.setdefault(x.shape[1], x))
    hooked = attention.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0]))
    model(random_ids(1, 4))
    hooked.remove()
    for heads, project, norm in ((4, attention.q_proj, attention.q_norm), (2, attention.k_proj, attention.k_norm)):
        plain = (seen["x"] @ project.weight.T + project.bias).unflatten(-1, (heads, 8))
        wanted = plain / (plain.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        torch.testing.assert_close(seen[heads], wanted.transpose(1, 2), atol=1e-5, rtol=1e-5)
    assert attention.v_proj.bias is None
    assert attention.o_proj.bias is None


@torch.no_grad()
def test_gelu_and_biases():
    model = trained(tiny_model(mlp="gelu", bias=True))
    mlp, x = model.model.core[0].mlp, torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    wanted = F.linear(
        F.gelu(F.linear(x, mlp.up_proj.weight, mlp.up_proj.bias)), mlp.down_proj.weight, mlp.down_proj.bias
    )
    torch.testing.assert_close(mlp(x), wanted)
    biased = {name for name, _ in model.named_parameters() if name.endswith("_proj.bias")}
    assert len(biased) == 2 * 6  # q, k, v, o, up, down in each of two layers


@torch.no_grad()
def test_embed_scale():
    model, ids = tiny_model(embed_scale=3.0), random_ids(1, 4)
    plain = tiny_model()
    plain.load_state_dict(model.state_dict())
    plain.model.embed_tokens.weight.mul_(3.0)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


@torch.no_grad()
def test_a_looped_model_equals_its_unrolled_copy_with_weights_repeated():
    looped = trained(tiny_model(norm_placement="pre", norm_in_loop=False, exit_gate=False, prelude_layers=1))
    unrolled = tiny_model(
        norm_placement="pre", norm_in_loop=False, exit_gate=False, prelude_layers=1, core_layers=8, loops=1
    )
    weights = looped.state_dict()
    repeated = {name: tensor for name, tensor in weights.items() if ".core." not in name}
    for copy in range(4):
        for name, tensor in weights.items():
            if ".core." in name:
                layer = int(name.split(".")[2])
                repeated[name.replace(f".core.{layer}.", f".core.{2 * copy + layer}.")] = tensor
    unrolled.load_state_dict(repeated)
    ids = random_ids(2, 9)
    torch.testing.assert_close(looped(ids, loops=4).logits, unrolled(ids).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_one_loop_without_injection_equals_a_plain_decoder():
    """Against transformers' own Llama, with our weights under its names."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"norm_placement": "pre", "norm_in_loop": False, "exit_gate": False, "num_key_value_heads": 2}
    model = trained(tiny_model(prelude_layers=1, **shape))
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )).eval()  # fmt: skip
    names = {"attention.": "self_attn.", "attention_norms.pre": "input_layernorm",
             "mlp_norms.pre": "post_attention_layernorm"}  # fmt: skip
    theirs = {}
    for name, tensor in model.state_dict().items():
        renamed = name.replace("model.prelude.0.", "model.layers.0.")
        renamed = renamed.replace("model.core.1.", "model.layers.2.").replace("model.core.0.", "model.layers.1.")
        for ours, other in names.items():
            renamed = renamed.replace(f".{ours}", f".{other}")
        theirs[renamed] = tensor
    llama.load_state_dict(theirs)
    ids = random_ids(2, 9)
    torch.testing.assert_close(model(ids, loops=1).logits, llama(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_init": "normal"}, "state_init='normal' with injection='none' never shows the tokens"),
        ({"state_init": "zero"}, "state_init='zero' with injection='none'"),
        ({"inject_once": True}, "inject_once=True needs an injection"),
        ({"state_noise": -1.0}, "state_noise=-1.0 must be a number and not negative"),
        ({"state_std": 0.0}, "state_std=0.0 must be a number above 0"),
        ({"residual_scale": 0.0}, "residual_scale=0.0 must be a number above 0"),
        ({"embed_scale": float("nan")}, "embed_scale=nan must be a number above 0"),
        ({"state_noise": float("inf")}, "state_noise=inf"),
        ({"embedding_initializer_range": -1.0}, "embedding_initializer_range=-1.0 must be above 0"),
        ({"init": "takase", "embedding_initializer_range": 0.5}, "init='takase' draws the embedding by its own rule"),
        ({"rope": "alibi"}, "rope='alibi' is not supported; choose one of 'split_half', 'adjacent'"),
        ({"norm": "batch"}, "norm='batch'"),
    ],
)
def test_nonsense_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def combine(**choices):
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})


CONFIGS = combine(
    norm=["rms", "layer", "plain"],
    norm_placement=["pre", "post", "branch", "sandwich_branch", "sandwich_dual"],
    norm_in_loop=[True, False],
    prelude_layers=[0, 1],
    coda_layers=[0, 1],
    core_layers=[1, 2],
    injection=["none", "add", "concat", "diagonal"],
    inject_once=[True, False],
    state_init=["embedding", "zero", "normal"],
    residual_scale=[1.0, 0.5],
    step_conditioning=[True, False],
    state_noise=[0.0, 0.1],
    rope=["split_half", "adjacent", "learned", "none"],
    mlp=["swiglu", "gelu"],
    qk_norm=[True, False],
    qk_bias=[True, False],
    bias=[True, False],
    num_key_value_heads=[4, 2, 1],
    embed_scale=[1.0, 4.0],
    tie_word_embeddings=[True, False],
    exit_gate=[True, False],
    init=["normal", "takase"],
)
_SENSIBLE = {"state_init": "embedding", "inject_once": False}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(CONFIGS, st.integers(1, 5), st.sampled_from([torch.float32, torch.float64]), st.sampled_from(["sdpa", "eager"]))
@torch.no_grad()
def test_any_combination_keeps_the_invariants(tmp_path_factory, parts, loops, dtype, attention):
    """cached = uncached, batched and padded = alone, packed = separate, saved = loaded."""
    parts = parts | (_SENSIBLE if parts["injection"] == "none" else {})
    model = trained(tiny_model(**parts), std=0.05).to(dtype)
    model.set_attn_implementation(attention)
    long, short = random_ids(1, 9), random_ids(1, 4, seed=2)
    close = {"atol": 2e-4, "rtol": 2e-3} if dtype == torch.float32 else {"atol": 1e-8, "rtol": 1e-8}
    alone = {name: model(ids, loops=loops, use_cache=False).logits[0] for name, ids in (("l", long), ("s", short))}
    assert all(logits.isfinite().all() for logits in alone.values())

    out, cached = model(long[:, :4], loops=loops, use_cache=True), []
    cached.append(out.logits[0])
    for start, end in ((4, 5), (5, 9)):
        out = model(long[:, start:end], loops=loops, cache=out.cache)
        cached.append(out.logits[0])
    torch.testing.assert_close(torch.cat(cached), alone["l"], **close)

    for side in ("left", "right"):
        pad = torch.zeros(1, 5, dtype=torch.long)
        padded = torch.cat([pad, short] if side == "left" else [short, pad], 1)
        mask = torch.ones(2, 9, dtype=torch.long)
        real = slice(5, 9) if side == "left" else slice(0, 4)
        mask[1] = 0
        mask[1, real] = 1
        batch = model(torch.cat([long, padded]), attention_mask=mask, loops=loops).logits
        torch.testing.assert_close(batch[0], alone["l"], **close)
        torch.testing.assert_close(batch[1, real], alone["s"], **close)

    positions = torch.tensor([[*range(9), *range(4)]])
    packed = model(torch.cat([long, short], 1), position_ids=positions, loops=loops, use_cache=False).logits[0]
    torch.testing.assert_close(packed, torch.cat([alone["l"], alone["s"]]), **close)

    folder = tmp_path_factory.mktemp("saved")
    looplm.save(model, folder)
    again = looplm.load(folder, dtype="auto")
    again.set_attn_implementation(attention)
    assert torch.equal(again(long, loops=loops, use_cache=False).logits[0], alone["l"])
