"""A padded model is the same function."""

import pytest
import torch

from conftest import tiny_config
from looplm.models import LoopLMForCausalLM
from looplm.studies.padded import padded


@pytest.mark.parametrize("placement", ["pre", "branch", "sandwich_branch"])
@pytest.mark.parametrize("tied", [False, True])
def test_padding_changes_no_state_no_gate_and_no_logit(placement, tied):
    torch.manual_seed(0)
    config = tiny_config(norm_placement=placement, tie_word_embeddings=tied, norm_eps=1e-2)
    model = LoopLMForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    large = padded(model, 3 * config.hidden_size + 5, config.core_layers + 2)
    ids = torch.randint(0, config.vocab_size, (2, 9))
    ours, theirs = (one(ids, keep_loops="all") for one in (large, model))
    assert torch.allclose(ours.logits, theirs.logits, rtol=1e-10, atol=1e-10)
    assert torch.allclose(ours.gate_logits, theirs.gate_logits, rtol=1e-10, atol=1e-10)
    size = config.hidden_size
    for loop, state in theirs.states.items():
        assert torch.allclose(ours.states[loop][..., :size], state, rtol=1e-9, atol=1e-9)
        assert not ours.states[loop][..., size:].any()


def test_what_zeros_would_not_leave_alone_is_refused():
    with pytest.raises(ValueError, match="only models like Ouro's"):
        padded(LoopLMForCausalLM(tiny_config(norm="layer")), 512, 4)
    with pytest.raises(ValueError, match=r"the model has width \d+ and \d+ layers; pad to no less"):
        padded(LoopLMForCausalLM(tiny_config()), 8, 4)
