"""Averages of weights against sums worked out by hand and in float64."""

import pytest
import torch
from torch import nn

import looplm
from conftest import tiny_model
from looplm.data.tokenizer import load_tokenizer, train_tokenizer
from looplm.training.averaging import Ema, EmaSettings, average_checkpoints, dilated, write_average


def weight(value):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def move(layer, value):
    with torch.no_grad():
        layer.weight.fill_(value)


def test_ema_by_hand():
    """0 -> 8 -> 4 at decay 0.75: 0, 0.25 * 8 = 2, 0.75 * 2 + 0.25 * 4 = 2.5."""
    layer = weight(0.0)
    ema = Ema(layer, EmaSettings(decay=0.75))
    for value, wanted in ((8.0, 2.0), (4.0, 2.5)):
        move(layer, value)
        ema.update(layer)
        assert ema.state_dict()["weight"].item() == wanted


def test_ema_of_low_precision_weights_is_kept_in_float32():
    """In bfloat16 1 + 0.001 would round back to 1."""
    layer = weight(1.0).bfloat16()
    ema = Ema(layer, EmaSettings(decay=0.999))
    move(layer, 2.0)
    ema.update(layer)
    assert ema.state_dict()["weight"].item() == pytest.approx(1.001)


def test_ema_leaves_frozen_weights_out_and_counts_tied_ones_once():
    model = tiny_model(tie_word_embeddings=True)
    model.model.exit_gate.requires_grad_(False)
    names = set(Ema(model, EmaSettings()).state_dict())
    assert "model.embed_tokens.weight" in names
    assert not names & {"lm_head.weight", "model.exit_gate.weight", "model.exit_gate.bias"}


def test_applied_swaps_in_and_back_bit_for_bit():
    model, ids = tiny_model(), torch.arange(1, 9)[None]
    ema = Ema(model, EmaSettings(decay=0.5))
    averaged = model(ids).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ema.applied(model):
        assert model(ids).logits.equal(averaged)
    assert all(tensor.equal(own[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(KeyError), ema.applied(model):
        raise KeyError
    assert all(tensor.equal(own[name]) for name, tensor in model.state_dict().items())


def test_a_resumed_ema_goes_on_where_it_stood():
    layer, values = weight(1.0), [3.0, -2.0, 5.0]
    whole = Ema(layer, EmaSettings(decay=0.9))
    for value in values:
        move(layer, value)
        whole.update(layer)
        if value == -2.0:
            stored = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    resumed = Ema(weight(0.0), EmaSettings(decay=0.9))
    resumed.load_state_dict(stored)
    resumed.update(layer)
    assert resumed.state_dict()["weight"].equal(whole.state_dict()["weight"])


def test_an_average_of_other_weights_is_refused_by_name():
    ema = Ema(weight(0.0), EmaSettings())
    with pytest.raises(ValueError, match="the stored average of weight is missing"):
        ema.load_state_dict({})
    with pytest.raises(ValueError, match="bias is not trained here"):
        ema.load_state_dict(ema.state_dict() | {"bias": torch.zeros(1)})
    with pytest.raises(ValueError, match="decay=1"):
        EmaSettings(decay=1.0)


def test_dilated_counts_back_from_the_newest():
    assert dilated(range(10), last=7, dilation=3) == [3, 6, 9]
    assert dilated(range(10), last=1, dilation=5) == [9]
    assert dilated(range(4), last=75, dilation=1) == [0, 1, 2, 3]
    assert dilated(range(100)) == [29, 36, 43, 50, 57, 64, 71, 78, 85, 92, 99]  # Huginn's 75 and 7
    with pytest.raises(ValueError, match="dilation=0"):
        dilated(range(3), dilation=0)


@pytest.fixture
def folders(tmp_path):
    """Four checkpoints of one tied model with their tokenizer, oldest first."""
    tokenizer = train_tokenizer(["a loop thinks again"], vocab_size=257)
    made = [tmp_path / f"step-{step:08d}" for step in range(4)]
    for seed, folder in enumerate(made):
        looplm.save(tiny_model(seed, tie_word_embeddings=True, vocab_size=257), folder)
        tokenizer.save_pretrained(folder)
    return made


@pytest.mark.parametrize("beta", [0.9, 0.5, 1.0])
def test_average_is_the_weighted_sum_in_float64(folders, beta):
    states = [looplm.load(folder).state_dict() for folder in folders]
    weights = torch.tensor([beta**3, beta**2, beta, 1.0], dtype=torch.float64)
    found = average_checkpoints(folders, beta)
    assert set(found) == set(states[0])
    for name, tensor in found.items():
        stacked = torch.stack([state[name].double() for state in states])
        wanted = torch.tensordot(weights / weights.sum(), stacked, 1)
        torch.testing.assert_close(tensor.double(), wanted, atol=1e-6, rtol=1e-6)


def test_written_average_is_a_model_folder_with_its_tokenizer(folders, tmp_path):
    assert write_average(folders, tmp_path / "average", beta=0.5, last=4, dilation=2) == [folders[1], folders[3]]
    model = looplm.load(tmp_path / "average")
    old, new = (looplm.load(folders[index]).model.norm.weight for index in (1, 3))
    torch.testing.assert_close(model.model.norm.weight, (old + 2 * new) / 3)
    old, new = (looplm.load(folders[index]).model.embed_tokens.weight for index in (1, 3))
    torch.testing.assert_close(model.lm_head.weight, (old + 2 * new) / 3)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = load_tokenizer(tmp_path / "average")
    assert tokenizer.decode(tokenizer.encode("a loop")) == "a loop"


def test_what_cannot_be_averaged_is_refused_before_writing(folders, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint"):
        write_average([], tmp_path / "average")
    with pytest.raises(ValueError, match="beta=0"):
        write_average(folders, tmp_path / "average", beta=0.0)
    looplm.save(tiny_model(core_layers=3, vocab_size=257), tmp_path / "other")
    with pytest.raises(ValueError, match="other holds another model"):
        write_average([*folders, tmp_path / "other"], tmp_path / "average", dilation=1)
    assert not (tmp_path / "average").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file exists already and is no empty folder"):
        write_average(folders, tmp_path / "file")
    with pytest.raises(ValueError, match="exists already"):
        write_average(folders, folders[0])


def test_an_empty_folder_may_be_there_already(folders, tmp_path):
    (tmp_path / "average").mkdir()
    write_average(folders, tmp_path / "average")
    assert looplm.load(tmp_path / "average").config.vocab_size == looplm.load(folders[0]).config.vocab_size
