"""Jacobians: what they do row by row is what the whole Jacobian of the value by its parameter would do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import draw
from torch import Tensor

from hessiankit.engine.jacobians import GainJacobian, IdentityJacobian, IndexJacobian, ParameterJacobian, WeightJacobian

X, D_OUT = draw(6, 4), 5
HAT = draw(6, D_OUT, seed=2)
ONES = torch.ones((), dtype=torch.float64).expand(6, D_OUT)
TOKENS = torch.tensor([0, 2, 2, 1, 0, 2])
TABLE = (TOKENS.unsqueeze(1) * D_OUT + torch.arange(D_OUT)).long()
LIFTS: dict[str, tuple[ParameterJacobian, Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "X W": (WeightJacobian("W", None, X, D_OUT, False), lambda W: X @ W, (4, D_OUT)),
    "X W^T": (WeightJacobian("W", None, X, D_OUT, True), lambda W: X @ W.T, (D_OUT, 4)),
    "gain": (GainJacobian("g", None, HAT), lambda g: HAT * g, (D_OUT,)),
    "bias": (GainJacobian("b", None, ONES), lambda b: ONES * b, (D_OUT,)),
    "table": (IndexJacobian("E", torch.arange(3 * D_OUT), TABLE), lambda E: E[TOKENS], (3, D_OUT)),
}


def matrices(name: str) -> Tensor:
    """The Jacobian of the value with respect to the parameter, (rows, d_out, entries), by autograd."""
    _, f, shape = LIFTS[name]
    return torch.autograd.functional.jacobian(f, torch.zeros(shape, dtype=torch.float64)).reshape(6, D_OUT, -1)


@pytest.mark.parametrize("name", LIFTS)
def test_expand_and_reduce(name):
    J, jacobian = matrices(name), LIFTS[name][0]
    assert jacobian.size == J.shape[2]
    t = draw(D_OUT, 6, 7, seed=3)
    assert torch.allclose(jacobian.expand(t), torch.einsum("nop,onf->pnf", J, t), rtol=0, atol=1e-14)
    w = draw(6, D_OUT, 7, seed=4)
    assert torch.allclose(jacobian.sum(w), torch.einsum("nop,noc->pc", J, w), rtol=0, atol=1e-13)
    groups = torch.einsum("gmop,gmoc->gpc", J.reshape(2, 3, D_OUT, -1), w.reshape(2, 3, D_OUT, 7))
    assert torch.allclose(jacobian.reduce(w.reshape(2, 3, D_OUT, 7)), groups, rtol=0, atol=1e-13)


def test_a_row_that_holds_an_entry_of_a_table_twice():
    """E[[0, 0, 1]]: the entry's derivative in the row is the sum over its places."""
    jacobian = IndexJacobian("E", torch.arange(2), torch.tensor([[0, 0, 1], [1, 1, 1]]))
    t = draw(3, 2, 4, seed=3)
    expected = torch.stack([torch.stack([t[0, 0] + t[1, 0], 0 * t[0, 0]]), torch.stack([t[2, 0], t[:, 1].sum(0)])])
    assert torch.allclose(jacobian.expand(t), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["gain", "bias"])
def test_curvature_weighed_by_the_rows_of_a_gain(name):
    K = draw(6, D_OUT, 3, seed=5)
    jacobian = LIFTS[name][0]
    assert isinstance(jacobian, GainJacobian)
    expected = torch.einsum(
        "npo,npq->noq", torch.diagonal_scatter(0 * matrices(name), matrices(name).diagonal(0, 1, 2), 0, 1, 2), K
    )
    assert torch.allclose(jacobian.weigh(K.mT), expected.mT, rtol=0, atol=1e-14)


def test_parameters_taken_whole():
    jacobian = IdentityJacobian("W", None, 2, 3)
    w = draw(1, 1, 7, 4)
    assert torch.equal(jacobian.reduce(w), w[:, 0, 2:5])
    assert jacobian.size == 3
