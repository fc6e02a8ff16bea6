"""Small modules that the tests of the references share."""

from __future__ import annotations

import torch
from torch import nn

RIGHT = ["reverse-over-reverse", "jvp(grad)", "central-differences"]
"""The routes that are right through every module of the tests."""


class HandWrittenNorm(nn.Module):
    """LayerNorm in mean, square and square root: every route and every number type can follow it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias


class Attention(nn.Module):
    """Fused multi-head attention, a residual and a norm, with a key bias that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = HandWrittenNorm(4)

    def forward(self, x):
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
