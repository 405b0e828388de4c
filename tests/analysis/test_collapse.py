"""Collapse of token states, against all pairs one by one."""

from itertools import combinations

import pytest
import torch
from torch.nn import functional as F

from looplm.analysis.collapse import token_correlation


def test_token_correlation_is_the_mean_over_all_pairs():
    def correlation(states):
        return token_correlation(states, torch.ones(states.shape[:2], dtype=torch.bool))

    states = torch.randn(2, 7, 5, dtype=torch.float64)
    for row, found in zip(states, correlation(states), strict=True):
        pairs = [F.cosine_similarity(row[i], row[j], dim=0) for i, j in combinations(range(7), 2)]
        torch.testing.assert_close(found, torch.stack(pairs).mean())
    assert correlation(torch.ones(1, 4, 3)).item() == pytest.approx(1.0)
    assert correlation(torch.eye(4)[None]).item() == pytest.approx(0.0)
    assert correlation(torch.tensor([[[2.0], [-3.0]]])).item() == pytest.approx(-1.0)


def test_padding_is_no_token_and_a_row_of_one_has_no_pair():
    states = torch.tensor([[[1.0, 0], [0, 2.0], [9.0, 9]], [[1.0, 0], [5.0, 0], [3.0, 0]], [[1.0, 0], [0, 1], [1, 1]]])
    real = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    assert token_correlation(states, real).tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
