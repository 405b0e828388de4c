"""Optimisers against PyTorch's own and formulas in float64; parameter groups proved complete."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon

from conftest import random_ids, tiny_model
from looplm.training.adam import StableAdamW
from looplm.training.eight_bit import compiling_in_one_line, eight_bit_adamw, plain_parts, whole_entries
from looplm.training.optimizers import AdamWSettings, MuonSettings, OptimizerSettings, build_optimizers, check_groups

SHAPES = {
    "ouro": {},
    "huginn": {
        "prelude_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
        "injection": "concat", "state_init": "normal", "qk_bias": True, "exit_gate": False,
        "tie_word_embeddings": True,
    },
    "all": {
        "prelude_layers": 1, "coda_layers": 1, "injection": "diagonal", "norm": "layer", "rope": "learned",
        "bias": True, "qk_norm": True, "step_conditioning": True, "mlp": "gelu",
    },
}  # fmt: skip
SETTINGS = {
    "adamw": AdamWSettings(lr=1e-2),
    "stable": AdamWSettings(lr=1e-2, eps=0.0, update_clipping=True),
    "muon": MuonSettings(),
}


def everything(_):
    return True


def groups_of(model, optimizers):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {group["name"]: {names[id(parameter)] for parameter in group["params"]} for group in groups}, groups


def loss_of(model):
    out = model(random_ids(2, 7), loops=2, use_cache=False)
    gates = 0.0 if out.gate_logits is None else out.gate_logits.square().sum()
    return out.logits.logsumexp(-1).square().mean() + gates


# Settings and groups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_every_parameter_is_in_one_group(shape, settings):
    model = tiny_model(**shape)
    held, _ = groups_of(model, build_optimizers(model, settings, everything))
    named = [name for names in held.values() for name in names]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())


def test_the_groups_of_a_model_with_every_part():
    model = tiny_model(**SHAPES["all"])
    held, groups = groups_of(model, build_optimizers(model, AdamWSettings(lr=0.5, gate_lr=0.1), everything))
    parameters = dict(model.named_parameters())
    assert held["gate"] == {"model.exit_gate.weight", "model.exit_gate.bias"}
    assert held["tables"] == {
        "model.embed_tokens.weight", "model.embed_positions.weight", "model.loop_embedding.proj.weight",
        "lm_head.weight",
    }  # fmt: skip
    assert held["vectors"] == {name for name, p in parameters.items() if p.ndim == 1} - held["gate"]
    assert "model.injection.input_proj" in held["matrices"]
    found = {group["name"]: (group["base_lr"], group["lr"], group["weight_decay"]) for group in groups}
    assert found == {
        "matrices": (0.5, 0.5, 0.1), "tables": (0.5, 0.5, 0.1), "vectors": (0.5, 0.5, 0.0), "gate": (0.1, 0.1, 0.0)
    }  # fmt: skip


def test_muon_takes_the_matrices_of_blocks_and_injection():
    model = tiny_model(**SHAPES["huginn"])
    settings = MuonSettings(lr=0.5, weight_decay=0.2, adam=AdamWSettings(lr=0.3, weight_decay=0.1))
    muon, adam = build_optimizers(model, settings, everything)
    assert type(muon) is Muon
    assert type(adam) is AdamW
    held, groups = groups_of(model, (muon,))
    stacks = ("model.prelude.", "model.core.", "model.coda.", "model.injection.")
    assert held == {"matrices": {n for n, p in model.named_parameters() if n.startswith(stacks) and p.ndim == 2}}
    assert (groups[0]["base_lr"], groups[0]["weight_decay"]) == (0.5, 0.2)
    held, groups = groups_of(model, (adam,))
    assert held["tables"] == {"model.embed_tokens.weight"}
    assert {group["base_lr"] for group in groups} == {0.3}


def test_the_rest_is_frozen():
    model = tiny_model()
    held, _ = groups_of(model, build_optimizers(model, AdamWSettings(), lambda name: "exit_gate" in name))
    assert held == {"gate": {"model.exit_gate.weight", "model.exit_gate.bias"}}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == held["gate"]


def test_adapters_are_adams_and_decay():
    model = tiny_model()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "down_proj"]), model)
    held, groups = groups_of(model, build_optimizers(model, AdamWSettings(), lambda name: ".lora_" in name))
    assert list(held) == ["tables"]
    assert len(held["tables"]) == 2 * 2 * 2  # layers, targets, A and B
    assert groups[0]["weight_decay"] == 0.1
    with pytest.raises(ValueError, match="kind='adamw'"):
        build_optimizers(model, MuonSettings(), lambda name: ".lora_" in name)
    with pytest.raises(ValueError, match="trains no parameter"):
        build_optimizers(model, AdamWSettings(), lambda name: False)


def test_eight_bit_moments_step_like_adamw_in_a_quarter_of_the_bytes():
    torch.manual_seed(0)
    ours, plain = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
    plain.load_state_dict(ours.state_dict())
    groups = [{"params": list(ours.parameters()), "lr": 0.01, "weight_decay": 0.1}]
    eight = eight_bit_adamw(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    whole = AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        ours.weight.grad = torch.randn(128, 64)
        plain.weight.grad = ours.weight.grad.clone()
        eight.step()
        whole.step()
        # The first step reads the moments before they are rounded.
        assert torch.allclose(ours.weight, plain.weight, atol=1e-6 if step == 0 else 2e-3)
    parts = {}
    for name, value in eight.state[ours.weight].items():
        parts |= plain_parts(name, value)
    assert sum(part.nbytes for part in parts.values()) < 0.3 * 2 * plain.weight.nbytes
    again = whole_entries(parts, torch.float32)
    for name in ("exp_avg", "exp_avg_sq"):
        assert again[name].dequantize().equal(eight.state[ours.weight][name].dequantize())
    with pytest.raises(ValueError, match="bits=32"):
        AdamWSettings(bits=8, eps=0.0)


def test_without_a_compiler_a_compiled_step_says_in_one_line_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    step = torch.compile(lambda moment: moment.sin() * 0.125 + 3)
    message = (
        r"^the step of optimizer.bits=8 cannot be compiled \(InvalidCxxCompiler[^\n]* takes a C\+\+ compiler[^\n]*$"
    )
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "none"))}),
        pytest.raises(ValueError, match=message),
        compiling_in_one_line(),
    ):
        step(torch.zeros(7))
    with pytest.raises(RuntimeError, match=r"^another$"), compiling_in_one_line():
        raise RuntimeError("another")


def test_a_left_out_a_doubled_and_a_strange_parameter_are_named():
    model = nn.Linear(2, 2)
    whole = AdamW(model.parameters())
    check_groups(model, [whole])
    with pytest.raises(AssertionError, match="parameter bias is in 0 optimiser groups; expected 1"):
        check_groups(model, [AdamW([model.weight])])
    with pytest.raises(AssertionError, match="parameter weight is in 2"):
        check_groups(model, [whole, AdamW([model.weight])])
    with pytest.raises(AssertionError, match="1 parameters that are not the model's"):
        check_groups(model, [whole, AdamW([nn.Parameter(torch.zeros(1))])])
    model.bias.requires_grad_(False)
    with pytest.raises(AssertionError, match="parameter bias is in 1 optimiser groups; expected 0"):
        check_groups(model, [whole])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (AdamWSettings, {"lr": 0.0}, "lr=0.0"),
        (AdamWSettings, {"gate_lr": 0.0}, "gate_lr=0.0"),
        (AdamWSettings, {"betas": (0.9, 1.0)}, r"betas=\[0.9, 1.0\]"),
        (AdamWSettings, {"eps": -1.0}, "eps=-1.0"),
        (AdamWSettings, {"weight_decay": -1.0}, "weight_decay=-1.0"),
        (MuonSettings, {"momentum": 1.0}, "momentum=1.0"),
        (MuonSettings, {"lr": -1.0}, "lr=-1.0"),
    ],
)
def test_nonsense_is_named(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind(**changes)


def test_recipes_choose_by_kind():
    values = {"kind": "muon", "lr": 0.1, "adam": {"lr": 0.2, "betas": [0.8, 0.9]}}
    wanted = MuonSettings(lr=0.1, adam=AdamWSettings(lr=0.2, betas=(0.8, 0.9)))
    assert TypeAdapter(OptimizerSettings).validate_python(values) == wanted


# The steps themselves -----------------------------------------------------------------------------------------


def wander(make, steps=20):
    """A float64 matrix and vector after steps on fixed gradients of changing scale."""
    draw = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)) for shape in ((3, 4), (5,))]
    optimizer = make(parameters)
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * (1 + step % 3)
        optimizer.step()
    return parameters


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_stable_adamw_without_extras_is_torchs_adamw(weight_decay):
    values = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": weight_decay}
    found = wander(lambda p: StableAdamW(p, **values))
    wanted = wander(lambda p: AdamW(p, **values))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_without_epsilon_nothing_over_nothing_is_nothing():
    """The first step of Adam is the sign of the gradient, times the rate, whatever the gradient's size."""
    parameter = nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 1.0]))
    parameter.grad = torch.tensor([0.0, 1e-15, -3.0, 1e-30])  # the last one's square is 0 in float32
    StableAdamW([parameter], lr=0.25, eps=0.0).step()
    torch.testing.assert_close(parameter.data, torch.tensor([1.0, 0.75, 1.25, 1.0]))


