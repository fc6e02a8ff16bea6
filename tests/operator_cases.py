"""What the tests of the operator share: modules at generic points, data, and how two matrices are compared."""

from __future__ import annotations

from typing import Any

import torch
from curvature_reference import Formula, draw, randomised
from torch import Tensor, nn

import hessiankit as hk

EXACT = 1e-12


def block(**options: Any) -> nn.Module:
    options = {"d_model": 4, "d_ff": 5, "d_k": 2} | options
    return randomised(hk.TransformerBlock(**options))


def classifier() -> nn.Module:
    return Formula(
        lambda m, ids: m.head(m.layer(m.embed(ids))),
        embed=nn.Embedding(6, 4),
        layer=hk.TransformerBlock(d_model=4, d_ff=5, placement="pre", activation="gelu"),
        head=nn.Linear(4, 3),
    )


def tokens(*shape: int, seed: int = 3, top: int = 6) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def assert_blocks_equal(found: Tensor, expected: hk.Hessian, tolerance: float) -> None:
    """Compare each block with its own largest entry, and blocks that are zero with the whole's."""
    whole = float(expected.matrix.abs().max())
    for i, j in expected.pairs():
        theirs = expected.block(i, j)
        difference = float((found[expected.slices[i], expected.slices[j]] - theirs).abs().max())
        assert difference <= max(tolerance * float(theirs.abs().max()), 1e-14 * whole), (i, j)


X, T = draw(2, 3, 4), draw(2, 3, 4, seed=2)


class TiedBlock(nn.Module):
    """A block between an embedding and its transpose as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(7, 6), hk.TransformerBlock(6, 3, bias=True, placement="pre")

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.table(ids)) @ self.table.weight.T


TOKENS = torch.tensor([[0, 3, 3, 5], [1, 6, 2, 0], [4, 4, 1, 5]])
LABELS = torch.tensor([[1, -100, 3, 0], [-100, -100, -100, 2], [6, 5, 4, -100]])
