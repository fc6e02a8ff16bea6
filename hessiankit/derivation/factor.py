r"""The number of a placement, 1/sqrt(l) or DeepNet's alpha, as a letter with a value: what ``b.factor`` is in a derivation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy

from derivations.arrays import Array, is_exact, scale
from derivations.matrix import Identity, Matrix, Zero, scaled
from derivations.operation import Shape, expect_names, shape_of, size
from hessiankit.blocks import TransformerBlock


class Factor(float):
    """A number that formulas print as a letter."""

    letter: Any

    def __new__(cls, value: float, letter: Any) -> Factor:
        """Return the number ``value``, printed as the SymPy expression ``letter``."""
        made = super().__new__(cls, value)
        made.letter = letter
        return made


@dataclass(frozen=True)
class Spelling:
    r"""How a block's factor is written.

    Args:
        letter: SymPy expression, alpha or 1/sqrt(ell).
        known: LaTeX of its letter and of the letter's value.
    """

    letter: sympy.Expr
    known: tuple[str, str]


def spelling(block: TransformerBlock) -> Spelling | None:
    r"""Return how a block's factor is written, or None if its equation has none.

    >>> spelling(TransformerBlock(4, 5, placement="lns", layer=4)).known
    ('\\ell', '4')
    >>> spelling(TransformerBlock(4, 5, placement="deepnorm", n_layers=8)).known
    ('\\alpha', '(2N)^{1/4} = 2')
    """
    value, own = block.factor, block.own_placement
    if value is None:
        return None
    if own.name.startswith("lns") and math.isclose(value, 1 / math.sqrt(block.layer), rel_tol=1e-12):
        ell = sympy.Symbol(r"\ell", positive=True)
        return Spelling(1 / sympy.sqrt(ell), (str(ell), str(block.layer)))
    if own.name == "deepnorm":
        usual = math.isclose(value, (2 * block.n_layers) ** 0.25, rel_tol=1e-12)
        return Spelling(sympy.Symbol(r"\alpha", positive=True), (r"\alpha", ("(2N)^{1/4} = " if usual else "") + f"{value:.6g}"))
    return Spelling(sympy.Symbol("c", real=True), ("c", f"{value:.6g}"))


@dataclass(frozen=True, eq=False)
class FactorAt:
    """N = c X for a constant number c at a point.

    Args:
        X: an array.
        c: the number; a ``Factor`` is printed as its letter, and stands for it where X is exact.

    >>> import torch
    >>> FactorAt(torch.ones(1, 2), Factor(0.5, sympy.Symbol("c"))).jacobian("X")
    Scaled(2x2: c\\,I_{2})
    """

    X: Array
    c: float

    @property
    def arguments(self) -> dict[str, Shape]:
        """X."""
        return {"X": shape_of(self.X)}

    @property
    def value(self) -> Array:
        """N."""
        return scale(getattr(self.c, "letter", Fraction(self.c)) if is_exact(self.X) else float(self.c), self.X)

    def jacobian(self, name: str) -> Matrix:
        """Return c I.

        Raises:
            ValueError: if the name is not "X".
        """
        expect_names(self, "jacobian", name)
        plain = Fraction(self.c) if is_exact(self.X) else float(self.c)
        return scaled(getattr(self.c, "letter", plain), Identity(size(shape_of(self.X))))

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        """Return zero.

        Raises:
            ValueError: if a name is not "X".
        """
        expect_names(self, "hessian", name_i, name_j)
        n = size(shape_of(self.X))
        return Zero(n * n, n)
