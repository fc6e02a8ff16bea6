"""Names, reasons and refusals of the stages of a derivation; their values are compared in tests/formulas."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw

from derivations.activation import ActivationAt
from derivations.affine import AffineAt
from derivations.matrix import definitions
from derivations.normalization import LayerNormAt
from derivations.operation import Renamed
from derivations.stage import Stage, leaf, names_after, total

POINT = {"X": draw(3, 4), "W": draw(4, 4, seed=1), "V": draw(4, 4, seed=2)}


def stages():
    """N = LN(S), S = Y + tanh(Y V), Y = X + X W."""
    X = leaf("X", POINT["X"])
    F = Stage("F", AffineAt(X.value, POINT["W"]), {"X": X}, rule="XW")
    Y = total("Y", X, F)
    U = Stage("U", Renamed(AffineAt(Y.value, POINT["V"]), {"W": "V"}), {"X": Y}, {"W": "V", "X": "Y"}, rule="YV")
    M = Stage("M", ActivationAt("tanh", U.value), {"X": U}, {"X": "U"}, rule=r"\tanh(U)")
    S = total("S", Y, M)
    return Stage("N", LayerNormAt(S.value, eps=1e-5), {"X": S}, {"X": "S"}, rule="LN(S)")


def test_a_sum_keeps_what_both_summands_read():
    S = stages().reads["X"]
    assert list(S.reads) == ["Y"]
    slope = S.terms("W")[0].matrix
    assert slope.latex() == r"J_{S Y}\,\left(X\otimes I_{4}\right)"
    (J,) = (d for d in definitions(slope) if d.symbol == "J_{S Y}")
    assert J.matrix.latex() == r"I_{12}+J_{M Y}"
    assert J.reason == "first derivative of $S = Y + M$ in $Y$: sum of the derivatives of its summands"


def test_a_sum_of_two_that_share_nothing():
    left, right = leaf("A", draw(2, 2)), leaf("B", draw(2, 2, seed=1))
    both = total("C", left, right)
    assert torch.equal(both.value, left.value + right.value)
    assert both.jacobian("A").latex() == both.jacobian("B").latex() == "I_{4}"
    assert both.terms("A", "B") == []


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
