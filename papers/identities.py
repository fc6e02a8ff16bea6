"""Printed derivatives in SymPy, compared with ``hessiankit.derive`` by ``hessiankit.identical``: at every point.

A row of ``IDENTITIES`` has what is derived, the formula as printed and the corrected one, entered as a reader would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import sympy
import torch
from sympy import Matrix, MatrixSymbol, Rational, Symbol, diag, erf, exp, eye, kronecker_product, ones, sqrt
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.layernorm_theorems import theorem3_hessian
from derivations.matrix import Commutation, Identity, kron
from hessiankit import derive, identical

N, D, D_K, D_OUT, D_FF = 2, 3, 2, 6, 5
"""Tokens, features, features of a query, of the output, hidden ones: they differ, so that turned products are seen."""
c, eps = Symbol("c"), Symbol("eps")
"""The factor 1/sqrt(d_K) of the logits, and the eps of a norm."""


class Printed(NamedTuple):
    """A derivative, its formula in print and the corrected one; None where the paper, or the row, has none."""

    derived: Callable[[], Any]
    printed: Callable[[], Matrix] | None
    corrected: Callable[[], Matrix] | None = None


class Comparison(NamedTuple):
    """Verdicts of ``hessiankit.identical`` on the print and on the correction, None where there is none."""

    printed: bool | None
    corrected: bool | None

    def supports(self, verdict: str) -> bool:
        """Tell whether the print is the derivative where the row says HOLDS, and only there, and the correction is."""
        return self.printed in (None, verdict == "HOLDS") and self.corrected in (None, True)

    def __str__(self) -> str:
        pairs = [(name, equal) for name, equal in zip(("print", "correction"), self, strict=True) if equal is not None]
        words = ", ".join(f"{name} {'equal' if equal else 'different'}" for name, equal in pairs)
        return f"hessiankit.identical: {words}"


@cache
def compared(name: str) -> Comparison:
    """Return the comparison of a row of ``IDENTITIES``."""
    row = IDENTITIES[name]
    derived = row.derived()
    return Comparison(*(None if formula is None else bool(identical(derived, formula())) for formula in row[1:]))


# Letters and pieces ----------------------------------------------------------------------------------------------------------


def letter(name: str, *shape: int) -> Matrix:
    """Return the entries of an input."""
    return Matrix(MatrixSymbol(name, *shape))


X, T, W_V = letter("X", N, D), letter("T", N, 4), letter("W_V", D, D)
W_Q, W_K, W_O = letter("W_Q", D, D_K), letter("W_K", D, D_K), letter("W_O", D, D_OUT)
Y, W_1, W_2 = letter("Y", N, D), letter("W_1", D, D_FF), letter("W_2", D_FF, D_OUT)


def tokens(n: int = N, d: int = D) -> Tensor:
    """Return inputs of which the shape alone is read."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def entries(matrix: Any) -> Matrix:
    """Return a formula in vec_r as a matrix of SymPy."""
    dense = matrix.dense()
    return Matrix((dense.long() if isinstance(dense, Tensor) else dense).tolist())


def K(m: int, n: int) -> Matrix:
    """Return the commutation matrix K_{m,n}."""
    return entries(Commutation(m, n))


def softmax(logits: Matrix) -> Matrix:
    """Return the softmax by rows."""
    weights = logits.applyfunc(exp)
    return Matrix(*logits.shape, lambda i, j: weights[i, j] / sum(weights[i, :]))


def covariance(A: Matrix) -> Matrix:
    """Return blockdiag(diag(A_i) - A_i A_i^T)."""
    return diag(*(diag(*A.row(i)) - A.row(i).T * A.row(i) for i in range(A.rows)))


def stacked(*factors: Matrix) -> Matrix:
    """Return I_L (x) the factors."""
    return kronecker_product(eye(N), *factors)


def rms_jacobian(rows: Matrix, number: Any = 0) -> Matrix:
    """Return blockdiag(sqrt(d)/r_i (I - x_i x_i^T/r_i^2)) with r_i^2 = |x_i|^2 + d eps."""
    blocks, d = [], rows.cols
    for x in (rows.row(i) for i in range(rows.rows)):
        square = (x * x.T)[0] + d * number
        blocks.append(sqrt(d) / sqrt(square) * (eye(d) - x.T * x / square))
    return diag(*blocks)


def rms_norm(rows: Matrix) -> Matrix:
    """Return the rows divided by their root mean squares."""
    return Matrix.vstack(*(x * sqrt(rows.cols) / sqrt((x * x.T)[0]) for x in (rows.row(i) for i in range(rows.rows))))


def without_eps(name: str, **options: Any) -> Any:
    """Return a derivation without eps and gain."""
    listed = derive(name, **options).sympy()
    numbers = {symbol: 0 for symbol in listed.parameters if "varepsilon" in symbol.name}
    return listed.subs(numbers | dict.fromkeys(listed.inputs.get(r"\gamma", ()), 1))


