"""``identical``: formulas of the four papers as a reader would enter them, with the verdicts of the ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from sympy import Identity, KroneckerProduct, Matrix, MatrixSymbol, Symbol, exp, ones

from hessiankit import InputError, derive, identical
from papers import claims
from papers.identities import IDENTITIES, covariance, letter, softmax, tokens, without_eps

TOKENS, X = tokens(), letter("X", 2, 3)


@pytest.mark.parametrize("name", ["hybridnorm/eq19", "hybridnorm/eq17", "hybridnorm/eq20-eps", "curvature-gap/phi_vq"])
def test_verdicts_on_prints_of_the_papers(name):
    """The ledger reads all of them; where a formula holds a chance of error is known, where not a point."""
    row, (claim,) = IDENTITIES[name], claims(id=name)
    verdict = identical(row.derived(), row.printed())
    assert bool(verdict) == (claim.verdict == "HOLDS")
    if verdict:
        assert verdict.chance < 1e-15
        assert str(verdict).startswith("identical")
    else:
        first, second = verdict.counterexample.values
        assert abs(first - second) > 1e-6 * abs(first)
        assert str(verdict).startswith("different: entry")
        assert identical(row.derived(), row.corrected()).chance < 1e-15


def test_a_row_of_the_ledger_is_reproduced_where_the_verdict_at_every_point_is_its_own():
    (claim,) = claims(id="hybridnorm/eq19")
    assert claim.evidence().reproduced
    assert claim.evidence().second == "hessiankit.identical: print equal"
    assert not replace(claim, verdict="OMITTED").evidence().reproduced


def test_a_counterexample_is_a_point_where_the_numbers_differ():
    derivation, formula = derive("softmax", wrt="T", length=1), 2 * covariance(softmax(Matrix(MatrixSymbol("T", 1, 4))))
    shown = identical(derivation, formula).counterexample
    listed = derivation.sympy()
    point = {symbol: shown.point[symbol.name] for symbol in listed.inputs["T"]}
    assert float(listed.evalf(subs=point)[shown.entry]) == pytest.approx(shown.values[0])
    assert shown.values[1] == pytest.approx(2 * shown.values[0])


def test_ways_of_being_equal():
    linear, W = derive("linear", wrt="X", length=2), MatrixSymbol("W", 4, 6)
    assert identical(linear, KroneckerProduct(Identity(2), W.T)).method == "form"
    L = Symbol("L")
    assert identical(linear, KroneckerProduct(Identity(L), W.T)).method == "form"  # the size of the derivation
    logits = MatrixSymbol("T", 1, 4)
    shifted = Matrix(1, 4, lambda i, j: 1 / sum(exp(logits[0, k] - logits[0, j]) for k in range(4)))
    assert identical(derive("softmax", wrt="T", inputs=torch.zeros(1, 4)), covariance(shifted)).method == "prime field"
    tanh = derive(torch.nn.Tanh(), wrt="X", inputs=torch.zeros(1, 1))
    assert identical(tanh, Matrix([[1 / sympy.cosh(X[0, 0]) ** 2]]).subs(X[0, 0], tanh.sympy().inputs["X"][0])).method == "digits"
    relu = derive(torch.nn.LeakyReLU(0.1), wrt="X", inputs=torch.zeros(1, 1))
    x, slope = relu.sympy().inputs["X"][0], next(iter(relu.sympy().parameters))
    assert identical(relu, Matrix([[sympy.Piecewise((1, x > 0), (slope, True))]]))
    assert not identical(relu, Matrix([[sympy.Piecewise((slope, x > 0), (1, True))]]))
    assert not identical(relu, Matrix([[1]]))  # which holds on one side of the kink
    assert not identical(relu, Matrix([[slope]]))
    assert not identical(derive("gain", wrt="X", inputs=torch.zeros(1, 1)), sympy.Abs(Symbol("v_{1}")) * ones(1, 1))


def test_two_derivations():
    """The LayerNorm of Theorem 3, of which the chapter with a gain and eps is a generalisation."""
    printed, chapter = derive("curvature-gap/thm3", inputs=TOKENS[:1]), derive("layernorm", wrt=("X", "X"), inputs=TOKENS[:1])
    assert identical(printed, without_eps("layernorm", wrt=("X", "X"), inputs=TOKENS[:1]))
    verdict = identical(printed, chapter)
    assert not verdict
    assert r"\varepsilon" in verdict.counterexample.point


REFUSED = [
    ((ones(2, 2), ones(2, 2)), "got MutableDenseMatrix and MutableDenseMatrix; one of the two is a result of derive"),
    ((derive("linear", wrt="X", length=2), "W"), "got str; pass a result of derive or a matrix of SymPy"),
    ((derive("linear", wrt="X", length=2), ones(2, 2)), r"the shapes are \(12, 8\) and \(2, 2\)"),
    (
        (derive("linear", wrt="X", length=2), MatrixSymbol("V", 12, 8)),
        r"V \(12, 8\) is no input; the inputs are X \(2, 4\), W \(4, 6\)",
    ),
    ((derive("softmax", length=1), Symbol("gama") * ones(16, 4)), "gama is no letter of the derivation"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refusals(arguments, message):
    with pytest.raises(InputError, match=f"identical: .*{message}"):
        identical(*arguments)
