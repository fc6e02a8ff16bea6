"""What chapters do with exact numbers beside what ``hessiankit.verify.exact`` compares: case distinctions, masks, logarithms."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import sympy

from derivations.activation import ActivationAt, derivatives
from derivations.loss import CrossEntropyAt
from derivations.matrix import Zero
from derivations.softmax import softmax

ROOT = sympy.sqrt(2 / sympy.pi)
SMOOTH = {
    "gelu": lambda x: x * (1 + sympy.erf(x / sympy.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + sympy.tanh(ROOT * (x + sympy.Rational(44715, 1000000) * x**3))) / 2,
    "silu": lambda x: x / (1 + sympy.exp(-x)),
    "tanh": sympy.tanh,
}


@pytest.mark.parametrize("kind", SMOOTH)
def test_activations_at_a_rational_number(kind: str) -> None:
    x = sympy.Symbol("x", real=True)
    for order, value in enumerate(derivatives(kind, np.array([Fraction(-2, 3)], dtype=object))):
        expected = sympy.diff(SMOOTH[kind](x), x, order).subs(x, sympy.Rational(-2, 3))
        assert sympy.N(value[0] - expected, 40, chop=True) == 0


def test_piecewise_linear_activations_at_fractions() -> None:
    X = np.array([[Fraction(-3, 2), Fraction(5, 7)]], dtype=object)
    point = ActivationAt("leaky_relu", X, Fraction(1, 5))
    assert point.value.tolist() == [[Fraction(-3, 10), Fraction(5, 7)]]
    assert point.jacobian("X").dense().tolist() == [[Fraction(1, 5), 0], [0, 1]]
    assert ActivationAt("leaky_relu", X).jacobian("X").dense()[0, 0] == Fraction(1, 100)
    relu = ActivationAt("relu", X)
    assert relu.value.tolist() == [[0, Fraction(5, 7)]]
    assert isinstance(relu.hessian("X", "X"), Zero)


def test_relu_of_a_symbol_distinguishes_cases() -> None:
    x = sympy.Symbol("x", real=True)
    value, first, second = derivatives("relu", np.array([x], dtype=object))
    assert [value[0].subs(x, v) for v in (-2, 3)] == [0, 3]
    assert [first[0].subs(x, v) for v in (-2, 3)] == [0, 1]
    assert second is None
    assert derivatives("relu", np.array([sympy.Symbol("p", positive=True)], dtype=object))[1][0] == 1


def test_masked_softmax_of_symbols() -> None:
    T = np.array([sympy.symbols("t_0 t_1", real=True)], dtype=object)
    assert softmax(T, np.array([[True, False]])).tolist() == [[1, 0]]
    assert softmax(T, np.array([[0, -sympy.oo]], dtype=object)).tolist() == [[1, 0]]


def test_the_value_of_a_cross_entropy_is_a_logarithm() -> None:
    """Of rational probabilities, and of symbols, where the softmax is written out."""
    P = np.array(
        [[Fraction(1, 8), Fraction(1, 4), Fraction(5, 8)], [Fraction(3, 5), Fraction(1, 5), Fraction(1, 5)]], dtype=object
    )
    given = CrossEntropyAt(np.zeros((2, 3), dtype=object), [2, 0], P)
    assert sympy.simplify(given.value[0, 0] + sympy.log(sympy.Rational(5, 8) * sympy.Rational(3, 5)) / 2) == 0
    x, y = sympy.symbols("x y", real=True)
    (loss,) = CrossEntropyAt(np.array([[x, y]], dtype=object), [1]).value.reshape(-1)
    assert sympy.simplify(sympy.exp(loss) - 1 - sympy.exp(x - y)) == 0
