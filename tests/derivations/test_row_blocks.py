"""The matrices with one block for each row, written out by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from derivations.row_blocks import Centring, RowBlocks, RowCovariance

ROWS = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]], dtype=torch.float64)


def test_dense_forms():
    assert torch.equal(RowBlocks(ROWS).dense(), torch.block_diag(*[row.reshape(3, 1) for row in ROWS]))
    assert torch.equal(RowBlocks(ROWS).T.dense(), RowBlocks(ROWS).dense().T)
    covariance = torch.block_diag(*[torch.diag(row) - torch.outer(row, row) for row in ROWS])
    assert torch.allclose(RowCovariance(ROWS).dense(), covariance, rtol=0, atol=1e-15)
    assert torch.allclose(Centring(4).dense(), torch.eye(4, dtype=torch.float64) - 0.25, rtol=0, atol=1e-16)


@pytest.mark.parametrize("matrix", [RowBlocks(ROWS), RowBlocks(ROWS).T, RowCovariance(ROWS), Centring(4), Centring(1)])
def test_actions_and_norms(matrix):
    y = torch.randn(matrix.shape[1], 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(matrix @ y, matrix.dense() @ y, rtol=0, atol=1e-15)
    assert matrix.norm_bound() == pytest.approx(float(torch.linalg.matrix_norm(matrix.dense(), 2)), abs=1e-12)
    assert torch.equal(matrix.T.T.dense(), matrix.dense())


def test_exact():
    rows = np.array([[Fraction(1, 3), Fraction(2, 3)]], dtype=object)
    assert RowCovariance(rows).dense().tolist() == [[Fraction(2, 9), Fraction(-2, 9)], [Fraction(-2, 9), Fraction(2, 9)]]
    assert RowBlocks(rows).dense().tolist() == [[Fraction(1, 3)], [Fraction(2, 3)]]
    assert RowCovariance(rows).norm_bound() == pytest.approx(4 / 9)
    assert Centring(3).dense(rows)[0].tolist() == [Fraction(2, 3), Fraction(-1, 3), Fraction(-1, 3)]


def test_latex():
    assert RowBlocks(ROWS, r"\hat x_i").T.latex() == r"\operatorname{blockdiag}_i(\hat x_i)^\top"
    assert RowCovariance(ROWS).latex() == r"\operatorname{blockdiag}_i(\operatorname{diag}(a_i)-a_i{a_i}^\top)"
    assert Centring(5).latex() == "C_{5}"
