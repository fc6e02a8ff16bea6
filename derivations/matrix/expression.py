"""Structured matrix expressions: what every node can do, and the ways of combining them.

A closed form is written once as an expression and read many ways: as a dense matrix, as a fast action on vectors
(no Kronecker product is ever formed), as a norm bound, as LaTeX, as an exact SymPy matrix.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from derivations.arrays import Array, Scalar, as_array, as_float, eye, scale, to_sympy
from derivations.arrays import to_float as to_float
from derivations.matrix.letters import named_scalar

if TYPE_CHECKING:
    import sympy

ATOM, PRODUCT, KRONECKER, SUM = 3, 2, 1, 0  # how tightly a node binds in LaTeX


class Matrix(ABC):
    """An immutable matrix expression of shape ``(rows, columns)`` over tensors or exact numbers."""

    shape: tuple[int, int]
    precedence: int = ATOM
    __array_ufunc__ = None  # NumPy scalars and arrays leave * and @ to this class

    @abstractmethod
    def apply(self, y: Array) -> Array:
        """Return ``self @ y`` for a two-dimensional array ``y`` of ``self.shape[1]`` rows."""

    @abstractmethod
    def transpose(self) -> Matrix:
        """Return the transposed expression (never conjugated)."""

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
        """Return the matrix written out, in the arithmetic of its leaves (else of ``like``; else float64)."""
        own = self.like()
        context = torch.zeros(0, dtype=torch.float64) if own is None and like is None else like if own is None else own
        rows, columns = self.shape
        if rows >= columns:
            return self.apply(eye(columns, context))
        written = self.T.apply(eye(rows, context)).T  # an action costs by the column, so act from the shorter side
        return written.contiguous() if isinstance(written, torch.Tensor) else written

    def sympy(self) -> sympy.ImmutableDenseMatrix:
        """Return the matrix written out as an exact SymPy matrix (floating-point leaves become SymPy floats)."""
        return to_sympy(self.dense(np.zeros(0, dtype=object)))

    @property
    def T(self) -> Matrix:
        """The transposed expression."""
        return self.transpose()

    @overload
    def __matmul__(self, other: Matrix) -> Matrix: ...

    @overload
    def __matmul__(self, other: Array) -> Array: ...

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Matrix):
            return product(self, other)
        y = as_array(other)
        if y.ndim not in (1, 2) or y.shape[0] != self.shape[1]:
            raise ValueError(
                f"matmul: {self!r} acts on an array of {self.shape[1]} entries or of {self.shape[1]} rows, "
                f"got shape {tuple(y.shape)}"
            )
        return self.apply(y.reshape(-1, 1)).reshape(-1) if y.ndim == 1 else self.apply(y)

    def __rmatmul__(self, other: Array) -> Array:
        return (self.T @ as_array(other).T).T

    def __add__(self, other: Matrix) -> Matrix:
        return add(self, other) if isinstance(other, Matrix) else NotImplemented

    def __sub__(self, other: Matrix) -> Matrix:
        return add(self, -other) if isinstance(other, Matrix) else NotImplemented

    def __neg__(self) -> Matrix:
        return scaled(-1, self)

    def __mul__(self, c: Scalar) -> Matrix:
        return NotImplemented if isinstance(c, Matrix) else scaled(c, self)

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
        return as_float(abs(self.c)) * self.matrix.norm_bound()

    def latex(self) -> str:
        if self.c == -1:
            return "-" + self.matrix.bracketed(KRONECKER)
        return rf"{scalar_latex(self.c)}\,{self.matrix.bracketed(PRODUCT)}"


def product(*factors: Matrix) -> Matrix:
    """Return the product, flattened, with scalars pulled out and simplified as a person would.

    Identities are dropped, K_{n,m} K_{m,n} = I and E_n^T E_n = I are applied, and neighbouring Kronecker products are
    joined where their factors conform: (A (x) B) (C (x) D) = A C (x) B D.

    Raises:
        ValueError: if neighbouring shapes do not conform.
    """
    from derivations.matrix.leaves import Zero

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
    from derivations.matrix.kronecker import mixed_product
    from derivations.matrix.permutation import cancels, is_identity

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
    from derivations.matrix.leaves import Identity

    return Product(flat) if len(flat) > 1 else flat[0] if flat else Identity(n)


def add(*terms: Matrix) -> Matrix:
    """Return the sum, flattened, with zero terms dropped.

    Raises:
        ValueError: if the shapes differ.
    """
    from derivations.matrix.leaves import Zero

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
    from derivations.matrix.leaves import Zero

    if isinstance(matrix, Scaled):
        c, matrix = c * matrix.c, matrix.matrix
    if isinstance(c, torch.Tensor):  # its value may change or carry a gradient: no simplification
        return Scaled(c, matrix)
    if c == 1 or isinstance(matrix, Zero):
        return matrix
    return Zero(*matrix.shape) if c == 0 else Scaled(c, matrix)


def scalar_latex(c: Scalar) -> str:
    """Return a factor in LaTeX, by the names of sizes where these are in force."""
    if isinstance(c, torch.Tensor):
        c = c.item()
    if not isinstance(c, float) and (name := named_scalar(c)) is not None:
        return name
    if isinstance(c, float):
        mantissa, _, exponent = f"{c:.6g}".partition("e")
        return rf"{mantissa}\cdot 10^{{{int(exponent)}}}" if exponent else mantissa
    import sympy

    c = sympy.sympify(c)
    text = str(sympy.latex(c))
    if c.is_Add:
        return rf"\left({text}\right)"
    return "-" + text[2:] if text.startswith("- ") else text
