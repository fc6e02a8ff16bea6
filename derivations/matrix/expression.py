"""Structured matrix expressions: what every node can do, and the four ways of combining them.

A closed form is written once as an expression and read many ways: as a dense matrix, as a fast action on vectors
(no Kronecker product is ever formed), as a norm bound, as LaTeX, as an exact SymPy matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy
import torch

from derivations.arrays import Array, Scalar, is_exact, scale, to_sympy

ATOM, PRODUCT, KRONECKER, SUM = 3, 2, 1, 0  # how tightly a node binds in LaTeX


class Matrix(ABC):
    """An immutable matrix expression of shape ``(rows, columns)`` over tensors or exact numbers."""

    shape: tuple[int, int]
    precedence: int = ATOM

    @abstractmethod
    def apply(self, y: Array) -> Array:
        """Return ``self @ y`` for a two-dimensional array ``y`` of ``self.shape[1]`` rows."""

    @abstractmethod
    def transpose(self) -> Matrix:
        """Return the transposed expression."""

    @abstractmethod
    def norm_bound(self) -> float:
        """Return an upper bound on the spectral norm, exact where the structure makes it so."""

    @abstractmethod
    def latex(self) -> str:
        """Return the expression in LaTeX."""

    def children(self) -> Sequence[Matrix]:
        """Return the sub-expressions."""
        return ()

    def like(self) -> Array | None:
        """Return an array that tells this expression's arithmetic, or None if it is pure structure."""
        return next((found for child in self.children() if (found := child.like()) is not None), None)

    def dense(self, like: Array | None = None) -> Array:
        """Return the matrix written out, in the arithmetic of its leaves (or of ``like``; else float64)."""
        from derivations.arrays import eye

        context = self.like() if like is None else like
        return self.apply(eye(self.shape[1], torch.zeros(0, dtype=torch.float64) if context is None else context))

    def sympy(self) -> sympy.ImmutableDenseMatrix:
        """Return the matrix written out as an exact SymPy matrix (floating-point leaves become SymPy floats)."""
        return to_sympy(self.dense(np.zeros(0, dtype=object) if self.like() is None else None))

    @property
    def T(self) -> Matrix:
        return self.transpose()

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Matrix):
            return product(self, other)
        rows = other.shape[0]
        if rows != self.shape[1]:
            raise ValueError(f"matmul: a matrix of shape {self.shape} cannot act on an array of shape {tuple(other.shape)}")
        return self.apply(other.reshape(rows, 1)).reshape(-1) if other.ndim == 1 else self.apply(other)

    def __add__(self, other: Matrix) -> Matrix:
        return add(self, other)

    def __sub__(self, other: Matrix) -> Matrix:
        return add(self, -other)

    def __neg__(self) -> Matrix:
        return scaled(-1, self)

    def __mul__(self, c: Scalar) -> Matrix:
        return scaled(c, self)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape[0]}x{self.shape[1]}: {self.latex()})"

    def _repr_latex_(self) -> str:
        return f"$\\displaystyle {self.latex()}$"

    def bracketed(self, least: int) -> str:
        """Return the LaTeX, in brackets if the node binds less tightly than ``least``."""
        text = self.latex()
        return text if self.precedence >= least else rf"\left({text}\right)"


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
        return abs(float(self.c)) * self.matrix.norm_bound()

    def latex(self) -> str:
        body = self.matrix.bracketed(KRONECKER if self.c == -1 else PRODUCT)
        if self.c == -1:
            return "-" + body
        c = f"{self.c:.6g}" if isinstance(self.c, float) else sympy.latex(sympy.sympify(self.c))
        return rf"{c}\,{body}"


def product(*factors: Matrix) -> Matrix:
    """Return the product, flattened, with scalars pulled out, identities dropped and K K^T = I applied."""
    from derivations.matrix.leaves import Identity, Zero
    from derivations.matrix.permutation import Commutation

    for left, right in zip(factors, factors[1:], strict=False):
        if left.shape[1] != right.shape[0]:
            raise ValueError(f"product: shapes {left.shape} and {right.shape} do not conform: {left!r} @ {right!r}")
    shape = (factors[0].shape[0], factors[-1].shape[1])
    c: Scalar = 1
    flat: list[Matrix] = []
    for factor in factors:
        if isinstance(factor, Scaled):
            c, factor = c * factor.c, factor.matrix
        for part in factor.factors if isinstance(factor, Product) else (factor,):
            if isinstance(part, Zero):
                return Zero(*shape)
            if isinstance(part, Identity):
                continue
            last = flat[-1] if flat else None
            if isinstance(part, Commutation) and isinstance(last, Commutation) and (part.m, part.n) == (last.n, last.m):
                flat.pop()
            else:
                flat.append(part)
    if not flat:
        return scaled(c, Identity(shape[0]))
    return scaled(c, flat[0] if len(flat) == 1 else Product(flat))


def add(*terms: Matrix) -> Matrix:
    """Return the sum, flattened, with zero terms dropped."""
    from derivations.matrix.leaves import Zero

    for term in terms:
        if term.shape != terms[0].shape:
            raise ValueError(f"add: shapes {terms[0].shape} and {term.shape} differ: {terms[0]!r} + {term!r}")
    flat = [part for term in terms for part in (term.terms if isinstance(term, Sum) else (term,)) if not isinstance(part, Zero)]
    if not flat:
        return Zero(*terms[0].shape)
    return flat[0] if len(flat) == 1 else Sum(flat)


def scaled(c: Scalar, matrix: Matrix) -> Matrix:
    """Return ``c`` times the matrix, with nested scalars merged."""
    from derivations.matrix.leaves import Zero

    if isinstance(matrix, Scaled):
        c, matrix = c * matrix.c, matrix.matrix
    if isinstance(c, (int, float)) and c == 1 or isinstance(matrix, Zero):
        return matrix
    return Zero(*matrix.shape) if isinstance(c, (int, float)) and c == 0 else Scaled(c, matrix)


def to_float(x: Array) -> torch.Tensor:
    """Return an exact array as float64 (tensors as they are), for norms."""
    if not is_exact(x):
        return x
    return torch.tensor([[float(v) for v in row] for row in x.tolist()], dtype=torch.float64).reshape(x.shape)
