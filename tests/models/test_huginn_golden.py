"""Our Huginn against outputs of the published reference code (tests/golden/huginn-tiny)."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import looplm
from conftest import GOLDEN, random_ids, tiny_model
from looplm.models.accounting import count_parameters
from looplm.models.presets import huginn_3_5b

FOLDER = GOLDEN / "huginn-tiny"
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def huginn():
    return looplm.load(FOLDER)


@pytest.fixture(scope="module")
def expected():
    return load_file(FOLDER / "expected.safetensors")


@torch.no_grad()
def test_prelude_output(huginn, expected):
    out = huginn(expected["input_ids"], init_state=expected["initial_state"], use_cache=False)
    backbone = huginn.model
    inputs = backbone.embed(backbone.embed_tokens(expected["input_ids"]), out.context)
    torch.testing.assert_close(inputs, expected["prelude_output"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("loops", [1, 2, 4, 8, 16])
@torch.no_grad()
def test_latents_and_logits_match_the_reference(huginn, expected, loops, attention):
    huginn.set_attn_implementation(attention)
    tolerance = 5e-4 if loops == 16 else 2e-4
    out = huginn(expected["input_ids"], loops=loops, init_state=expected["initial_state"])
    latent = huginn.model.norm(out.states[loops])
    torch.testing.assert_close(latent, expected[f"latent_r{loops}"], atol=tolerance, rtol=0)
    torch.testing.assert_close(out.logits, expected[f"logits_r{loops}"], atol=tolerance, rtol=0)


@torch.no_grad()
def test_every_kept_loop_reads_out_through_the_coda(huginn, expected):
    out = huginn(expected["input_ids"], loops=8, keep_loops="all", init_state=expected["initial_state"])
    for loops in (1, 2, 4, 8):
        torch.testing.assert_close(huginn.logits_at(out, loops), expected[f"logits_r{loops}"], atol=2e-4, rtol=0)


@torch.no_grad()
def test_the_drawn_start_depends_on_seed_and_position_alone(huginn, expected):
    """Field report R06: the same for any batch, order, chunking and cache."""
    ids = expected["input_ids"]
    together = huginn(ids).logits
    assert torch.equal(together, huginn(ids).logits)
    assert not torch.allclose(together, huginn(ids, state_seed=1).logits)
    for row in (0, 1):
        torch.testing.assert_close(huginn(ids[row : row + 1]).logits[0], together[row], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(huginn(ids.flip(0)).logits.flip(0), together, atol=1e-5, rtol=1e-5)
    out = huginn(ids[:, :5], use_cache=True)
    logits = [out.logits]
    for start, end in ((5, 9), (9, 10), (10, 13)):
        out = huginn(ids[:, start:end], cache=out.cache)
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), together, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_masks_and_batches_work(huginn, expected):
    """The released class ignores its attention mask."""
    long, short = expected["input_ids"][:1], expected["input_ids"][1:, :6]
    ids = torch.cat([long, torch.cat([torch.zeros(1, 7, dtype=torch.long), short], 1)])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    out = huginn(ids, attention_mask=mask, loops=6).logits
    torch.testing.assert_close(out[1, 7:], huginn(short, loops=6).logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out[0], huginn(long, loops=6).logits[0], atol=1e-4, rtol=1e-4)
    done = huginn.generate(ids, attention_mask=mask, max_new_tokens=8, loops=6, **GREEDY)
    assert torch.equal(done[1, 13:], huginn.generate(short, max_new_tokens=8, loops=6, **GREEDY)[0, 6:])
    assert torch.equal(done[:, 13:], huginn.generate(ids, attention_mask=mask, max_new_tokens=8, loops=6,
                                                     use_cache=False, **GREEDY)[:, 13:])  # fmt: skip


def test_the_start_state_has_the_papers_distribution():
    """Truncated normal, variance 2/5 before the cut at three standard deviations (0.624 after it)."""
    config = looplm.LoopLMConfig(**(looplm.load(FOLDER).config.to_dict() | {"hidden_size": 256, "head_dim": 64}))
    torch.manual_seed(0)
    model = looplm.LoopLMForCausalLM(config).eval()
    ids = random_ids(1, 200, vocab=320)
    out = model(ids, loops=1)
    inputs = model.model.embed(model.model.embed_tokens(ids), out.context.without_store())
    state = model.model.init_state(inputs, out.context)
    assert state.std().item() == pytest.approx(0.624, abs=0.01)
    assert state.mean().abs() < 0.01
    assert state.abs().max() <= 3 * math.sqrt(0.4)
    assert (state[0, 0] != state[0, 64]).all()  # no block of positions repeats another


def test_the_preset_has_the_published_parameter_count():
    config = huginn_3_5b()
    assert count_parameters(config) == 3_564_976_800
    assert config.num_hidden_layers == 132
    assert config.embed_scale == pytest.approx(72.66, abs=0.01)


def test_takase_initialisation():
    config = huginn_3_5b()
    small = looplm.LoopLMConfig(**(config.to_dict() | {
        "hidden_size": 240, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 48, "vocab_size": 500,
        "intermediate_size": 400,
    }))  # fmt: skip
    torch.manual_seed(0)
    model = looplm.LoopLMForCausalLM(small)
    cut = 0.9866  # standard deviation of a unit normal cut at three
    wide, narrow = math.sqrt(2 / (5 * 240)) * cut, math.sqrt(1 / (5 * 240 * 132)) * cut
    block = model.model.core[1]
    for weight in (model.model.embed_tokens.weight, model.model.injection.adapter.weight, block.mlp.gate_proj.weight,
                   block.attention.q_proj.weight, block.attention.v_proj.weight):  # fmt: skip
        assert weight.std().item() == pytest.approx(wide, rel=0.02)
        assert weight.abs().max() <= 3 * wide / cut + 1e-6
    for weight in (block.attention.o_proj.weight, block.mlp.down_proj.weight, block.mlp.up_proj.weight):
        assert weight.std().item() == pytest.approx(narrow, rel=0.02)
    assert (block.attention.q_proj.bias == 0).all()
    assert (block.mlp_norms.post.weight == 1).all()


@pytest.mark.parametrize("max_shard_size", ["5GB", "300KB"])
def test_round_trip_is_byte_equal(huginn, tmp_path, max_shard_size):
    looplm.save(huginn, tmp_path / "ours", max_shard_size=max_shard_size)
    looplm.save(looplm.load(tmp_path / "ours"), tmp_path / "theirs", "huginn_raven", max_shard_size)
    written = {k: v for shard in (tmp_path / "theirs").glob("*.safetensors") for k, v in load_file(shard).items()}
    original = load_file(FOLDER / "model.safetensors")
    assert set(written) == set(original)
    assert all(written[name].equal(tensor) for name, tensor in original.items())
    ids = random_ids(1, 7, vocab=320)
    assert torch.equal(looplm.load(tmp_path / "theirs")(ids).logits, huginn(ids).logits)


@pytest.mark.parametrize("family", ["ouro-tiny", "huginn-tiny"])
@torch.no_grad()
def test_auto_classes_open_released_folders_without_remote_code(family):
    folder, ids = GOLDEN / family, random_ids(1, 6, vocab=320)
    assert type(AutoConfig.from_pretrained(folder)) is looplm.LoopLMConfig
    auto, ours = AutoModelForCausalLM.from_pretrained(folder), looplm.load(folder)
    assert type(auto) is looplm.LoopLMForCausalLM
    assert torch.equal(auto(ids).logits, ours(ids).logits)
    assert torch.equal(AutoModel.from_pretrained(folder)(ids).last_hidden_state, ours.model(ids).last_hidden_state)
    low = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low(ids).logits, looplm.load(folder, dtype="bfloat16")(ids).logits)


@pytest.mark.parametrize("family", ["ouro-tiny", "huginn-tiny"])
@torch.no_grad()
def test_arguments_reach_a_released_folder(family, tmp_path):
    folder, ids = tmp_path / "in" / family, random_ids(1, 6, vocab=320)
    shutil.copytree(GOLDEN / family, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    wanted = looplm.load(folder)(ids, loops=7).logits
    for model in (
        AutoModelForCausalLM.from_pretrained(folder, loops=7, attn_implementation="eager"),
        looplm.LoopLMForCausalLM.from_pretrained(folder, loops=7, attn_implementation="eager"),
    ):
        assert model.config.loops == 7
        assert model.config._attn_implementation == "eager"
        assert model.config.name_or_path == str(folder)
        assert model.generation_config.eos_token_id == [7, 9]
        torch.testing.assert_close(model(ids).logits, wanted, atol=2e-4, rtol=1e-3)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "in", subfolder=family).config.core_layers in (2, 3)
    changed = looplm.LoopLMConfig(**(model.config.to_dict() | {"loops": 9}))
    assert looplm.LoopLMForCausalLM.from_pretrained(folder, config=changed).config.loops == 9
    with pytest.raises(ValueError, match="variant="):
        looplm.LoopLMForCausalLM.from_pretrained(folder, variant="fp16")
    model.save_pretrained(tmp_path / "ours")
    assert looplm.load(tmp_path / "ours").config.loops == 7


def test_huginn_configs_and_tensors_are_read_strictly(tmp_path):
    folder = tmp_path / "huginn"
    shutil.copytree(FOLDER, folder)
    values = json.loads((folder / "config.json").read_text())
    for change in (
        {"injection_type": "add"}, {"state_init": "zero"}, {"norm_class_name": "LayerNorm"}, {"nonlin_name": "GELU"},
        {"block_class_name": "PreNorm"}, {"mlp_class_name": "BaseMLP"}, {"bias": True}, {"test_time_noise": 0.1},
        {"brand_new_key": 1}, {"n_layers": 9}, {"num_attention_heads": 8}, {"hidden_size": 32}, {"qk_bias": False},
        {"max_position_embeddings": 64}, {"tie_embeddings": False}, {"n_layers_in_coda": 0}, {"n_embd": "64"},
        {"num_key_value_heads": 2}, {"init_values": {"std": 0.5}},
    ):  # fmt: skip
        (folder / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(ValueError, match=next(iter(change))):
            looplm.load(folder)
    (folder / "config.json").write_text(json.dumps(values))
    original = load_file(folder / "model.safetensors")
    fused = "transformer.core_block.1.attn.Wqkv.weight"
    changes = [
        (
            original | {fused: torch.zeros(64, 64)},
            rf"tensor '{fused}' .* has shape \[64, 64\]; .* asks for \[192, 64\]",
        ),
        ({k: v for k, v in original.items() if k != fused}, f"misses tensor '{fused}'"),
        (original | {"transformer.extra": torch.zeros(1)}, "unexpected tensor 'transformer.extra'"),
        (original | {fused: torch.zeros(192, 64, dtype=torch.int8)}, r"is torch.int8, not floating point"),
        (original | {"freqs_cis": original["freqs_cis"].flip(1)}, "'freqs_cis' .* is not what the config implies"),
    ]
    for tensors, message in changes:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        for load in (looplm.load, AutoModelForCausalLM.from_pretrained):
            with pytest.raises(ValueError, match=message):
                load(folder)


def test_init_values_may_be_absent(tmp_path, expected):
    folder = tmp_path / "huginn"
    shutil.copytree(FOLDER, folder)
    values = json.loads((folder / "config.json").read_text()) | {"init_values": None}
    (folder / "config.json").write_text(json.dumps(values))
    logits = looplm.load(folder)(expected["input_ids"], loops=4, init_state=expected["initial_state"]).logits
    torch.testing.assert_close(logits, expected["logits_r4"], atol=2e-4, rtol=0)


def test_other_models_cannot_be_saved_as_huginn(tmp_path, huginn):
    parts = huginn.config.to_dict()
    for change in ({"state_std": 2.0}, {"coda_layers": 0}, {"qk_bias": False}):
        with pytest.raises(ValueError, match=r"Huginn's layout (cannot hold|needs a prelude and a coda)"):
            looplm.save(
                looplm.LoopLMForCausalLM(looplm.LoopLMConfig(**(parts | change))), tmp_path / "x", "huginn_raven"
            )
    for changes, named in (({}, "norm_placement"), ({"norm_placement": "sandwich_dual"}, "norm_in_loop")):
        with pytest.raises(ValueError, match=f"Huginn's layout cannot hold {named}"):
            looplm.save(tiny_model(**changes), tmp_path / "x", "huginn_raven")
    assert not (tmp_path / "x").exists()
