"""Products, Kronecker products, sums and multiples of matrix expressions, simplified as a person would."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from derivations.arrays import Array, Scalar, as_float, scale
from derivations.matrix.diagonal import DiagonalLift, DiagonalTake
from derivations.matrix.expression import KRONECKER, PRODUCT, SUM, Matrix, scalar_latex
from derivations.matrix.leaves import Identity, Zero
from derivations.matrix.permutation import Commutation


class Product(Matrix):
    """The product of two or more conforming matrices."""

    precedence = PRODUCT

    def __init__(self, factors: Sequence[Matrix]) -> None:
        self.factors = tuple(factors)
        self.shape = (self.factors[0].shape[0], self.factors[-1].shape[1])

    def children(self) -> Sequence[Matrix]:
        return self.factors

    def apply(self, y: Array) -> Array:
        for factor in reversed(self.factors):
            y = factor.apply(y)
        return y

    def transpose(self) -> Matrix:
        return product(*(factor.T for factor in reversed(self.factors)))

    def norm_bound(self) -> float:
        bound = 1.0
        for factor in self.factors:
            bound *= factor.norm_bound()
        return bound

    def latex(self) -> str:
        return r"\,".join(factor.bracketed(PRODUCT) for factor in self.factors)


class Sum(Matrix):
    """The sum of two or more matrices of one shape."""

    precedence = SUM

    def __init__(self, terms: Sequence[Matrix]) -> None:
        self.terms = tuple(terms)
        self.shape = self.terms[0].shape

    def children(self) -> Sequence[Matrix]:
        return self.terms

    def apply(self, y: Array) -> Array:
        total = self.terms[0].apply(y)
        for term in self.terms[1:]:
            total = total + term.apply(y)
        return total

    def transpose(self) -> Matrix:
        return add(*(term.T for term in self.terms))

    def norm_bound(self) -> float:
        return float(sum(term.norm_bound() for term in self.terms))

    def latex(self) -> str:
        text = self.terms[0].latex()
        for term in self.terms[1:]:
            piece = term.latex()
            text += piece if piece.startswith("-") else "+" + piece
        return text


class Scaled(Matrix):
    """A scalar times a matrix."""

    precedence = PRODUCT

    def __init__(self, c: Scalar, matrix: Matrix) -> None:
        self.c, self.matrix, self.shape = c, matrix, matrix.shape

    def children(self) -> Sequence[Matrix]:
        return (self.matrix,)

    def apply(self, y: Array) -> Array:
        return scale(self.c, self.matrix.apply(y))

    def transpose(self) -> Matrix:
        return scaled(self.c, self.matrix.T)

    def norm_bound(self) -> float:
        return as_float(abs(self.c)) * self.matrix.norm_bound()

    def latex(self) -> str:
        if self.c == -1:
            return "-" + self.matrix.bracketed(KRONECKER)
        return rf"{scalar_latex(self.c)}\,{self.matrix.bracketed(PRODUCT)}"


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


def product(*factors: Matrix) -> Matrix:
    """Return the product, flattened, with scalars pulled out and simplified as a person would.

    Identities are dropped, K_{n,m} K_{m,n} = I and E_n^T E_n = I are applied, and neighbouring Kronecker products are
    joined where their factors conform: (A (x) B) (C (x) D) = A C (x) B D.

    Raises:
        ValueError: if neighbouring shapes do not conform.
    """
    for left, right in itertools.pairwise(factors):
        if left.shape[1] != right.shape[0]:
            raise ValueError(f"product: shapes {left.shape} and {right.shape} do not conform: {left!r} @ {right!r}")
    rows, columns = factors[0].shape[0], factors[-1].shape[1]
    if any(isinstance(factor, Zero) for factor in factors):
        return Zero(rows, columns)
    flat: list[Matrix] = []
    c: Scalar = 1
    for factor in factors:
        c = c * _append(flat, factor)
    return scaled(c, _join(flat, rows))


def _append(flat: list[Matrix], factor: Matrix) -> Scalar:
    """Multiply the product ``flat`` by one more factor on the right, in place, and return the scalar that came out."""
    if isinstance(factor, Scaled):
        return factor.c * _append(flat, factor.matrix)
    if isinstance(factor, Product):
        c: Scalar = 1
        for part in factor.factors:
            c = c * _append(flat, part)
        return c
    if is_identity(factor):
        return 1
    if flat and cancels(flat[-1], factor):
        flat.pop()
        return 1
    if flat and (merged := mixed_product(flat[-1], factor)) is not None:
        flat.pop()
        return _append(flat, merged)  # the new factor may in turn meet the one before
    flat.append(factor)
    return 1


def _join(flat: list[Matrix], n: int) -> Matrix:
    return Product(flat) if len(flat) > 1 else flat[0] if flat else Identity(n)


def add(*terms: Matrix) -> Matrix:
    """Return the sum, flattened, with zero terms dropped.

    Raises:
        ValueError: if the shapes differ.
    """
    for term in terms:
        if term.shape != terms[0].shape:
            raise ValueError(f"add: shapes {terms[0].shape} and {term.shape} differ: {terms[0]!r} + {term!r}")
    flat = [part for term in terms for part in _terms(term) if not isinstance(part, Zero)]
    if not flat:
        return Zero(*terms[0].shape)
    return flat[0] if len(flat) == 1 else Sum(flat)


def _terms(matrix: Matrix) -> Sequence[Matrix]:
    if isinstance(matrix, Scaled) and isinstance(matrix.matrix, Sum) and matrix.c == -1:
        return [-term for term in matrix.matrix.terms]
    return matrix.terms if isinstance(matrix, Sum) else (matrix,)


def scaled(c: Scalar, matrix: Matrix) -> Matrix:
    """Return ``c`` times the matrix, with nested scalars merged."""
    if isinstance(matrix, Scaled):
        c, matrix = c * matrix.c, matrix.matrix
    if isinstance(c, torch.Tensor):  # its value may change or carry a gradient: no simplification
        return Scaled(c, matrix)
    if c == 1 or isinstance(matrix, Zero):
        return matrix
    return Zero(*matrix.shape) if c == 0 else Scaled(c, matrix)


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


def is_identity(matrix: Matrix) -> bool:
    """Tell whether the node is an identity by its structure: I_n, K_{1,n} or K_{n,1}."""
    return isinstance(matrix, Identity) or (isinstance(matrix, Commutation) and 1 in (matrix.m, matrix.n))


def cancels(left: Matrix, right: Matrix) -> bool:
    """Tell whether two conforming nodes multiply to the identity: K_{n,m} K_{m,n} or E_n^T E_n.

    >>> cancels(Commutation(3, 2), Commutation(2, 3)), cancels(Commutation(2, 3), Commutation(2, 3))
    (True, False)
    """
    if isinstance(left, Commutation) and isinstance(right, Commutation):
        return (left.m, left.n) == (right.n, right.m)
    return isinstance(left, DiagonalTake) and isinstance(right, DiagonalLift)


Matrix.combine.update(product=product, add=add, scaled=scaled)
