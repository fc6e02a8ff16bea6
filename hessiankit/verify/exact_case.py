"""One exact check: closed forms at a drawn point, compared with the exact arrays that they must equal."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import sympy
import torch

from derivations.arrays import Array
from derivations.matrix import Matrix
from derivations.operation import Operation, Shape
from hessiankit.verify import jets
from hessiankit.verify.jets import SCALE, ExactNumber, FormalExponential, FormalFunction, Variables, eps_for
from hessiankit.verify.residues import P, Residue

EXACT = np.zeros(0, dtype=object)
"""Tells a structured matrix to write itself out in exact arithmetic."""


class ExactReference(ABC):
    """The value and the derivatives of an operation in vec_r order, without a closed form."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the variables."""

    @property
    @abstractmethod
    def value(self) -> Array:
        """The output (NaN where it is not rational)."""

    @abstractmethod
    def jacobian(self, name: str) -> Array:
        """Return d vec_r(output) / d vec_r(name)^T."""

    @abstractmethod
    def hessian(self, name_i: str, name_j: str) -> Array:
        """Return d vec_r(d output / d name_i) / d vec_r(name_j)^T, with rows ordered (out, i)."""


@dataclass(frozen=True)
class JetReference(ExactReference):
    """Derivatives read off an array of jets."""

    variables: Variables
    output: Array

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.variables.arrays)

    @property
    def value(self) -> Array:
        return jets.values(self.output)

    def jacobian(self, name: str) -> Array:
        return self.variables.jacobian(self.output, name)

    def hessian(self, name_i: str, name_j: str) -> Array:
        return self.variables.hessian(self.output, name_i, name_j)


@dataclass(frozen=True)
class ExactPoint:
    """The arguments of an operation, for its closed form and for the formula that the reference differentiates.

    Attributes:
        at: Name -> numbers, or symbols: where the closed form is evaluated.
        variables: Name -> jets over these numbers, or the same symbols.
        reference: The formula's output -> its derivatives.
    """

    at: dict[str, Array]
    variables: dict[str, Array]
    reference: Callable[[Array], ExactReference]


