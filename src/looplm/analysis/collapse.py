"""How alike the states of different tokens are: collapse is all of them becoming one."""

from torch import Tensor
from torch.nn import functional as F


def token_correlation(states: Tensor, real: Tensor) -> Tensor:
    """The mean cosine of two different real tokens' states of one row, for each row of [B, S, D] that has two.

    Summed over pairs that is ||sum of unit vectors||^2 less their own squares, so no [S, S] matrix is made. Near 1 all
    tokens have become the same (Huginn's first bad run, arXiv 2502.05171, section 4 and Figure 5).
    """
    count = real.sum(-1)
    unit = F.normalize(states, dim=-1).where(real[..., None], 0)
    pairs = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))
    return (pairs / (count * (count - 1)))[count > 1]