# Formulas --------------------------------------------------------------------------------------------------------------------

A = softmax(c * X * W_Q * W_K.T * X.T)
DA = covariance(A)
FRONT = stacked(W_O.T * W_V.T * X.T) * DA


def theorem_2() -> Matrix:
    """(P (x) I)(I - (I (x) 1) / d) + (I (x) M^T) dP/dX for one token, with dP/dX by SymPy."""
    row = letter("X", 1, D)
    M = row - ones(1, D) * (sum(row) / D)
    P = sqrt(D) / sqrt((M * M.T)[0])
    return P * (eye(D) - ones(D, D) / D) + M.T * Matrix(1, D, [sympy.diff(P, x) for x in row])


def theorem_3() -> Matrix:
    """Theorem 3 for one token, its pieces corrected."""
    return entries(theorem3_hessian(np.array(letter("X", 1, D).tolist(), dtype=object)))


def network() -> Matrix:
    """(I (x) W_2^T) diag(vec_r sigma'(Y W_1)) (Y (x) I) for GELU."""
    u = Symbol("u")
    slope = sympy.diff(u * (1 + erf(u / sqrt(2))) / 2, u)
    return stacked(W_2.T) * diag(*(slope.subs(u, entry) for entry in Y * W_1)) * kronecker_product(Y, eye(D_FF))


def attention_in_tokens() -> Matrix:
    """A (x) W_V^T + (I (x) (X W_V)^T) dA/dT dT/dX, the Jacobian of A X W_V."""
    logits = c * (stacked(X * W_K * W_Q.T) + kronecker_product(X * W_Q * W_K.T, eye(N)) * K(D, N))
    return kronecker_product(A, W_V.T) + stacked((X * W_V).T) * DA * logits


@cache
def head(d: int, d_K: int) -> AttentionAt:
    """Return the chapter at symbols: the letters Z_1, Z_2 and S of Lemma 2."""
    shapes = {"X": (N, d), "W_Q": (d, d_K), "W_K": (d, d_K), "W_V": (d, D)}
    return AttentionAt(**{name: np.array(letter(name, *shape).tolist(), dtype=object) for name, shape in shapes.items()}, scale=c)


def phi(k: str, m: str, *, factor: bool = True, d: int = D, d_K: int = D_K) -> Matrix:
    """Return Phi_VQ, Phi_QQ or Phi_QK of Lemma 2; without ``factor`` corrected, that of the loss left out."""
    at, one = head(d, d_K), Identity(d)
    loss = Rational(2, N * d) if factor else 1
    if k == "V":
        return entries(loss * c * kron(Identity(N), at.S) @ at.Z_1 @ kron(one, at.key))
    front = kron(Identity(N), at.values.T, one, at.key.T) @ at.Z_2
    if m == "Q":
        return entries(loss * c**2 * front @ kron(one, at.key))
    pull = kron(kron(Identity(N), at.values.T, one) @ kron(at.Z_1, one) @ at.S, Identity(d_K))
    return entries(loss * c**2 * front @ kron(at.query, one) @ Commutation(d_K, d) + loss * c * pull)


def qkv_norm(name: str, *, power: int = 1) -> Matrix:
    """Return Eq. 22 (W_O), 23 (W_V), 24 (W_Q) or 25 (W_K); with power 2 divided by d_k in place of its root."""
    X, W_O = letter("X", N, 4), letter("W_O", 4, 4)
    Q, K_, V = (X * letter(weight, 4, width) for weight, width in (("W_Q", 2), ("W_K", 2), ("W_V", 4)))
    Q_N, K_N, V_N = map(rms_norm, (Q, K_, V))
    A, inner = softmax(c * Q_N * K_N.T), kronecker_product(X, eye(2))
    front = stacked(W_O.T * V_N.T) * covariance(A) * c**power
    if name == "W_O":
        return kronecker_product(A * V_N, eye(4))
    if name == "W_V":
        return kronecker_product(A, W_O.T) * rms_jacobian(V) * kronecker_product(X, eye(4))
    if name == "W_Q":
        return front * stacked(K_N) * rms_jacobian(Q) * inner
    return front * kronecker_product(Q_N, eye(N)) * K(2, N) * rms_jacobian(K_) * inner


# The table -------------------------------------------------------------------------------------------------------------------


def chapter(name: str, *wrt: str, d: int = D) -> Callable[[], Any]:
    """Return the derivation of a chapter or of a paper's statement."""
    return lambda: derive(name, wrt=wrt or None, inputs=tokens(d=d))


