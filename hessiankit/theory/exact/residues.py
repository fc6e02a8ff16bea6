"""Arithmetic modulo the prime p = 2^61 - 1 with bounds on degrees, for formulas at random points of a large set.

Two rational functions that differ agree at a random point with a probability of at most D / |S|, where D bounds the degree of
the numerator of their difference and each variable is drawn from |S| numbers (Schwartz and Zippel); here |S| is (p - 1) / 2,
about 10^18. A ``Residue`` therefore carries, beside its value, a bound on the degree of its numerator, and its denominator as a
product of powers of atoms (what was divided by); a sum takes the least common denominator. The rules are those of polynomials,
so the bound holds for whatever formula is evaluated.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any, TypeAlias

import sympy

P = 2**61 - 1
"""A prime with p = 3 mod 4, so that the power (p + 1)/4 of a square is a root of it."""
VALUES = (P - 1) // 2
"""Number of values that a drawn variable takes at least: a root is that one of +-s which is a square itself."""

Atom: TypeAlias = "tuple[int, int]"
"""A divisor: its value and its degree."""
Powers: TypeAlias = "frozenset[tuple[Atom, int]]"
"""A denominator: divisors with their powers."""
ONE: Powers = frozenset()


class Arithmetic:
    """Differences and quotients of numbers that have sums, products, negatives and a ``reciprocal()``."""

    __slots__ = ()

    def __sub__(self: Any, other: Any) -> Any:
        return self + -other

    def __rsub__(self: Any, other: Any) -> Any:
        return -self + other

    def __truediv__(self: Any, other: Any) -> Any:
        return self * (1 / Fraction(other) if isinstance(other, (int, float, Fraction)) else other.reciprocal())

    def __rtruediv__(self: Any, other: Any) -> Any:
        return self.reciprocal() * other


class Residue(Arithmetic):
    """A number modulo p, with ``degree`` of its numerator and of its denominator, ``below``.

    >>> x, y = Residue(3, 1), Residue(4, 1)
    >>> f = x / y + 1 / y  # (x + 1) / y
    >>> f == 1, f.degree, (f + x).degree
    (True, 1, 2)
    """

    __slots__ = ("below", "degree", "value")

    def __init__(self, value: int, degree: int = 0, below: Powers = ONE) -> None:
        self.value, self.degree, self.below = value, degree, below

    def __add__(self, other: Any) -> Any:
        if type(other) is not Residue:
            if not other:
                return self
            other = _residue(other)
            if other is None:
                return NotImplemented
        value = (self.value + other.value) % P
        if self.below is other.below:
            return Residue(value, max(self.degree, other.degree), self.below)
        denominator, left, right = _common(self.below, other.below)
        return Residue(value, max(self.degree + left, other.degree + right), denominator)

    def __mul__(self, other: Any) -> Any:
        if type(other) is not Residue:
            if type(other) is int and other in (0, 1):
                return self if other else 0
            other = _residue(other)
            if other is None:
                return NotImplemented
        denominator = _product(self.below, other.below) if self.below and other.below else self.below or other.below
        return Residue(self.value * other.value % P, self.degree + other.degree, denominator)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Residue:
        return Residue(-self.value % P, self.degree, self.below)

    def __pow__(self, n: int) -> Any:
        result: Any = 1
        for _ in range(n):
            result = self * result
        return result

    def reciprocal(self) -> Residue:
        """Return 1 / self, whose denominator is the numerator of self; a constant has none."""
        denominator = _atom(self.value, self.degree) if self.degree else ONE
        return Residue(pow(self.value, -1, P), _degree(self.below), denominator)

    def sqrt(self) -> Residue:
        """Return a square root as a new variable; an eps under the root is chosen so that there is one.

        Raises:
            ValueError: if the residue is not a square.
        """
        if not self.is_square():
            raise ValueError(f"sqrt: {self.value} is not a square modulo p; choose eps so that it is")
        return Residue(pow(self.value, (P + 1) // 4, P), 1)

    def is_square(self) -> bool:
        """Tell whether the residue has a square root modulo p (Euler's criterion); 0 has one."""
        return pow(self.value, (P - 1) // 2, P) in (0, 1)

    def __eq__(self, other: object) -> bool:
        residue = other if isinstance(other, Residue) else _residue(other)
        return residue is not None and self.value == residue.value

    def __hash__(self) -> int:
        return self.value

    def __gt__(self, other: int) -> bool:
        """Tell whether the residue lies in the lower half: a sign for kinks, where either side may be chosen."""
        return 0 < (self - other).value <= VALUES

    def __le__(self, other: int) -> bool:
        """Tell whether the two are equal: a residue is not known to be below another number."""
        return self == other

    def __bool__(self) -> bool:
        return self.value != 0

    def _sympy_(self) -> sympy.Symbol:
        """Return a symbol, for the value of a logarithm, which no residue is."""
        return sympy.Symbol(f"r_{self.value}")

    def __repr__(self) -> str:
        return f"{self.value} mod p"


@cache
def _constant(number: int | Fraction) -> Residue:
    return Residue(number.numerator * pow(number.denominator, -1, P) % P)


def _residue(number: Any) -> Residue | None:
    return _constant(number) if isinstance(number, (int, Fraction)) else None


@cache
def _atom(value: int, degree: int) -> Powers:
    return frozenset({((value, degree), 1)})


@cache
def _common(a: Powers, b: Powers) -> tuple[Powers, int, int]:
    """Return the least common denominator and the degrees that the two numerators are multiplied with."""
    left, right = dict(a), dict(b)
    union = frozenset({atom: max(left.get(atom, 0), right.get(atom, 0)) for atom in left | right}.items())
    return union, _degree(union) - _degree(a), _degree(union) - _degree(b)


@cache
def _product(a: Powers, b: Powers) -> Powers:
    left, right = dict(a), dict(b)
    return frozenset({atom: left.get(atom, 0) + right.get(atom, 0) for atom in left | right}.items())


def _degree(powers: Powers) -> int:
    return sum(power * degree for (_, degree), power in powers)
