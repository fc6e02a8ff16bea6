"""The Kronecker product, applied without being formed."""

from __future__ import annotations

from collections.abc import Sequence

from derivations.arrays import Array, Scalar
from derivations.matrix.expression import KRONECKER, PRODUCT, Matrix, Scaled, scaled
from derivations.matrix.leaves import Identity, Zero


class Kronecker(Matrix):
    """A (x) B, with ||A (x) B|| = ||A|| ||B|| (Property 9) and (A (x) B) vec_r(X) = vec_r(A X B^T) (Property 2)."""

    precedence = KRONECKER

    def __init__(self, left: Matrix, right: Matrix) -> None:
        self.left, self.right = left, right
        self.shape = (left.shape[0] * right.shape[0], left.shape[1] * right.shape[1])

    def children(self) -> Sequence[Matrix]:
        return (self.left, self.right)

    def apply(self, y: Array) -> Array:
        (m, n), (p, q), columns = self.left.shape, self.right.shape, int(y.shape[1])
        if not isinstance(self.left, Identity):
            y = self.left.apply(y.reshape(n, q * columns))
        if isinstance(self.right, Identity):
            return y.reshape(m * p, columns)
        y = y.reshape(m, q, columns).swapaxes(0, 1).reshape(q, m * columns)
        return self.right.apply(y).reshape(p, m, columns).swapaxes(0, 1).reshape(m * p, columns)

    def transpose(self) -> Matrix:
        return kron(self.left.T, self.right.T)

    def norm_bound(self) -> float:
        return self.left.norm_bound() * self.right.norm_bound()

    def latex(self) -> str:
        left = self.left.bracketed(KRONECKER)
        return rf"{left}\otimes {self.right.bracketed(PRODUCT)}"


def kron(*factors: Matrix) -> Matrix:
    """Return the Kronecker product of the factors, with scalars pulled out and I (x) I = I, 0 (x) A = 0 applied.

    >>> kron(Identity(2), Identity(3))
    Identity(6x6: I_{6})
    """
    result = factors[0]
    for factor in factors[1:]:
        result = _kron(result, factor)
    return result


def _kron(left: Matrix, right: Matrix) -> Matrix:
    c: Scalar = 1
    if isinstance(left, Scaled):
        c, left = c * left.c, left.matrix
    if isinstance(right, Scaled):
        c, right = c * right.c, right.matrix
    if isinstance(left, Zero) or isinstance(right, Zero):
        return Zero(left.shape[0] * right.shape[0], left.shape[1] * right.shape[1])
    if isinstance(left, Identity) and isinstance(right, Identity):
        return scaled(c, Identity(left.shape[0] * right.shape[0]))
    if isinstance(left, Identity) and left.shape[0] == 1:
        return scaled(c, right)
    if isinstance(right, Identity) and right.shape[0] == 1:
        return scaled(c, left)
    return scaled(c, Kronecker(left, right))
