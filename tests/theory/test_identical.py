"""``identical``: formulas of the four papers as a reader would enter them, with the verdicts of the ledger."""

from __future__ import annotations

import pytest
import sympy
import torch
from sympy import Identity, KroneckerProduct, Matrix, MatrixSymbol, Symbol, diag, erf, exp, eye, kronecker_product, ones, sqrt

from hessiankit import InputError, derive, identical
from hessiankit.theory.formulas.matrix_expressions import CommutationMatrix
from papers import claims

N, D, D_K = 2, 3, 2  # tokens, features, features of a query; values have D features, the output 6
TOKENS = torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X, T, W_V = (Matrix(MatrixSymbol(name, *shape)) for name, shape in (("X", (N, D)), ("T", (N, 4)), ("W_V", (D, D))))
W_Q, W_K = (Matrix(MatrixSymbol(name, D, D_K)) for name in ("W_Q", "W_K"))
W_O, Y, W_1, W_2 = (
    Matrix(MatrixSymbol(name, *shape)) for name, shape in (("W_O", (D, 6)), ("Y", (N, D)), ("W_1", (D, 5)), ("W_2", (5, 6)))
)
c, eps = Symbol("c"), Symbol("eps")  # 1/sqrt(d_k), and the eps of a norm


def K(m, n):
    return Matrix(CommutationMatrix(m, n).as_explicit())


def softmax(logits):
    weights = logits.applyfunc(exp)
    return Matrix(*logits.shape, lambda i, j: weights[i, j] / sum(weights[i, :]))


def covariance(A):
    return diag(*(diag(*A.row(i)) - A.row(i).T * A.row(i) for i in range(A.rows)))


def stacked(*factors):
    return kronecker_product(eye(N), *factors)


A = softmax(c * X * W_Q * W_K.T * X.T)
DA = covariance(A)
FRONT = stacked(W_O.T * W_V.T * X.T) * DA
T_X = c * (stacked(X * W_K * W_Q.T) + kronecker_product(X * W_Q * W_K.T, eye(N)) * K(D, N))
J_Z = kronecker_product(A, W_V.T) + stacked((X * W_V).T) * DA * T_X
Z = A * X * W_V


def rms_jacobian(number):
    blocks = []
    for i in range(N):
        square = (X.row(i) * X.row(i).T)[0] + D * number
        blocks.append(sqrt(D) / sqrt(square) * (eye(D) - X.row(i).T * X.row(i) / square))
    return diag(*blocks)


def theorem_2():
    """(P (x) I)(I - (I (x) 1) / d) + (I (x) M^T) dP/dX for one token, with dP/dX by SymPy."""
    row = Matrix(MatrixSymbol("X", 1, D))
    M = row - ones(1, D) * (sum(row) / D)
    P = sqrt(D) / sqrt((M * M.T)[0])
    return P * (eye(D) - ones(D, D) / D) + M.T * Matrix(1, D, [sympy.diff(P, x) for x in row])


def phi_vq(loss):
    S = kronecker_product(eye(D), K(D, D)) * kronecker_product(eye(D).reshape(D * D, 1), eye(D))
    Z_1 = stacked(X.T) * DA * kronecker_product(X, X)
    return loss * c * stacked(S) * Z_1 * kronecker_product(eye(D), W_K)


def network():
    U = Y * W_1
    u = Symbol("u")
    slope = sympy.diff(u * (1 + erf(u / sqrt(2))) / 2, u)
    return stacked(W_2.T) * diag(*(slope.subs(u, entry) for entry in U)) * kronecker_product(Y, eye(5))


def plain(name, **options):
    """A norm without eps and gain."""
    listed = derive(name, **options).sympy()
    (eps,) = listed.parameters
    return listed.subs({eps: 0, **dict.fromkeys(listed.inputs[r"\gamma"], 1)})


def derived(name, wrt=None):
    return derive(name, wrt=wrt, inputs=TOKENS)


PRINTED = [
    ("hybridnorm/eq19", lambda: derive("softmax", wrt="T", length=N), lambda: covariance(softmax(T))),
    ("hybridnorm/eq20", lambda: plain("rmsnorm", wrt="X", inputs=TOKENS), lambda: rms_jacobian(0)),
    ("hybridnorm/eq20-eps", lambda: derived("rmsnorm", "X"), lambda: rms_jacobian(0)),
    ("hybridnorm/eq17", lambda: derived("hybridnorm/eq17"), lambda: c * FRONT * kronecker_product(X, X * W_K)),
    ("hybridnorm/eq18", lambda: derived("hybridnorm/eq18"), lambda: c * FRONT * kronecker_product(X * W_Q, X) * K(D_K, D)),
    (
        "sharpness-disparity/b2-wq",
        lambda: derived("sharpness-disparity/b2-wq"),
        lambda: c * FRONT * kronecker_product(X, X * W_K),
    ),
    (
        "sharpness-disparity/b2-wk",
        lambda: derived("sharpness-disparity/b2-wk"),
        lambda: c * FRONT * kronecker_product(X, X * W_Q),
    ),
    ("sharpness-disparity/thm4.1-w1", lambda: derived("sharpness-disparity/thm4.1-w1"), network),
    ("curvature-gap/thm2", lambda: derive("curvature-gap/thm2", inputs=TOKENS[:1]), theorem_2),
    ("curvature-gap/phi_vq", lambda: derived("curvature-gap/phi_vq"), lambda: phi_vq(sympy.Rational(2, N * D))),
    (
        "curse-of-depth/eq43",
        lambda: derived("sharpness-disparity/b2-wq", wrt="X"),
        lambda: stacked(W_O.T) * stacked(Z.T * Z) * J_Z,
    ),
]
CORRECTED = [
    (lambda: derived("rmsnorm", "X"), lambda: stacked(diag(*Matrix(MatrixSymbol("gamma", D, 1)))) * rms_jacobian(eps)),
    (lambda: derived("sharpness-disparity/b2-wk"), lambda: c * FRONT * K(N, N) * kronecker_product(X, X * W_Q)),
    (lambda: derived("curvature-gap/phi_vq"), lambda: phi_vq(1)),
    (lambda: derived("sharpness-disparity/b2-wq", wrt="X"), lambda: stacked(W_O.T) * J_Z),
]


@pytest.mark.parametrize(("name", "derivation", "printed"), PRINTED, ids=[row[0] for row in PRINTED])
def test_verdicts_of_the_ledger(name, derivation, printed):
    (claim,) = claims(id=name)
    verdict = identical(derivation(), printed())
    assert bool(verdict) == (claim.verdict == "HOLDS")
    if verdict:
        assert verdict.chance < 1e-15
        assert str(verdict).startswith("identical")
    else:
        first, second = verdict.counterexample.values
        assert abs(first - second) > 1e-6 * abs(first)
        assert str(verdict).startswith("different: entry")


@pytest.mark.parametrize(("derivation", "formula"), CORRECTED)
def test_the_corrections_hold(derivation, formula):
    verdict = identical(derivation(), formula())
    assert verdict
    assert verdict.chance < 1e-15


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
    assert identical(printed, plain("layernorm", wrt=("X", "X"), inputs=TOKENS[:1]))
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
