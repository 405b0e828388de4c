"""Rollouts as rows, and what every token weighs, by hand."""

import pytest
import torch

from looplm.rl.batches import Counts, Scored, count, padded, weights
from looplm.rl.rollouts import Rollout


def scored(prompt, completion, loops, advantage=1.0, counts=True, most=4):
    rollout = Rollout(
        prompt_ids=prompt, token_ids=completion, loops=loops, logprobs=[-float(token) for token in completion],
        text="", finished=True, max_loops=most,
    )  # fmt: skip
    return Scored(rollout=rollout, advantage=advantage, counts=counts)


def test_a_row_by_hand():
    batch = padded(
        [scored([7, 8], [1, 2, 3], [3, 1, 2], advantage=-0.5), scored([9], [4], [4])], pad=0, full_keys=False
    )
    assert batch["input_ids"].tolist() == [[7, 8, 1, 2, 3], [9, 4, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 1, 2, 3], [-100, 4, -100, -100, -100]]
    assert batch["exits"].tolist() == [[4, 4, 3, 1, 2], [4, 4, 4, 4, 4]]
    assert batch["read"].tolist() == [[4, 3, 1, 2, 4], [4, 4, 4, 4, 4]]
    assert batch["key_loops"].tolist() == [[4, 4, 1, 2, 4], [4, 4, 4, 4, 4]]
    assert batch["sampled"][0].tolist() == [0, 0, -1, -2, -3]
    assert batch["advantages"][0].tolist() == [0, 0, -0.5, -0.5, -0.5]
    whole = padded([scored([7, 8], [1, 2, 3], [3, 1, 2])], pad=0, full_keys=True)
    assert (whole["key_loops"] == 4).all()
    assert whole["read"].tolist() == [[4, 3, 1, 2, 4]]


def test_no_row_is_a_row_of_padding():
    batch = padded([], pad=5, full_keys=False)
    assert batch["input_ids"].shape == (1, 2)
    assert (batch["labels"] == -100).all()
    assert (batch["kept"] == 0).all()


LENGTHS = [2, 3, 5, 8]


def sums(mean, groups, micro, max_tokens=10):
    """The loss of per-token losses that are the row's number + 1, over all micro-batches."""
    counts = count(groups, lambda tensor: tensor)
    total = 0.0
    for first in range(0, len(groups), micro):
        rows = groups[first : first + micro]
        batch = padded(rows, 0, full_keys=False)
        values = torch.tensor([row.advantage for row in rows])[:, None]
        total += (weights(batch, mean, counts, max_tokens) * values).sum().item()
    return total


@pytest.mark.parametrize("micro", [1, 2, 3, 8])
def test_means_by_hand_whatever_the_micro_batches_and_the_order(micro):
    values = [1.0, 2, 3, 4, 5, 6, 7, 8]
    rows = [scored([9], [1] * n, [4] * n, value) for n, value in zip(LENGTHS * 2, values, strict=True)]
    wanted = {
        "sequence": 36 / 8,
        "tokens": sum(n * value for n, value in zip(LENGTHS * 2, values, strict=True)) / 36,
        "constant": sum(n * value for n, value in zip(LENGTHS * 2, values, strict=True)) / 10 / 8,
    }
    for mean, value in wanted.items():
        assert sums(mean, rows, micro) == pytest.approx(value, abs=1e-12)
        assert sums(mean, rows[::-1], micro) == pytest.approx(value, abs=1e-12)


def test_what_does_not_count_is_in_no_denominator():
    rows = [scored([9], [1] * n, [4] * n, 1.0, counts=n != 5) for n in LENGTHS]
    assert count(rows, lambda tensor: tensor) == Counts(sequences=3, tokens=13)
    for mean in ("sequence", "tokens"):
        assert sums(mean, rows, 2) == pytest.approx(1.0)
    nothing = [scored([9], [1, 2], [4, 4], counts=False)]
    assert all(sums(mean, nothing, 1) == 0 for mean in ("sequence", "tokens", "constant"))


def test_an_empty_completion_counts_nowhere():
    rows = [scored([9, 8], [], []), scored([9], [1, 2], [4, 2], 3.0)]
    assert count(rows, lambda tensor: tensor) == Counts(sequences=1, tokens=2)
    assert sums("sequence", rows, 2) == pytest.approx(3.0)
