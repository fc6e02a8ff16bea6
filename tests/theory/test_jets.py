"""The arithmetic of the exact check: residues against fractions, their degrees against SymPy's, jets against sympy.diff."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import sympy

from derivations import arrays
from hessiankit.theory.exact.case import Draw
from hessiankit.theory.exact.jets import Jet
from hessiankit.theory.exact.residues import P, Residue

VARIABLES = x, y, z = sympy.symbols("x y z")
FORMULAS: list[Callable[..., object]] = [
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


def test_roots_are_roots_and_variables() -> None:
    square = Residue(11, 1) ** 2
    root = arrays.sqrt(arrays.as_array([square]))[0]
    assert root in (Residue(11), -Residue(11))
    assert (root.degree, square.degree) == (1, 2)
    with pytest.raises(ValueError, match="is not a square modulo p"):
        (-square).sqrt()


JETS: dict[str, tuple[Callable[..., object], tuple[int, int, int]]] = {
    "polynomial": (lambda x, y, z: x * x * y - 3 * y * z + x - z * z * z, (2, -1, 3)),
    "scalars on either side": (lambda x, y, z: 2 - (1 + x) * 3 + (y - 4) / 2 + 5 / z - (-x) * y, (2, -1, 3)),
    "quotient": (lambda x, y, z: (x * y - z) / (x * x + y * y + 1), (1, 2, 5)),
    "square of a shared node": (lambda x, y, z: (lambda u: u * u / (u + 1))(x * y + z), (1, 2, 4)),
    "root": (lambda x, y, z: (x * y + 7 * x).sqrt() if isinstance(x, Jet) else sympy.sqrt(x * y + 7 * x), (4, 2, 0)),
}


@pytest.mark.parametrize("name", JETS)
def test_derivatives_equal_sympy(name: str) -> None:
    f, point = JETS[name]
    jet = f(*(Jet(Residue(v), {k: 1}) for k, v in enumerate(point)))
    at, expression = dict(zip(VARIABLES, point, strict=True)), f(*VARIABLES)
    sign = 1 if jet.value == residue(expression, at) else -1  # of a root
    assert jet.value == sign * residue(expression, at)
    for i, a in enumerate(VARIABLES):
        assert jet.grad.get(i, 0) == sign * residue(expression.diff(a), at)
        for j, b in enumerate(VARIABLES):
            assert jet.hess.get((min(i, j), max(i, j)), 0) == sign * residue(expression.diff(a, b), at)


def residue(expression: sympy.Expr, at: dict[sympy.Symbol, int]) -> Residue:
    number = sympy.Rational(expression.subs(at))
    return Residue(0) + Fraction(int(number.p), int(number.q))


def test_relu_slopes_and_kink() -> None:
    assert Jet(Residue(3), {0: 1}).relu().grad == {0: 1}
    assert Jet(-Residue(3), {0: 2}).relu(Fraction(1, 4)).grad == {0: Fraction(1, 2)}
    assert not any(Jet(-Residue(3), {0: 2}, {(0, 0): 1}).relu().hess.values())
    with pytest.raises(ValueError, match="derivative is not defined"):
        Jet(Residue(0), {0: 1}).relu()


def test_formal_functions_are_drawn_once_for_each_argument() -> None:
    draw = Draw("functions")
    points = [Residue(k) for k in range(1, 9)]
    for function in (draw.exp, draw.log, draw.smooth):
        taylor = [function.taylor(t) for t in points]
        assert taylor == [function.taylor(t) for t in points]
        assert len(set(taylor)) == len(points)
        value, first, second = taylor[2]
        jet = function(Jet(Residue(3), {0: Residue(3)}, {(0, 0): Residue(5)}))
        assert (jet.value, jet.grad, jet.hess) == (value, {0: 3 * first}, {(0, 0): 5 * first + 9 * second})
    u, first, second = draw.exp.taylor(points[0])
    assert u == first == second
    _, first, second = draw.log.taylor(Residue(4))
    assert (4 * first, 16 * second) == (1, -1)
