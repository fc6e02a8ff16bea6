"""Blocks of a loss Hessian as formulas: those of hessian(), and those of autograd."""

from __future__ import annotations

import pytest
import torch
from derivation_reference import assert_agree, generic, run, scalar_hessian, values
from torch.nn import functional as F

from hessiankit import TransformerBlock, derive, hessian

LOSSES = {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}
PAIRS = [("attention.W_Q", "attention.W_V"), ("feedforward.W_1", "feedforward.W_2"), ("norm_2.weight", "attention.W_K")]


@pytest.fixture(params=LOSSES)
def case(request):
    torch.manual_seed(0)
    block = generic(TransformerBlock(4, 3, 2, "sandwich", activation="gelu", causal=True).double())
    X = torch.randn(3, 4, dtype=torch.float64)
    target = torch.randn(3, 4, dtype=torch.float64) if request.param == "mse" else torch.tensor([3, 0, 0])
    return block, X, target, request.param


def test_against_the_hessian_and_autograd(case):
    block, X, target, loss = case
    H = hessian(block, X, target, loss=loss)
    point = values(block, X)

    def value(changed):
        return LOSSES[loss](run(block, point, changed), target)

    for names in PAIRS:
        found = derive(block, wrt=names, inputs=X, target=target, loss=loss)
        assert_agree(found.dense(), H.block(*names))
        assert_agree(found.dense(), scalar_hessian(value, point, *names))
        assert found.norm_bound() >= torch.linalg.matrix_norm(found.dense(), 2)


def test_the_gradient(case):
    block, X, target, loss = case
    for name, p in block.named_parameters():
        (slope,) = torch.autograd.grad(LOSSES[loss](block(X), target), p)
        assert_agree(derive(block, wrt=name, inputs=X, target=target, loss=loss).dense(), slope.reshape(1, -1))
