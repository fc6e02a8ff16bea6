"""Residues: the arithmetic against Python's own reduction of fractions, the degrees against SymPy's."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import sympy

from derivations import arrays
from hessiankit.verify.residues import P, Residue

VARIABLES = sympy.symbols("x y z")
FORMULAS = [
    lambda x, y, z: x * y + 3 * z - Fraction(1, 2),
    lambda x, y, z: x / y + z / (y * y),
    lambda x, y, z: (x + y) ** 3 / z - (x - 1) / (z * z * y),
    lambda x, y, z: 1 / (x + y) + 1 / (x - y) + z,
    lambda x, y, z: (x / (x + y)) * (y / (x + z)) / (2 * x) + 5,
    lambda x, y, z: 2 / (1 / (x + y) + 1 / z),
]


@pytest.mark.parametrize("number", range(len(FORMULAS)))
def test_values_are_those_of_fractions_and_degrees_bound_those_of_sympy(number: int) -> None:
    formula, rng = FORMULAS[number], random.Random(number)
    point = [rng.randint(2, 9) * k for k in (1, 11, 121)]
    seen = formula(*(Residue(v, 1) for v in point))
    assert seen.value == hash(formula(*map(Fraction, point))) % P  # Python hashes a fraction by its residue modulo 2^61 - 1
    numerator, _ = sympy.fraction(sympy.cancel(formula(*VARIABLES)))
    assert sympy.Poly(numerator, *VARIABLES).total_degree() <= seen.degree <= 8


def test_a_difference_of_equal_fractions_has_the_degree_of_their_common_denominator() -> None:
    x, y = Residue(3, 1), Residue(5, 1)
    difference = (x / y + 1) - (x + y) / y
    assert difference == 0
    assert difference.degree == 1
    assert (x / y - 1 / y).degree == 1
    assert (x / y - y / x).degree == 2


def test_structure_stays_structure() -> None:
    x = Residue(7, 1)
    assert type(x * 0) is int
    assert x + 0 is x
    assert x * 1 is x
    assert (x - x) == 0
    assert bool(x - x) is False


def test_roots_are_roots_and_variables() -> None:
    square = Residue(11, 1) ** 2
    root = arrays.sqrt(arrays.as_array([square]))[0]
    assert root in (Residue(11), -Residue(11))
    assert (root.degree, square.degree) == (1, 2)
    with pytest.raises(ValueError, match="is not a square modulo p"):
        (-square).sqrt()
