"""How the derivatives of a stage are called, and when one is long enough to be given a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from derivations.matrix import Matrix, Named, Sum, Zero


@dataclass(frozen=True)
class Names:
    r"""How a stage's derivatives are called.

    Args:
        slope: of its first derivative in a stage that it reads, from that stage's symbol.
        curvature: of its second derivative in two arguments.
        first: of its derivative in a parameter, from the parameter's index.
        second: of its second derivative in two parameters, from their indices.
    """

    slope: Callable[[str], str]
    curvature: Callable[[str, str], str]
    first: Callable[[str], str]
    second: Callable[[str, str], str]


def names_after(symbol: str) -> Names:
    r"""Return the plain names: J_{Z S} and H_{Z,S S} for the operation, Z_Q and Z_{Q,V} for the whole.

    >>> names = names_after("Z")
    >>> names.slope("S"), names.first("Q"), names.second("Q", "V")
    ('J_{Z S}', 'Z_{Q}', 'Z_{Q,V}')
    """
    return Names(
        lambda a: f"J_{{{symbol} {a}}}",
        lambda a, b: f"H_{{{symbol},{a} {b}}}",
        lambda i: f"{symbol}_{{{i}}}",
        lambda i, j: f"{symbol}_{{{i},{j}}}",
    )


@dataclass(frozen=True)
class Term:
    """A summand of a derivative with its description in words (LaTeX between dollars)."""

    matrix: Matrix
    meaning: str


def named(matrix: Matrix, symbol: str, reason: str) -> Matrix:
    """Return the expression under a name, or as it is where it is short or has one."""
    return matrix if isinstance(matrix, Zero) or _letters_in(matrix) < 3 else Named(symbol, matrix, reason)


def _letters_in(matrix: Matrix) -> int:
    """Count the factors that a reader sees."""
    if isinstance(matrix, Named) or not matrix.children():
        return 1
    return sum(_letters_in(child) for child in matrix.children()) + isinstance(matrix, Sum)
