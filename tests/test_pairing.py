"""Blocks from curvature and two jacobians, against the whole Jacobians of both values."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw
from test_lifts import D_OUT, LIFTS, matrices

from hessiankit.engine import parameter_blocks as room
from hessiankit.engine.jacobians import WeightJacobian
from hessiankit.engine.parameter_blocks import add_across_rows, add_diagonal_pair, add_pair, add_pairs


@pytest.mark.parametrize("scratch", [1, 2**21])
@pytest.mark.parametrize("left", LIFTS)
@pytest.mark.parametrize("right", LIFTS)
def test_pairs(left, right, scratch, monkeypatch):
    monkeypatch.setattr(room, "SCRATCH", scratch)
    K = draw(6, D_OUT, D_OUT, seed=5)
    expected = torch.einsum("nop,noq,nqr->pr", matrices(left), K, matrices(right))
    found = torch.ones_like(expected)
    add_pair(LIFTS[left][0], LIFTS[right][0], K, found, same=False)
    assert torch.allclose(found - 1, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("outer", [1, 256])
def test_several_pairs_of_weights(outer, monkeypatch):
    """One weight with two uses of another, each with a curvature of its own that is not symmetric."""
    monkeypatch.setattr(room, "OUTER", outer)
    u, v = LIFTS["X W"][0], LIFTS["X W^T"][0]
    assert isinstance(u, WeightJacobian)
    assert isinstance(v, WeightJacobian)
    twice = WeightJacobian("W", None, draw(6, 4, seed=8), D_OUT, True)
    K, L = draw(6, D_OUT, D_OUT, seed=5), draw(6, D_OUT, D_OUT, seed=6)
    J, J_v = matrices("X W"), matrices("X W^T")
    J_twice = torch.einsum("ni,po->nopi", twice.weights, torch.eye(D_OUT, dtype=torch.float64)).reshape(6, D_OUT, -1)
    expected = torch.einsum("nop,noq,nqr->pr", J, K, J_v) + torch.einsum("nop,noq,nqr->pr", J, L, J_twice)
    found = torch.ones_like(expected)
    add_pairs(u, [(v, K), (twice, L)], found)
    assert torch.allclose(found - 1, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", LIFTS)
@pytest.mark.parametrize("outer", [1, 8, 256])
def test_a_symmetric_pair_of_one_lift_by_halves(name, outer, monkeypatch):
    monkeypatch.setattr(room, "OUTER", outer)
    K = draw(6, D_OUT, D_OUT, seed=5)
    K = K + K.mT
    expected = torch.einsum("nop,noq,nqr->pr", matrices(name), K, matrices(name))
    found = torch.ones_like(expected)
    add_pair(LIFTS[name][0], LIFTS[name][0], K, found, same=True)
    assert torch.allclose(found - 1, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("cache", [1, 40, 2**17])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("left", ["X W", "X W^T"])
@pytest.mark.parametrize("right", ["X W", "X W^T"])
@pytest.mark.parametrize("transposed", [False, True])
def test_pairs_across_rows(left, right, groups, cache, transposed, monkeypatch):
    monkeypatch.setattr(room, "CACHE", cache)
    m = 6 // groups
    K = draw(groups, m * D_OUT, m * D_OUT, seed=5)
    K = K.mT.contiguous().mT if transposed else K
    J, J_r = (matrices(name).reshape(groups, m * D_OUT, -1) for name in (left, right))
    expected = torch.einsum("gap,gab,gbr->pr", J, K, J_r)
    found = torch.ones_like(expected)
    u, v = LIFTS[left][0], LIFTS[right][0]
    assert isinstance(u, WeightJacobian)
    assert isinstance(v, WeightJacobian)
    add_across_rows(u, v, K, found)
    assert torch.allclose(found - 1, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("left", LIFTS)
@pytest.mark.parametrize("right", LIFTS)
def test_pairs_of_equal_columns(left, right):
    k = draw(6, D_OUT, seed=5)
    expected = torch.einsum("nop,no,nor->pr", matrices(left), k, matrices(right))
    found = torch.ones_like(expected)
    add_diagonal_pair(LIFTS[left][0], LIFTS[right][0], k, found)
    assert torch.allclose(found - 1, expected, rtol=0, atol=1e-13)
