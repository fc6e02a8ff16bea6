"""One small vocabulary for the two kinds of numbers that a closed form is evaluated with.

An *array* is either a ``torch.Tensor`` of floating point or an object ``numpy.ndarray`` whose entries are exact
(``fractions.Fraction``, ``int`` or SymPy expressions). Tensors and object arrays already share ``+ - * / @``,
``.T``, ``.reshape`` and slicing, so this module only holds what they spell differently, and the checks that keep
the two kinds, and two precisions, from being mixed by accident.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    import sympy  # elsewhere inside the functions that need it: it takes longer to import than a small Hessian to compute

Array: TypeAlias = Any
"""A ``torch.Tensor`` or an object ``numpy.ndarray``."""

Scalar: TypeAlias = Any
"""A Python number, ``Fraction`` or SymPy expression."""


def as_array(value: Any) -> Array:
    """Return ``value`` as an array: tensors as they are, SymPy matrices and nested lists of exact numbers as objects.

    Lists of Python floats become float64 tensors.

    Raises:
        TypeError: if floats are mixed with exact numbers.

    >>> import sympy
    >>> as_array(sympy.Matrix([[1, 2]])).dtype, as_array(np.ones(2)).dtype, as_array([0.5, 1]).dtype
    (dtype('O'), torch.float64, torch.float64)
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    import sympy

    if isinstance(value, sympy.MatrixBase):
        return np.array(value.tolist(), dtype=object).reshape(value.shape)
    entries = np.array(value, dtype=object)
    if not any(isinstance(v, (float, complex)) for v in entries.flat):
        return entries
    if isinstance(value, np.ndarray) or any(isinstance(v, (Fraction, sympy.Basic)) for v in entries.flat):
        raise TypeError(
            f"as_array: floats stand among exact numbers in an array of shape {entries.shape}. Write them as Fractions, "
            "or pass a torch.Tensor to compute in floating point."
        )
    return torch.tensor(
        entries.tolist(), dtype=torch.complex128 if np.iscomplexobj(entries.tolist()) else torch.float64, device="cpu"
    )


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
    """Return ``c * x``; a ``Fraction`` or SymPy number becomes a float only where ``x`` is floating point.

    Raises:
        TypeError: if a float that is not an integer would spoil exact numbers, or a symbol meets floating point.

    >>> scale(Fraction(1, 2), torch.ones(2)), scale(Fraction(1, 2), np.array([1], dtype=object))
    (tensor([0.5000, 0.5000]), array([Fraction(1, 2)], dtype=object))
    """
    if is_exact(x):
        if isinstance(c, (float, complex, torch.Tensor)):
            if isinstance(c, float) and c.is_integer():
                return x * int(c)
            raise TypeError(f"scale: the scalar {c!r} is floating point and the array is exact. Write it as a Fraction.")
        return x * c
    if not isinstance(c, (int, float, complex, torch.Tensor)):
        c = as_float(c)
    if isinstance(c, float) and not (x.is_floating_point() or x.is_complex()):
        x = x.double()  # torch would take its default precision
    return x * c


def as_float(v: Any) -> float:
    """Return an exact number as a float.

    Raises:
        TypeError: if it is symbolic.
    """
    try:
        return float(v)
    except TypeError:
        raise TypeError(f"as_float: {v} has no numerical value. Substitute numbers for its symbols first.") from None


def common(a: Array, b: Array) -> tuple[Array, Array]:
    """Return two arrays in one arithmetic: integers join floats and reals join complex numbers of their precision.

    Raises:
        TypeError: if one is exact and the other is not, or their precisions differ.

    >>> [x.dtype for x in common(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.complex128))]
    [torch.complex128, torch.complex128]
    """
    if is_exact(a) != is_exact(b):
        raise TypeError(
            "common: exact numbers and floating point do not mix. Make both torch tensors, or both object arrays of "
            f"Fraction, int or SymPy entries (got {type(a).__name__} and {type(b).__name__})."
        )
    if is_exact(a) or a.dtype == b.dtype:
        return a, b
    precisions = {x.dtype.to_real() for x in (a, b) if x.is_floating_point() or x.is_complex()}
    if len(precisions) > 1:
        raise TypeError(f"common: {a.dtype} and {b.dtype} differ in precision. Convert one of them, for instance with .to().")
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def matmul(a: Array, b: Array) -> Array:
    """Return ``a @ b`` for two matrices of one arithmetic (see ``common``); exact ones are multiplied without their zeros."""
    a, b = common(a, b)
    if not is_exact(a):
        return a @ b
    rows = [[(j, v) for j, v in enumerate(row) if v] for row in b.tolist()]
    out = full((int(a.shape[0]), int(b.shape[1])), 0, a)
    for i, row in enumerate(a.tolist()):
        entries: dict[int, Any] = {}
        for u, others in zip(row, rows, strict=True):
            if u:
                for j, v in others:
                    entries[j] = entries[j] + u * v if j in entries else u * v
        for j, v in entries.items():
            out[i, j] = v
    return out