def second(k: str, m: str) -> Callable[[], Any]:
    """Return the derivation of Phi_km."""
    return chapter("attention", f"W_{k}", f"W_{m}", d=2)


def closed(k: str, m: str) -> Callable[[], Matrix]:
    """Return the closed form of Phi_km."""
    return lambda: entries(head(2, D_K).Phi(k, m))


def without_norms(name: str) -> Callable[[], Any]:
    """Return the derivation of a statement on attention with QKV-Norm, without eps."""
    return lambda: without_eps(f"hybridnorm/{name}", length=N)


IDENTITIES: dict[str, Printed] = {
    "curvature-gap/thm2": Printed(lambda: derive("curvature-gap/thm2", inputs=tokens(1)), theorem_2),
    "curvature-gap/thm3-full": Printed(lambda: derive("curvature-gap/thm3", inputs=tokens(1)), None, theorem_3),
    "curvature-gap/g_k": Printed(
        chapter("attention", "W_K"),
        lambda: c * stacked(W_V.T * X.T) * DA * kronecker_product(X * W_Q, X) * K(D, D_K),
        lambda: c * stacked(W_V.T * X.T) * DA * kronecker_product(X * W_Q, X) * K(D_K, D),
    ),
    "curvature-gap/phi_vv": Printed(chapter("attention", "W_V", "W_V"), lambda: sympy.zeros(N * D**3, D**2)),
    "curvature-gap/phi_vq": Printed(
        chapter("attention", "W_V", "W_Q"), lambda: phi("V", "Q"), lambda: phi("V", "Q", factor=False)
    ),
    "curvature-gap/phi_qq": Printed(second("Q", "Q"), lambda: phi("Q", "Q", d=2), lambda: phi("Q", "Q", factor=False, d=2)),
    "curvature-gap/phi_qk": Printed(second("Q", "K"), lambda: phi("Q", "K", d=2), lambda: phi("Q", "K", factor=False, d=2)),
    **{f"curvature-gap/phi_{k}{m}".lower(): Printed(second(k, m), None, closed(k, m)) for k, m in ("KQ", "KK", "VK", "QV", "KV")},
    "sharpness-disparity/thm4.1-w1": Printed(chapter("sharpness-disparity/thm4.1-w1"), network),
    "sharpness-disparity/b2-wq": Printed(chapter("sharpness-disparity/b2-wq"), lambda: c * FRONT * kronecker_product(X, X * W_K)),
    "sharpness-disparity/b2-wk": Printed(
        chapter("sharpness-disparity/b2-wk"),
        lambda: c * FRONT * kronecker_product(X, X * W_Q),
        lambda: c * FRONT * K(N, N) * kronecker_product(X, X * W_Q),
    ),
    "curse-of-depth/eq43": Printed(
        chapter("sharpness-disparity/b2-wq", "X"),
        lambda: stacked(W_O.T) * stacked((A * X * W_V).T * A * X * W_V) * attention_in_tokens(),
        lambda: stacked(W_O.T) * attention_in_tokens(),
    ),
    "hybridnorm/eq17": Printed(chapter("hybridnorm/eq17"), lambda: c * FRONT * kronecker_product(X, X * W_K)),
    "hybridnorm/eq18": Printed(chapter("hybridnorm/eq18"), lambda: c * FRONT * kronecker_product(X * W_Q, X) * K(D_K, D)),
    "hybridnorm/eq19": Printed(lambda: derive("softmax", wrt="T", length=N), lambda: covariance(softmax(T))),
    "hybridnorm/eq20": Printed(lambda: without_eps("rmsnorm", wrt="X", inputs=tokens()), lambda: rms_jacobian(X)),
    "hybridnorm/eq20-eps": Printed(
        chapter("rmsnorm", "X"),
        lambda: rms_jacobian(X),
        lambda: stacked(diag(*letter("gamma", D, 1))) * rms_jacobian(X, eps),
    ),
    "hybridnorm/eq22": Printed(without_norms("eq22"), lambda: qkv_norm("W_O")),
    "hybridnorm/eq23": Printed(without_norms("eq23"), lambda: qkv_norm("W_V")),
    "hybridnorm/eq24": Printed(without_norms("eq24"), lambda: qkv_norm("W_Q")),
    "hybridnorm/eq25": Printed(without_norms("eq25"), lambda: qkv_norm("W_K")),
    "hybridnorm/lemma-a2-proof-sqrt-q": Printed(without_norms("eq24"), lambda: qkv_norm("W_Q", power=2), lambda: qkv_norm("W_Q")),
    "hybridnorm/lemma-a2-proof-sqrt-k": Printed(without_norms("eq25"), lambda: qkv_norm("W_K", power=2), lambda: qkv_norm("W_K")),
}
"""Rows of the ledger by their ids. Others state norms, bounds, parts that are no derivative of a chapter, or do not conform."""
