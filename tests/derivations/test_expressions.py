"""Expressions with a name: they print as it and compute as what they stand for."""

from __future__ import annotations

import pytest
import torch

from derivations.matrix import Dense, Identity, Named, definitions, kron

J = Named("J", Dense(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64), "M"), "given")


def test_it_computes_as_what_it_stands_for():
    M = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    x = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    assert J.shape == (2, 3)
    assert J.T.shape == (3, 2)
    assert torch.equal(J.dense(), M)
    assert torch.equal(J.T.dense(), M.T)
    assert torch.equal(J @ x, M @ x)
    assert torch.equal((J.T @ J).dense(), M.T @ M)
    assert J.norm_bound() == J.T.norm_bound() == pytest.approx(float(torch.linalg.matrix_norm(M, 2)), rel=1e-14)


def test_transposed_twice_is_itself():
    assert J.T.T.latex() == "J"
    assert J.T.latex() == r"J^\top"
    S = Named("S", Identity(3))
    assert S.T is S  # symmetric by its structure


def test_definitions_come_in_reading_order_and_once():
    B = Named("B", J.T @ J, "product")
    C = Named("C", Dense(torch.ones(3, 3, dtype=torch.float64), "N"))
    found = definitions(C @ B + B.T @ C)
    assert [named.symbol for named in found] == ["C", "B", "J"]
    assert [named.transposed for named in found] == [False] * 3
    assert [named.reason for named in found] == ["", "product", "given"]
    assert definitions(Identity(2)) == []


def test_names_inside_products_stay_names():
    assert (kron(J, Identity(2)) @ kron(J.T, Identity(2))).latex() == r"J\,J^\top\otimes I_{2}"


def test_one_name_for_two_things_is_refused():
    other = Named("J", Dense(torch.ones(2, 3, dtype=torch.float64), "N"))
    with pytest.raises(ValueError, match=r"definitions: J stands for .*M.* and for .*N"):
        definitions(J + other)
    same = Named("J", Dense(torch.ones(2, 3, dtype=torch.float64), "M"))
    assert len(definitions(J + same)) == 1  # printed alike