def lift_diagonal(y: Array) -> Array:
    """Return the n^2 x c array whose rows 0, n + 1, 2 (n + 1), ... are the n rows of ``y``, and whose others are zero.

    >>> lift_diagonal(torch.tensor([[3.0], [4.0]])).reshape(-1).tolist()
    [3.0, 0.0, 0.0, 4.0]
    """
    n, columns = int(y.shape[0]), int(y.shape[1])
    if is_exact(y):
        out = full((n * n, columns), 0, y)
        out[:: n + 1] = y
        return out
    return torch.diag_embed(y.T).reshape(columns, n * n).T


def reciprocal(x: Array) -> Array:
    """Return the entrywise reciprocal; on exact numbers it stays exact, where ``1 / x`` would turn an int into a float.

    >>> reciprocal(np.array([2, Fraction(1, 3)], dtype=object))
    array([Fraction(1, 2), Fraction(3, 1)], dtype=object)
    """
    return Fraction(1) / x if is_exact(x) else 1 / x


def sqrt(x: Array) -> Array:
    """Return the entrywise square root; on exact numbers it stays exact (a Fraction where the root is rational)."""
    return np.frompyfunc(_exact_sqrt, 1, 1)(x) if is_exact(x) else torch.sqrt(x)


def exp(x: Array) -> Array:
    """Return the entrywise exponential (symbolic on exact numbers)."""
    return symbolic("exp", x) if is_exact(x) else torch.exp(x)


def symbolic(name: str, x: Array) -> Array:
    """Return the function of SymPy of this name, of each entry of an exact array.

    >>> symbolic("exp", np.array([Fraction(1, 2)], dtype=object))
    array([exp(1/2)], dtype=object)
    """
    import sympy

    return np.frompyfunc(lambda v: getattr(sympy, name)(_to_sympy(v)), 1, 1)(x)


def inverse_sqrt(n: int, like: Array) -> Scalar:
    """Return ``1 / sqrt(n)`` in the arithmetic of ``like``."""
    return 1 / _exact_sqrt(Fraction(n)) if is_exact(like) else 1.0 / math.sqrt(n)


def concatenate(parts: list[Array], axis: int) -> Array:
    """Join arrays of one kind along ``axis``."""
    return np.concatenate(parts, axis) if is_exact(parts[0]) else torch.cat(parts, axis)


def to_sympy(x: Array) -> sympy.ImmutableDenseMatrix:
    """Return a two-dimensional array as an immutable SymPy matrix."""
    import sympy

    rows = x.tolist()
    return sympy.ImmutableDenseMatrix(x.shape[0], x.shape[1], [_to_sympy(v) for row in rows for v in row])


def to_float(x: Array) -> torch.Tensor:
    """Return an array as a tensor that torch can take norms of: exact numbers, integers and half precision as float64.

    Raises:
        TypeError: if an entry is symbolic.
    """
    if is_exact(x):
        return torch.tensor([as_float(v) for v in x.reshape(-1).tolist()], dtype=torch.float64, device="cpu").reshape(x.shape)
    kept = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    value: torch.Tensor = x.detach()
    return value if value.dtype in kept else value.double()


def _to_sympy(v: Any) -> sympy.Expr:
    import sympy

    return sympy.Rational(v.numerator, v.denominator) if isinstance(v, Fraction) else sympy.sympify(v)


def _exact_sqrt(v: Any) -> Any:
    if isinstance(v, (int, Fraction)):
        v = Fraction(v)
        if v >= 0:
            p, q = math.isqrt(v.numerator), math.isqrt(v.denominator)
            if p * p == v.numerator and q * q == v.denominator:
                return Fraction(p, q)
    import sympy

    if not isinstance(v, sympy.Basic) and hasattr(v, "sqrt"):  # a number of another arithmetic
        return v.sqrt()
    return sympy.sqrt(_to_sympy(v))
