"""The Kronecker product, applied without being formed."""

from __future__ import annotations

from collections.abc import Sequence

from derivations.arrays import Array, Scalar
from derivations.matrix.expression import KRONECKER, PRODUCT, Matrix, Scaled, product, scaled
from derivations.matrix.leaves import Identity, Zero
from derivations.matrix.permutation import is_identity


class Kronecker(Matrix):
    """A (x) B, with ||A (x) B|| = ||A|| ||B|| (Property 9) and (A (x) B) vec_r(X) = vec_r(A X B^T) (Property 2)."""

    precedence = KRONECKER

    def __init__(self, left: Matrix, right: Matrix) -> None:
        self.left, self.right = left, right
        self.shape = (left.shape[0] * right.shape[0], left.shape[1] * right.shape[1])

    def children(self) -> Sequence[Matrix]:
        return (self.left, self.right)

    def apply(self, y: Array) -> Array:
        (m, n), (p, q) = self.left.shape, self.right.shape
        if m * q <= n * p:  # the order with the smaller array in between
            return _on_right(self.right, m, _on_left(self.left, q, y))
        return _on_left(self.left, p, _on_right(self.right, n, y))

    def transpose(self) -> Matrix:
        return kron(self.left.T, self.right.T)

    def norm_bound(self) -> float:
        return self.left.norm_bound() * self.right.norm_bound()

    def latex(self) -> str:
        left = self.left.bracketed(KRONECKER)
        return rf"{left}\otimes {self.right.bracketed(PRODUCT)}"


def kron(*factors: Matrix) -> Matrix:
    """Return the Kronecker product of the factors, left-nested, with scalars pulled out.

    I (x) I = I, 0 (x) A = 0 and 1 (x) A = A (for the 1 x 1 identity) are applied.

    >>> kron(Identity(2), Identity(3))
    Identity(6x6: I_{6})
    """
    result = factors[0]
    for factor in factors[1:]:
        result = _kron(result, factor)
    return result


def mixed_product(left: Matrix, right: Matrix) -> Matrix | None:
    """Return (A (x) B) (C (x) D) as A C (x) B D, split where the factors first conform; None if they never do."""
    above, below = _factors(left), _factors(right)
    for i in range(1, len(above)):
        for j in range(1, len(below)):
            A, B, C, D = kron(*above[:i]), kron(*above[i:]), kron(*below[:j]), kron(*below[j:])
            if A.shape[1] == C.shape[0] and B.shape[1] == D.shape[0]:
                return kron(product(A, C), product(B, D))
    return None


def _factors(matrix: Matrix) -> list[Matrix]:
    return [*_factors(matrix.left), *_factors(matrix.right)] if isinstance(matrix, Kronecker) else [matrix]


def _on_left(A: Matrix, q: int, y: Array) -> Array:
    """Return (A (x) I_q) y."""
    columns = int(y.shape[1])
    if isinstance(A, Identity):
        return y
    return A.apply(y.reshape(A.shape[1], q * columns)).reshape(A.shape[0] * q, columns)


def _on_right(B: Matrix, m: int, y: Array) -> Array:
    """Return (I_m (x) B) y."""
    (p, q), columns = B.shape, int(y.shape[1])
    if isinstance(B, Identity):
        return y
    side_by_side = y.reshape(m, q, columns).swapaxes(0, 1).reshape(q, m * columns)
    return B.apply(side_by_side).reshape(p, m, columns).swapaxes(0, 1).reshape(m * p, columns)


def _kron(left: Matrix, right: Matrix) -> Matrix:
    c: Scalar = 1
    if isinstance(left, Scaled):
        c, left = c * left.c, left.matrix
    if isinstance(right, Scaled):
        c, right = c * right.c, right.matrix
    m, p = left.shape[0], right.shape[0]
    if isinstance(left, Zero) or isinstance(right, Zero):
        return Zero(m * p, left.shape[1] * right.shape[1])
    if is_identity(left) and is_identity(right):
        return scaled(c, Identity(m * p))
    if is_identity(left) and m == 1:
        return scaled(c, right)
    if is_identity(right) and p == 1:
        return scaled(c, left)
    if isinstance(right, Kronecker):
        return scaled(c, _kron(_kron(left, right.left), right.right))
    left = Identity(m) if is_identity(left) else left  # K_{1,m} is I_m
    right = Identity(p) if is_identity(right) else right
    if isinstance(left, Kronecker) and isinstance(left.right, Identity) and isinstance(right, Identity):
        return scaled(c, Kronecker(left.left, Identity(left.right.shape[0] * p)))
    return scaled(c, Kronecker(left, right))
