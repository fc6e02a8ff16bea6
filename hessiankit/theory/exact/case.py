"""One exact check: closed forms at a drawn point, compared with the exact arrays that they must equal."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from derivations.arrays import Array
from derivations.matrix import Matrix
from derivations.operation import Operation, Shape
from hessiankit.theory.exact.jets import FormalFunction, Variables, values
from hessiankit.theory.exact.residues import P, Residue

EXACT = np.zeros(0, dtype=object)
"""Tells a structured matrix to write itself out in exact arithmetic."""


class Draw:
    """A seeded source of residues modulo p, all nonzero residues equally likely, each a separate variable.

    ``smooth`` is a smooth function, whose values and first two derivatives are drawn. Of ``exp``, the exponential, u = exp(t) is
    drawn once for each t, with u' = u'' = u; of ``log``, the logarithm, the value alone.

    Why this is legitimate for exp: a closed form and the derivative that it claims to be are both rational functions of the
    inputs x and of the weights u_k = exp(t_k(x)), obtained from u' = u alone. If they are equal with the u_k as free
    variables then they are equal at u_k = exp(t_k). Conversely, exponentials of functions t_k(x) that are linearly
    independent over Q (up to constants) are algebraically independent over the rational functions of x (Ax), so that
    nothing true is rejected.

    >>> draw = Draw("a seed")
    >>> x = draw.number()
    >>> root = (draw.eps(x) + x).sqrt()
    >>> x == draw.number(), (root * root).degree, root * root - x == draw.eps(x)
    (False, 2, False)
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self.exp = FormalFunction(lambda x: (self.number(),) * 3)
        self.log = FormalFunction(lambda x: (self.number(), 1 / x, -1 / x**2))
        self.smooth = FormalFunction(lambda x: (self.number(), self.number(), self.number()))

    def number(self) -> Residue:
        """Return a residue that is not 0, of degree 1."""
        return Residue(self._random.randrange(1, P), 1)

    def array(self, *shape: int) -> Array:
        """Return an object array of such numbers."""
        out = np.empty(math.prod(shape), dtype=object)
        out[:] = [self.number() for _ in out]
        return out.reshape(shape)

    def point(self, **shapes: Shape) -> Variables:
        """Return drawn arguments of these shapes."""
        return Variables({name: self.array(*shape) for name, shape in shapes.items()})

    def eps(self, mean_square: Any) -> Any:
        """Return an eps for which mean square + eps has a root, which is drawn."""
        root = self.number()
        return root * root - mean_square


@dataclass(frozen=True)
class Comparison:
    """A closed form and the exact array that it must equal."""

    label: str
    closed: Matrix | Array
    expected: Array

    def mismatch(self) -> tuple[str | None, int]:
        """Compare every entry with ``==``; return a description of the difference, if any, and a bound on its degree."""
        array = self.closed.dense(EXACT) if isinstance(self.closed, Matrix) else self.closed
        reason = self._not_comparable(array)
        if reason is not None:
            return reason, 0
        pairs = list(zip(array.reshape(-1), self.expected.reshape(-1), strict=True))
        unequal = [(c, e) for c, e in pairs if c != e]
        degree = max((d.degree for d in (c - e for c, e in pairs) if isinstance(d, Residue)), default=0)
        if not unequal:
            return None, degree
        first = f"first: {unequal[0][0]}, expected {unequal[0][1]}"
        return f"{self.label} differs in {len(unequal)} of {len(pairs)} entries ({first})", degree

    def _not_comparable(self, array: Any) -> str | None:
        """Return why an array cannot be compared with the expected one, or None."""
        if isinstance(array, torch.Tensor):
            return f"{self.label} is floating point ({array.dtype}), expected exact numbers"
        if array.shape != self.expected.shape:
            return f"{self.label} has shape {array.shape}, expected {self.expected.shape}"
        inexact = [c for c in array.reshape(-1) if not isinstance(c, (int, Fraction, Residue))]
        if inexact:
            return f"{self.label} holds {inexact[0]!r} of type {type(inexact[0]).__name__}, expected exact numbers"
        return None


def against(operation: Operation, point: Variables, output: Array, *, value: bool = True) -> Iterator[Comparison]:
    """Compare every derivative of an operation at a point with those of ``output``, the same operation on the point's jets.

    Without ``value`` that is left out, where it is a logarithm and has no exact number.
    """
    names = tuple(point.at)
    if set(operation.arguments) != set(names):
        raise ValueError(f"{type(operation).__name__} has the arguments {list(operation.arguments)}, expected {list(names)}")
    if value:
        yield Comparison("value", operation.value.reshape(-1), values(output).reshape(-1))
    for name in names:
        yield Comparison(f"jacobian({name!r})", operation.jacobian(name), point.jacobian(output, name))
    for i in names:
        for j in names:
            yield Comparison(f"hessian({i!r}, {j!r})", operation.hessian(i, j), point.hessian(output, i, j))


@dataclass(frozen=True)
class ExactCase:
    """One row of the exact check: comparisons to be built at a drawn point."""

    chapter: str
    name: str
    size: str
    build: Callable[[Draw], Iterator[Comparison]]
    branches: int = 1  # of how many rational functions a formula with kinks consists