def test_update_clipping_by_hand():
    """Gradients 1, 10 and beta2 = 1/2: v = (1/4 + 50) / (3/4) = 67, and the step of 10 / sqrt(67) is cut to 1."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = StableAdamW([parameter], lr=0.1, betas=(0.0, 0.5), update_clipping=True)
    for grad, moved in ((1.0, 0.1), (10.0, 0.1)):
        before = parameter.detach().clone()
        parameter.grad = torch.full_like(parameter, grad)
        optimizer.step()
        torch.testing.assert_close(before - parameter, torch.full_like(before, moved), atol=1e-12, rtol=0)


def test_update_clipping_never_lengthens_a_step():
    """A gradient smaller than its average: RMS = 1 / sqrt(67), under 1, leaves the rate alone."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = StableAdamW([parameter], lr=0.1, betas=(0.0, 0.5), update_clipping=True)
    for grad in (10.0, 1.0):
        before = parameter.item()
        parameter.grad = torch.full_like(parameter, grad)
        optimizer.step()
    v = (0.25 * 100 + 0.5) / 0.75
    assert before - parameter.item() == pytest.approx(0.1 / v**0.5, rel=1e-12)


def test_epsilon_zero_or_clipping_takes_ours():
    model = tiny_model()
    kinds = {
        AdamW: AdamWSettings(),
        StableAdamW: AdamWSettings(eps=0.0),
        Muon: MuonSettings(),
    }
    for kind, settings in kinds.items():
        assert type(build_optimizers(model, settings, everything)[0]) is kind
    clipped = build_optimizers(model, AdamWSettings(update_clipping=True), everything)[0]
    assert clipped.param_groups[0]["update_clipping"] is True


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_the_loss_falls(settings):
    model = tiny_model(**SHAPES["ouro"]).train()
    optimizers = build_optimizers(model, settings, everything)
    first = loss_of(model).item()
    for _ in range(5):
        model.zero_grad()
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert loss_of(model).item() < 0.95 * first


@contextmanager
def one_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_sharded_parameters_move_as_whole_ones(settings):
    whole, sharded = tiny_model(**SHAPES["all"]).train(), tiny_model(**SHAPES["all"]).train()
    with one_process_group() as mesh:
        fully_shard(sharded, mesh=mesh)
        for model in (whole, sharded):
            optimizers = build_optimizers(model, settings, everything)
            for _ in range(2):
                model.zero_grad()
                loss_of(model).backward()
                for optimizer in optimizers:
                    optimizer.step()
        for (name, ours), theirs in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            torch.testing.assert_close(ours.full_tensor(), theirs, atol=1e-6, rtol=1e-5, msg=name)
