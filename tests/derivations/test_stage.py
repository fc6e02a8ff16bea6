"""Stages: the chain rule with names gives the derivatives of autograd, and reads like a paper."""

from __future__ import annotations

import itertools

import pytest
import torch
from curvature_reference import draw

from derivations.activation import ActivationAt
from derivations.affine import AffineAt
from derivations.matrix import add, definitions
from derivations.normalization import LayerNormAt
from derivations.operation import Renamed
from derivations.stage import Stage, leaf, names_after, total

POINT = {"X": draw(3, 4), "W": draw(4, 4, seed=1), "V": draw(4, 4, seed=2)}


def function(X, W, V):
    """N = LN(S), S = Y + tanh(Y V), Y = X + X W."""
    Y = X + X @ W
    return torch.nn.functional.layer_norm(Y + torch.tanh(Y @ V), (4,))


def stages():
    X = leaf("X", POINT["X"])
    F = Stage("F", AffineAt(X.value, POINT["W"]), {"X": X}, rule="XW")
    Y = total("Y", X, F)
    U = Stage("U", Renamed(AffineAt(Y.value, POINT["V"]), {"W": "V"}), {"X": Y}, {"W": "V", "X": "Y"}, rule="YV")
    M = Stage("M", ActivationAt("tanh", U.value), {"X": U}, {"X": "U"}, rule=r"\tanh(U)")
    S = total("S", Y, M)
    return Stage("N", LayerNormAt(S.value, eps=1e-5), {"X": S}, {"X": "S"}, rule="LN(S)")


def second(name_i, name_j):
    """d vec_r(dN/d name_i) / d vec_r(name_j)^T by autograd.grad, twice."""
    point = {name: array.clone().requires_grad_() for name, array in POINT.items()}
    rows = []
    for entry in function(**point).reshape(-1):
        (slope,) = torch.autograd.grad(entry, point[name_i], create_graph=True)
        for one in slope.reshape(-1):
            (found,) = torch.autograd.grad(one, point[name_j], retain_graph=True)
            rows.append(found.reshape(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("name", POINT)
def test_jacobian(name):
    others = {k: v for k, v in POINT.items() if k != name}
    expected = torch.autograd.functional.jacobian(lambda p: function(**others, **{name: p}), POINT[name]).reshape(12, -1)
    found = stages().jacobian(name).dense()
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize(("name_i", "name_j"), itertools.product(POINT, repeat=2))
def test_hessian_and_its_terms(name_i, name_j):
    N = stages()
    expected, found = second(name_i, name_j), N.hessian(name_i, name_j).dense()
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
    terms = N.terms(name_i, name_j)
    assert (add(*(term.matrix for term in terms)).dense() - found).abs().max() <= 1e-14 * expected.abs().max()
    assert [term.meaning for term in terms] == [
        "first derivative of $N$ in $S$ times second derivative of $S$",
        "second derivative of $N$ in $S$, between two first derivatives",
    ]


def test_a_sum_keeps_what_both_summands_read():
    S = stages().reads["X"]
    assert list(S.reads) == ["Y"]
    slope = S.terms("W")[0].matrix
    assert slope.latex() == r"J_{S Y}\,\left(X\otimes I_{4}\right)"
    (J,) = (d for d in definitions(slope) if d.symbol == "J_{S Y}")
    assert J.matrix.latex() == r"I_{12}+J_{M Y}"
    assert J.reason == "first derivative of $S = Y + M$ in $Y$: sum of the derivatives of its summands"


def test_names_and_rules():
    found = {named.symbol: named for named in definitions(stages().hessian("W", "V"))}
    names = names_after("N")
    assert {names.second("W", "V"), names.slope("S"), names.curvature("S", "S"), "S_{W,V}", "J_{S Y}"} <= set(found)
    assert found["J_{N S}"].reason == "first derivative of $N = LN(S)$ in $S$: closed form (normalization)"
    assert found["S_{W,V}"].reason.endswith("chain rule to second order through $Y$")
    assert found["J_{M Y}"].reason == "first derivative of $M$ in $Y$: chain rule through $U$"


def test_unknown_names():
    for ask in (lambda N: N.jacobian("Q"), lambda N: N.hessian("W", "Q"), lambda N: N.terms("Q")):
        with pytest.raises(ValueError, match="no argument is called 'Q'"):
            ask(stages())
