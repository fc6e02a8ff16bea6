"""Lookup of rows: against torch.func on indexing, and against the product with a one-hot matrix."""

from __future__ import annotations

import pytest
import torch
from action_reference import check_actions
from second_order_reference import random_point, relative_error

from derivations.embedding import Embedding
from derivations.linear import weight_jacobian

W = random_point(63, W=(5, 3))["W"]
INDICES = torch.tensor([[4, 1, 1], [0, 4, 2]])


def test_actions():
    check_actions(Embedding(INDICES), lambda w: w[INDICES], (W,), [0])
    check_actions(Embedding(INDICES[0, 0]), lambda w: w[4], (W,), [0])


def test_a_frozen_row_does_not_move():
    kept = torch.ones(5, 1, dtype=torch.float64)
    kept[4] = 0
    check_actions(Embedding(INDICES, 4), lambda w: (kept * w + (1 - kept) * W)[INDICES], (W,), [0])
    given = W.clone().requires_grad_()
    adjoint = random_point(64, w=(2, 3, 3))["w"]
    (expected,) = torch.autograd.grad(torch.nn.functional.embedding(INDICES, given, padding_idx=4), given, adjoint)
    assert torch.equal(Embedding(INDICES, 4).vjp((W,), adjoint.unsqueeze(0))[0][0], expected)


def test_it_is_a_product_with_a_one_hot_matrix():
    R = torch.nn.functional.one_hot(INDICES.reshape(-1), 5).double()
    J = weight_jacobian(R, 3).dense()
    columns = torch.eye(15, dtype=torch.float64).reshape(15, 5, 3)
    assert relative_error(Embedding(INDICES).jvp((W,), (columns,)).reshape(15, -1).T, J) == 0


def test_rows_and_errors():
    assert Embedding(INDICES).is_linear
    assert not Embedding(torch.arange(5)).rowwise((W,), 1, (True,))
    with pytest.raises(ValueError, match="tangent of W is None"):
        Embedding(INDICES).jvp((W,), (None,))
