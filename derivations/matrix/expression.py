"""Structured matrix expressions: the interface of a node, and the ways of combining nodes.

A closed form is written once as an expression and read many ways: as a dense matrix, as a fast action on vectors
(no Kronecker product is ever formed), as a norm bound, as LaTeX, as an exact SymPy matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import torch

from derivations.arrays import Array, Scalar, as_array, eye, to_sympy
from derivations.arrays import to_float as to_float
from derivations.matrix.letters import named_scalar

if TYPE_CHECKING:
    import sympy

ATOM, PRODUCT, KRONECKER, SUM = 3, 2, 1, 0  # how tightly a node binds in LaTeX


class Matrix(ABC):
    """An immutable matrix expression of shape ``(rows, columns)`` over tensors or exact numbers."""

    shape: tuple[int, int]
    precedence: int = ATOM
    combine: ClassVar[dict[str, Callable[..., Matrix]]] = {}  # product, add and scaled, from derivations.matrix.algebra
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
        return next((own for child in self.children() if (own := child.like()) is not None), None)

    def dense(self, like: Array | None = None) -> Array:
        """Return the matrix written out, in the arithmetic of its leaves (else of ``like``; else float64)."""
        own = self.like()
        context = (
            torch.zeros(0, dtype=torch.float64, device="cpu") if own is None and like is None else like if own is None else own
        )
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
            return self.combine["product"](self, other)
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
        return self.combine["add"](self, other) if isinstance(other, Matrix) else NotImplemented

    def __sub__(self, other: Matrix) -> Matrix:
        return self.combine["add"](self, -other) if isinstance(other, Matrix) else NotImplemented

    def __neg__(self) -> Matrix:
        return self.combine["scaled"](-1, self)

    def __mul__(self, c: Scalar) -> Matrix:
        return NotImplemented if isinstance(c, Matrix) else self.combine["scaled"](c, self)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape[0]}x{self.shape[1]}: {self.latex()})"

    def _repr_latex_(self) -> str:
        return f"$\\displaystyle {self.latex()}$"

    def bracketed(self, least: int) -> str:
        """Return the LaTeX, in brackets if the node binds less tightly than ``least``."""
        text = self.latex()
        return text if self.precedence >= least else rf"\left({text}\right)"


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
