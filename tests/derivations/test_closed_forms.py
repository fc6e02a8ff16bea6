"""Softmax and norms in vec_r: identities, digits, torch's own functions, and exact numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from second_order_reference import check_all_blocks, random_point, relative_error
from transformer_reference import layer_norm

from derivations.bounds.norm_rows import NormRows
from derivations.group_normalization import GroupNormRowsAt
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.row_blocks import RowCovariance

# Softmax -------------------------------------------------------------------------------------------------------------


def test_row_covariance():
    rows = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]], dtype=torch.float64)
    matrix, expected = RowCovariance(rows), torch.block_diag(*[torch.diag(row) - torch.outer(row, row) for row in rows])
    y = random_point(0, y=(6, 5))["y"]
    assert torch.allclose(matrix.dense(), expected, rtol=0, atol=1e-15)
    assert torch.allclose(matrix @ y, expected @ y, rtol=0, atol=1e-15)
    assert matrix.norm_bound() == pytest.approx(float(torch.linalg.matrix_norm(expected, 2)), abs=1e-12)
    assert matrix.latex() == r"\operatorname{blockdiag}_i(\operatorname{diag}(a_i)-a_i{a_i}^\top)"
    thirds = RowCovariance(np.array([[Fraction(1, 3), Fraction(2, 3)]], dtype=object))
    assert thirds.dense().tolist() == [[Fraction(2, 9), Fraction(-2, 9)], [Fraction(-2, 9), Fraction(2, 9)]]
    assert thirds.norm_bound() == pytest.approx(4 / 9)


def test_norms_of_rows_that_move_along_themselves_keep_their_digits():
    """With delta half the difference of two entries, or the only one, y = delta / (delta^2 + eps)^(1/2): no difference is left."""
    eps = 2e-16
    for chapter, signs, share in (
        (LayerNormAt, torch.tensor([1.0, -1.0]).double(), 0.5),
        (RMSNormAt, torch.ones(1).double(), 1.0),
    ):
        point = chapter(3.0 * signs.reshape(1, -1) + (share < 1), eps=eps)
        s = (9.0 + eps) ** 0.5
        first = eps / s**3 * share * torch.outer(signs, signs)
        second = -9 * eps / s**5 * share**2 * torch.einsum("i,j,k->ijk", signs, signs, signs)
        assert relative_error(point.jacobian("X").dense(), first) < 1e-15
        assert relative_error(point.hessian("X", "X").dense(), second.reshape(-1, len(signs))) < 1e-15


# Norms ---------------------------------------------------------------------------------------------------------------

L, d = 3, 4


def test_eps_per_row():
    point = random_point(3, X=(L, d), gamma=(d,))
    eps = torch.tensor([0.1, 0.0, 2.0], dtype=torch.float64)
    for shaped in (eps.tolist(), eps.reshape(L, 1)):
        check_all_blocks(LayerNormAt(**point, eps=shaped), lambda **p: layer_norm(eps.reshape(L, 1))(**p), point)


@pytest.mark.parametrize(("chapter", "width"), [(LayerNormAt, 5), (LayerNormAt, 2), (RMSNormAt, 3), (RMSNormAt, 1)])
def test_the_rows_of_a_norm_are_blocks_of_the_chapter(chapter, width):
    point = random_point(4, X=(L, width), gamma=(width,))
    rows, r = NormRows(**point, eps=0.3, norm=chapter.__name__[:-2].lower()), random_point(5, r=(L, width))["r"]
    at = chapter(**point, eps=0.3)
    assert relative_error(rows.value, at.value) < 1e-14
    assert relative_error(torch.block_diag(*rows.jacobian.mT), at.jacobian("X").dense()) < 1e-13
    contracted = torch.einsum("o,oij->ij", r.reshape(-1), at.hessian("X", "X").dense().reshape(-1, L * width, L * width))
    assert relative_error(torch.block_diag(*rows.curvature(r)), contracted) < 1e-13


def test_groups_have_no_eps_by_default():
    X = random_point(0, X=(2, 6))["X"]
    assert relative_error(GroupNormRowsAt(X, 3).value, torch.nn.functional.group_norm(X, 3, eps=0.0)) <= 1e-13
