"""The rules of the vec_r calculus (``derivations.vecr``), in rational and in symbolic arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from derivations import vecr
from derivations.arrays import Array
from derivations.matrix import Dense, Identity, kron
from hessiankit.verify.exact_case import ExactComparison, RationalDraw
from hessiankit.verify.jets import root as root_of


def vecr_rules(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare Properties 2-6 and Propositions 3-9 on matrices that depend on X and Y nonlinearly."""
    P, Q, E = draw.array(4, 2), draw.array(3, 2), draw.array(2, 4)
    squares = draw.array(2, 3) ** 2
    point = draw.lift({"X": squares, "Y": draw.array(3, 4), "D": _invertible(draw), "v": draw.array(3)})
    read = point.reference
    X, Y, D, v = point.variables.values()
    A, B = X * X, X.T @ E  # 2 x 3 and 3 x 4, both functions of X

    def d(F: Array, name: str = "X") -> Array:
        return read(F).jacobian(name)

    def at(F: Array) -> Array:
        return read(F).value

    inverse, root, adjoint = _inverse(D), np.frompyfunc(root_of, 1, 1)(X), draw.array(2, 4)
    N = (X @ Y) * (X @ Y)
    N_XY, N_YX = read(N).hessian("X", "Y"), read(N).hessian("Y", "X")
    scalar = read(np.array([(adjoint * N).sum()], dtype=object))
    rules: list[tuple[str, Any, Array]] = [
        ("d(P X Q)/dX", vecr.sandwich(Dense(P), Dense(Q)), d(P @ X @ Q)),
        ("d(E o X)/dX", vecr.hadamard(E[:, :3]), d(E[:, :3] * X)),
        ("d(diag^{-1}(b) X)/dX", kron(vecr.row_scaling(E[:, 0]), Identity(3)), d(X / E[:, :1])),
        ("d(X kron P)/dX", vecr.kron_derivative_left((2, 3), Dense(P)), d(np.kron(X, P))),
        ("d(P kron X)/dX", vecr.kron_derivative_right(Dense(P), (2, 3)), d(np.kron(P, X))),
        ("d(A(X) B(X))", vecr.product_rule(Dense(at(A)), Dense(d(A)), Dense(at(B)), Dense(d(B))), d(A @ B)),
        ("d(A(X) kron B(X))", vecr.kronecker_rule(Dense(at(A)), Dense(d(A)), Dense(at(B)), Dense(d(B))), d(np.kron(A, B))),
        ("dD^{-1}/dD", vecr.inverse_rule(Dense(at(inverse))), d(inverse, "D")),
        ("d diag(v)/dv", vecr.diag_rule(3), d(np.diag(v), "v")),
        ("dX^{o2}/dX", vecr.hadamard_square_rule(at(X)), d(X * X)),
        ("dX^{o1/2}/dX", vecr.hadamard_sqrt_rule(at(X)), d(root)),
        ("dX^T/dX", vecr.transpose_rule(2, 3), d(X.T)),
        ("dF/dX from dF", vecr.identify(lambda dX: P @ dX @ Q, at(X)), d(P @ X @ Q)),
        ("vec_r X from vec X", vecr.vec_to_vec_r(2, 3) @ vecr.vec(at(X)), vecr.vec_r(at(X))),
        ("d2N/dYdX from d2N/dXdY", vecr.slice_transpose(Dense(N_XY), 8, 6, 12), N_YX),
        ("d2<adjoint, N>/dXdY", vecr.contract(adjoint, Dense(N_XY), 6), scalar.hessian("X", "Y")),
    ]
    for label, closed, expected in rules:
        yield ExactComparison(label, closed, expected)


def _inverse(D: Array) -> Array:
    """Return the inverse of a 2 x 2 matrix in any arithmetic."""
    (a, b), (c, d) = D
    return np.array([[d, -b], [-c, a]], dtype=object) / (a * d - b * c)


def _invertible(draw: RationalDraw) -> Array:
    D = draw.array(2, 2)
    D[0, 0] = 7 * D[0, 0] if D[0, 0] * D[1, 1] == D[0, 1] * D[1, 0] else D[0, 0]
    return D
