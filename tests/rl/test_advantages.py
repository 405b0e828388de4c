"""Advantages by hand, and groups from which nothing can be learnt."""

import pytest
import torch

from looplm.rl.advantages import Advantages, is_dead


def test_groups_by_hand():
    rewards = torch.tensor([[0.0, 0, 0, 1], [1, 1, 1, 0]])
    spread = (3 / 16 * 4 / 3) ** 0.5  # of three equal numbers and one that is 1 off, over n - 1
    low, high = -0.25 / (spread + 1e-4), 0.75 / (spread + 1e-4)
    wanted = torch.tensor([[low, low, low, high], [-low, -low, -low, -high]], dtype=torch.float64)
    torch.testing.assert_close(Advantages().of(rewards), wanted)
    torch.testing.assert_close(
        Advantages(scale="none").of(rewards)[0], torch.tensor([-0.25] * 3 + [0.75], dtype=torch.float64)
    )
    batch = (0.25 * 8 / 7) ** 0.5  # four zeros and four ones
    torch.testing.assert_close(Advantages(scale="batch").of(rewards)[0, 3].item(), 0.75 / (batch + 1e-4))
    swapped = Advantages().of(rewards[[1, 0]])
    torch.testing.assert_close(swapped, wanted[[1, 0]])


@pytest.mark.parametrize("value", [0.35, 0.1, 0.0, 1.0, 1e9])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_no_advantage_at_all(value, scale):
    rewards = torch.full((2, 8), value, dtype=torch.float64)
    rewards[1, 3] += 1
    advantages = Advantages(scale=scale).of(rewards)
    assert (advantages[0] == 0).all()
    assert is_dead(rewards).tolist() == [True, False]
    assert 0.1 < advantages[1, 3].abs() < 10


def test_a_group_of_one_and_no_attempts_are_refused():
    with pytest.raises(ValueError, match="group of at least 2"):
        Advantages().of(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="attempts=0 must be at least 1"):
        Advantages(dead="resample", attempts=0)
