"""Jets against sympy.diff; the matrix formulas on them are held against the closed forms, which autograd tests."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import sympy

from hessiankit.verify import jets
from hessiankit.verify.jets import FormalExponential, FormalFunction, Jet

x, y, z = sympy.symbols("x y z")
FUNCTIONS: list[tuple[str, Callable[..., object], tuple[int, int, int]]] = [
    ("polynomial", lambda x, y, z: x * x * y - 3 * y * z + x - z * z * z, (2, -1, 3)),
    ("scalars on either side", lambda x, y, z: 2 - (1 + x) * 3 + (y - 4) / 2 + 5 / z - (-x) * y, (2, -1, 3)),
    ("quotient", lambda x, y, z: (x * y - z) / (x * x + y * y + 1), (1, 2, 5)),
    ("square of a shared node", lambda x, y, z: (lambda u: u * u / (u + 1))(x * y + z), (1, 2, 4)),
]


@pytest.mark.parametrize(("f", "point"), [(f, point) for _, f, point in FUNCTIONS], ids=[name for name, _, _ in FUNCTIONS])
def test_derivatives_equal_sympy(f: Callable[..., object], point: tuple[int, int, int]) -> None:
    jet = f(*(Jet(Fraction(v), {k: 1}) for k, v in enumerate(point)))
    at = dict(zip((x, y, z), point, strict=True))
    expression = f(x, y, z)
    assert jet.value == expression.subs(at)
    for i, a in enumerate((x, y, z)):
        assert jet.grad.get(i, 0) == expression.diff(a).subs(at)
        for j, b in enumerate((x, y, z)):
            assert jet.hess.get((min(i, j), max(i, j)), 0) == expression.diff(a, b).subs(at)


def test_square_root_and_logarithm_equal_sympy() -> None:
    a, b = Jet(Fraction(1, 4), {0: 1}), Jet(Fraction(2), {1: 1})
    at = {x: sympy.Rational(1, 4), y: 2}
    for jet, expression in (((a * b + a * 7).sqrt(), sympy.sqrt(x * y + 7 * x)), ((a * b * b * b).log(), sympy.log(x * y**3))):
        assert [jet.grad[0], jet.grad[1]] == [expression.diff(v).subs(at) for v in (x, y)]
        assert [jet.hess.get(k, 0) for k in ((0, 0), (0, 1), (1, 1))] == [
            expression.diff(*pair).subs(at) for pair in ((x, x), (x, y), (y, y))
        ]


def test_square_root_refuses_irrational_and_nonpositive_values() -> None:
    for value in (2, 0, -4):
        with pytest.raises(ValueError, match="not the square of a positive rational"):
            Jet(Fraction(value), {0: 1}).sqrt()


def test_relu_slopes_and_kink() -> None:
    assert Jet(Fraction(3), {0: 1}).relu().grad == {0: 1}
    assert Jet(Fraction(-3), {0: 2}).relu(Fraction(1, 4)).grad == {0: Fraction(1, 2)}
    assert not any(Jet(Fraction(-3), {0: 2}, {(0, 0): 1}).relu().hess.values())
    with pytest.raises(jets.KinkError, match="derivative is not defined"):
        Jet(Fraction(0), {0: 1}).relu()


def test_logarithm_has_no_rational_value_so_a_use_of_it_cannot_pass_for_equal() -> None:
    loss = Jet(Fraction(3), {0: 1}).log()
    assert loss.value != loss.value
    assert (loss * Jet(Fraction(2), {1: 1})).grad[1] != 0


def test_formal_exponential_is_a_function_and_positive() -> None:
    exp = FormalExponential(3)
    points = [Fraction(k, 3) for k in range(-9, 9)]
    first = [exp(t) for t in points]
    assert first == [exp(t) for t in points]
    assert min(first) > 0
    assert len(set(first)) > 5
    jet = exp(Jet(points[0], {0: 1}))
    assert jet.value == jet.grad[0] == jet.hess[0, 0] == first[0]


def test_formal_function_is_drawn_once_for_each_argument() -> None:
    f = FormalFunction(1)
    jet = f(Jet(Fraction(2), {0: Fraction(3)}, {(0, 0): Fraction(5)}))
    value, first, second = f.taylor(2)
    assert (jet.value, jet.grad, jet.hess) == (value, {0: 3 * first}, {(0, 0): 5 * first + 9 * second})
    assert len({f.taylor(Fraction(k, 2)) for k in range(8)}) > 5