class RationalDraw:
    """A seeded source of small non-zero rationals, integers and halves, so that exact results stay short.

    >>> RationalDraw("a seed").array(2, 3).shape
    (2, 3)
    """

    scale: Any = SCALE
    """The factor of attention logits."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._random = random.Random(seed)

    def number(self) -> Fraction:
        """Return one of +-1/2, +-1, +-3/2, +-2, +-5/2, +-3."""
        return Fraction(self._random.choice((-1, 1)) * self._random.randint(1, 6), 2)

    def array(self, *shape: int) -> Array:
        """Return an object array of such numbers."""
        out = np.empty(math.prod(shape), dtype=object)
        out[:] = [self.number() for _ in out]
        return out.reshape(shape)

    def rows(self, count: int, d: int, accepted: Callable[[Array], bool]) -> Array:
        """Return ``count`` rows of ``d`` such numbers, each drawn until it is accepted."""
        found: list[Array] = []
        while len(found) < count:
            row = self.array(d)
            if accepted(row):
                found.append(row)
        return np.stack(found)

    def lift(self, at: dict[str, Array]) -> ExactPoint:
        """Return given arguments as a point."""
        variables = Variables(at)
        return ExactPoint(at, variables.arrays, lambda output: JetReference(variables, output))

    def point(self, **shapes: Shape) -> ExactPoint:
        """Return drawn arguments of these shapes as a point."""
        return self.lift({name: self.array(*shape) for name, shape in shapes.items()})

    def exponential(self) -> Any:
        """Return an exponential whose values are drawn."""
        return FormalExponential(self.seed)

    def attention_exponential(self) -> Any:
        """Return the exponential that belongs to ``attention_weights``."""
        return self.exponential()

    def function(self) -> FormalFunction:
        """Return a smooth function whose values and derivatives are drawn."""
        return FormalFunction(self.seed)

    def eps(self, mean_square: Any) -> Any:
        """Return an eps for which mean square + eps has a root."""
        return eps_for(mean_square)

    def closed(self, eps: Array) -> Array:
        """Return the chosen eps as the closed form takes them."""
        return eps

    def weights(self, logits: Array, exp: Any, mask: Array | None = None) -> Array | None:
        """Return the softmax of logits that a closed form takes; None where it takes the exponential itself."""
        return jets.softmax(logits, exp, mask)

    def attention_weights(self, at: Mapping[str, Array], exp: Any, mask: Array | None = None) -> Array:
        """Return the attention matrix that a closed form takes, at X, W_Q and W_K."""
        return jets.softmax(jets.attention_logits(at["X"], at["W_Q"], at["W_K"], self.scale), exp, mask)


class ResidueDraw(RationalDraw):
    """A seeded source of residues modulo p, each but 0 as likely as any other, each a variable of its own.

    >>> draw = ResidueDraw("a seed")
    >>> x = draw.number()
    >>> root = (draw.eps(x) + x).sqrt()
    >>> x == draw.number(), (root * root).degree, root * root - x == draw.eps(x)
    (False, 2, False)
    """

    def number(self) -> Any:
        """Return a residue that is not 0, of degree 1."""
        return Residue(self._random.randrange(1, P), 1)

    def exponential(self) -> FormalExponential:
        return FormalExponential(self.seed, self.number)

    def function(self) -> FormalFunction:
        return FormalFunction(self.seed, self.number)

    def eps(self, mean_square: Any) -> Any:
        root = self.number()
        return root * root - mean_square


@dataclass(frozen=True)
class ExactOutcome:
    """Result of a comparison.

    Attributes:
        mismatch: How the closed form differs, or None if every entry is equal.
        entries: How many were compared.
        degree: A bound on the degree of the numerators of the differences, for residues only; else 0.
    """

    mismatch: str | None
    entries: int
    degree: int = 0


@dataclass(frozen=True)
class ExactComparison:
    """A closed form and the exact array that it must equal."""

    label: str
    closed: Matrix | Array
    expected: Array

    def outcome(self, is_zero: Callable[[Any], bool]) -> ExactOutcome:
        """Compare every entry; where a difference is not literally 0, ``is_zero`` decides whether it is identically."""
        closed = self.closed.dense(EXACT) if isinstance(self.closed, Matrix) else self.closed
        reason = self._not_comparable(closed)
        if reason is not None:
            return ExactOutcome(reason, self.expected.size)
        pairs = list(zip(closed.reshape(-1), self.expected.reshape(-1), strict=True))
        wrong = [(c, e) for c, e in pairs if not (c == e or is_zero(c - e))]
        degree = max((d.degree for d in (c - e for c, e in pairs) if isinstance(d, Residue)), default=0)
        if not wrong:
            return ExactOutcome(None, len(pairs), degree)
        first = f"first: {wrong[0][0]}, expected {wrong[0][1]}"
        return ExactOutcome(f"{self.label} differs in {len(wrong)} of {len(pairs)} entries ({first})", len(pairs), degree)

    def _not_comparable(self, closed: Any) -> str | None:
        """Say why an array cannot be compared with the expected one, or return None."""
        if isinstance(closed, torch.Tensor):
            return f"{self.label} is floating point ({closed.dtype}), expected exact numbers"
        if closed.shape != self.expected.shape:
            return f"{self.label} has shape {closed.shape}, expected {self.expected.shape}"
        exact = (int, Fraction, sympy.Expr, ExactNumber)
        inexact = [c for c in closed.reshape(-1) if not isinstance(c, exact) or isinstance(c, sympy.Float)]
        if inexact:
            return f"{self.label} holds {inexact[0]!r} of type {type(inexact[0]).__name__}, expected exact numbers"
        return None


def against(operation: Operation, reference: ExactReference, *, value: bool = True) -> Iterator[ExactComparison]:
    """Compare every Jacobian and every second-derivative block of an operation with a reference.

    Args:
        operation: a closed form at an exact point.
        reference: the same operation without a closed form, over the same names.
        value: False leaves the value out, where it is a logarithm and has no rational number.

    Raises:
        ValueError: if the operation's arguments are not the reference's variables.
    """
    names = reference.names
    if set(operation.arguments) != set(names):
        raise ValueError(f"{type(operation).__name__} has the arguments {list(operation.arguments)}, expected {list(names)}")
    if value:
        yield ExactComparison("value", operation.value.reshape(-1), reference.value.reshape(-1))
    for name in names:
        yield ExactComparison(f"jacobian({name!r})", operation.jacobian(name), reference.jacobian(name))
    for i in names:
        for j in names:
            yield ExactComparison(f"hessian({i!r}, {j!r})", operation.hessian(i, j), reference.hessian(i, j))


@dataclass(frozen=True)
class ExactCase:
    """One row of the exact check: comparisons to be built at a drawn point.

    ``branches`` is the number of rational functions that a formula with kinks consists of.
    """

    chapter: str
    name: str
    size: str
    build: Callable[[RationalDraw], Iterator[ExactComparison]]
    branches: int = 1
