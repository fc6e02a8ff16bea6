"""One small vocabulary for the two kinds of numbers that a closed form is evaluated with.

An *array* is either a floating ``torch.Tensor`` or an object ``numpy.ndarray`` whose entries are exact
(``fractions.Fraction``, ``int`` or SymPy expressions). Tensors and object arrays already share ``+ - * / @``,
``.T``, ``.reshape`` and slicing, so this module only holds what they spell differently.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import sympy
import torch

Array: TypeAlias = Any
"""A ``torch.Tensor`` or an object ``numpy.ndarray``."""

Scalar: TypeAlias = Any
"""A Python number, ``Fraction`` or SymPy expression."""


def as_array(value: Any) -> Array:
    """Return ``value`` as an array: tensors as they are, SymPy matrices and nested lists of exact numbers as objects.

    >>> as_array(sympy.Matrix([[1, 2]])).dtype, as_array(np.ones(2)).dtype
    (dtype('O'), torch.float64)
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, sympy.MatrixBase):
        return np.array(value.tolist(), dtype=object).reshape(value.shape)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value)
    return np.array(value, dtype=object)


def is_exact(x: Array) -> bool:
    """Tell whether ``x`` holds exact numbers (an object array) rather than floating point (a tensor)."""
    return isinstance(x, np.ndarray)


def eye(n: int, like: Array) -> Array:
    """Return the n x n identity in the arithmetic of ``like``."""
    if is_exact(like):
        return np.array([[int(i == j) for j in range(n)] for i in range(n)], dtype=object).reshape(n, n)
    return torch.eye(n, dtype=like.dtype, device=like.device)


def full(shape: tuple[int, ...], value: int, like: Array) -> Array:
    """Return an array of one repeated integer in the arithmetic of ``like``."""
    if is_exact(like):
        return np.full(shape, value, dtype=object)
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def scale(c: Scalar, x: Array) -> Array:
    """Return ``c * x``; a ``Fraction`` or SymPy number becomes a float only where ``x`` is floating point."""
    if is_exact(x):
        return x * (Fraction(c) if isinstance(c, float) and c.is_integer() else c)
    return x * (c if isinstance(c, (int, float, torch.Tensor)) else float(c))


def sqrt(x: Array) -> Array:
    """Return the entrywise square root; on exact numbers it stays exact (a Fraction where the root is rational)."""
    return np.frompyfunc(_exact_sqrt, 1, 1)(x) if is_exact(x) else torch.sqrt(x)


def exp(x: Array) -> Array:
    """Return the entrywise exponential (symbolic on exact numbers)."""
    return np.frompyfunc(lambda v: sympy.exp(_to_sympy(v)), 1, 1)(x) if is_exact(x) else torch.exp(x)


def inverse_sqrt(n: int, like: Array) -> Scalar:
    """Return ``1 / sqrt(n)`` in the arithmetic of ``like``."""
    return 1 / _exact_sqrt(Fraction(n)) if is_exact(like) else 1.0 / math.sqrt(n)


def concatenate(parts: list[Array], axis: int) -> Array:
    """Join arrays of one kind along ``axis``."""
    return np.concatenate(parts, axis) if is_exact(parts[0]) else torch.cat(parts, axis)


def to_sympy(x: Array) -> sympy.ImmutableDenseMatrix:
    """Return a two-dimensional array as an immutable SymPy matrix."""
    rows = x.tolist()
    return sympy.ImmutableDenseMatrix(x.shape[0], x.shape[1], [_to_sympy(v) for row in rows for v in row])


def _to_sympy(v: Any) -> sympy.Expr:
    return sympy.Rational(v.numerator, v.denominator) if isinstance(v, Fraction) else sympy.sympify(v)


def _exact_sqrt(v: Any) -> Any:
    if isinstance(v, (int, Fraction)):
        v = Fraction(v)
        if v >= 0:
            p, q = math.isqrt(v.numerator), math.isqrt(v.denominator)
            if p * p == v.numerator and q * q == v.denominator:
                return Fraction(p, q)
    return sympy.sqrt(_to_sympy(v))
