"""A looped transformer as one would write it by hand in PyTorch: the yardstick of the training benchmark."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainBlock(nn.Module):
    """Attention and SwiGLU with norms before and after each, inside the residual branch, as in Ouro."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(4))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        q, k = _rotate(q, rotary), _rotate(k, rotary)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.norms[1](self.out(attended))
        normed = self.norms[2](x)
        return x + self.norms[3](self.down(F.silu(self.gate(normed)) * self.up(normed)))


class PlainLoopedModel(nn.Module):
    """`layers` blocks applied `loops` times, the logits of every loop held at once, Stage I's loss over them."""

    def __init__(self, vocab: int, width: int, inner: int, heads: int, layers: int, loops: int) -> None:
        super().__init__()
        self.loops, self.head_dim = loops, width // heads
        self.embed, self.norm = nn.Embedding(vocab, width), nn.RMSNorm(width, eps=1e-6)
        self.blocks = nn.ModuleList(PlainBlock(width, inner, heads) for _ in range(layers))
        self.exit_gate, self.head = nn.Linear(width, 1), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, beta: float = 0.05) -> Tensor:
        """Stage I's loss on ids [B, S]; at one loop, plain next-token cross-entropy."""
        x, rotary = self.embed(ids), _rotary(ids.shape[1], self.head_dim, ids.device)
        logits, gates = [], []
        for _ in range(self.loops):
            for block in self.blocks:
                x = block(x, rotary)
            x = self.norm(x)
            logits.append(self.head(x)[:, :-1])
            gates.append(self.exit_gate(x)[:, :-1, 0])
        targets = ids[:, 1:].flatten()
        nll = torch.stack([F.cross_entropy(one.flatten(0, 1), targets, reduction="none") for one in logits])
        if self.loops == 1:
            return nll.mean()
        leave = torch.stack(gates).flatten(1).sigmoid()
        stay = torch.cumprod(1 - leave[:-1], 0)
        before = torch.cat([torch.ones_like(stay[:1]), stay])
        pdf = torch.cat([leave[:-1] * before[:-1], before[-1:]])
        entropy = -(pdf * pdf.clamp(min=1e-12).log()).sum(0)
        return ((pdf * nll).sum(0) - beta * entropy).mean()


def _rotary(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rates = 1e4 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(length, device=device)[:, None] * rates
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rotary[0] + torch.cat([-second, first], -1) * rotary[1]
