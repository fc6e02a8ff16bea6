"""What the tests of the operator share: modules at generic points, data, and how two matrices are compared."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
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


def applied(operator: hk.HessianOperator) -> list[Any]:
    """The primitives that the operator's batches are made of."""
    parts = [part for batch in operator._linearised for part in getattr(batch, "_parts", [batch])]
    return [a.primitive for part in parts for stretch in part._segments for a in stretch.applications]


def beside_unfused(
    room: ModuleType, primitive: type, patch: pytest.MonkeyPatch, *data: Any, tolerance: float = EXACT, **options: Any
) -> tuple[list[Any], Tensor]:
    """The primitives and the matrix of an operator, which has to agree with the one in which a room makes none of a primitive."""
    operator = hk.hessian_operator(*data, **options)
    matrix = operator.to_matrix()
    with patch.context() as without:
        without.setattr(room, "ENTRIES", math.inf)
        plain = hk.hessian_operator(*data, **options)
        assert not [p for p in applied(plain) if isinstance(p, primitive)]
        assert error(matrix, plain.to_matrix()) <= tolerance
        assert error(operator.gradient, plain.gradient) <= tolerance
    return applied(operator), matrix


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


class RowsTimesMatrix(nn.Module):
    """x W + b with W stored as (inputs, outputs), as GPT-2 does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias
