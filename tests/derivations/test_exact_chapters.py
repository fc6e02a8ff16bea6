"""Chapters at symbols and at rational numbers, compared exactly with symbolic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import sympy
from second_order_reference import at, exact_hessian, exact_jacobian, same, symbols

from derivations.activation import ActivationAt, derivatives
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Zero
from derivations.normalization import LayerNormAt
from derivations.pooling import MeanPoolHeadAt
from derivations.softmax import SoftmaxAt, softmax

ROOT, THIRD = sympy.sqrt(2 / sympy.pi), sympy.Rational(1, 3)
ACTIVATIONS = {
    "gelu": lambda x: x * (1 + sympy.erf(x / sympy.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + sympy.tanh(ROOT * (x + sympy.Rational(44715, 1000000) * x**3))) / 2,
    "silu": lambda x: x / (1 + sympy.exp(-x)),
    "tanh": sympy.tanh,
    "identity": lambda x: x,
}
EPS = sympy.Symbol("e", positive=True)


class Case(NamedTuple):
    """A chapter, its entries written out, and the arguments' shapes."""

    make: Callable[..., Any]
    outputs: Callable[..., list[Any]]
    shapes: dict[str, tuple[int, ...]]


def entrywise(kind: str) -> Case:
    return Case(lambda X: ActivationAt(kind, X), lambda X: [ACTIVATIONS[kind](x) for x in X[0]], {"X": (1, 2)})


def softmax_rows(T: np.ndarray) -> np.ndarray:
    powers = np.frompyfunc(sympy.exp, 1, 1)(T)
    return powers / powers.sum(1).reshape(-1, 1)


def half_difference(X: np.ndarray) -> Any:
    half = (X[0, 0] - X[0, 1]) / 2
    return half / sympy.sqrt(half**2 + EPS)


def pooled(Z: np.ndarray, W_c: np.ndarray, b_c: np.ndarray) -> list[Any]:
    return [sum(Z[i, k] * W_c[k, c] for i in range(2) for k in range(2)) / 2 + b_c[c] for c in range(2)]


def log_loss(logits: np.ndarray, labels: list[int]) -> Any:
    rows = zip(logits, labels, strict=True)
    return sum(sympy.log(sum(sympy.exp(v) for v in row)) - row[label] for row, label in rows) / len(labels)


CONSTANTS = np.array([[Fraction(1), Fraction(-2), Fraction(1, 3)]], dtype=object)
SYMBOLIC = {
    **{kind: entrywise(kind) for kind in ACTIVATIONS},
    "softmax": Case(SoftmaxAt, lambda T: list(softmax_rows(T)[0]), {"T": (1, 2)}),
    "layer norm": Case(
        lambda X, gamma: LayerNormAt(X, gamma, eps=EPS),
        lambda X, gamma: [gamma[0] * half_difference(X), -gamma[1] * half_difference(X)],
        {"X": (1, 2), "gamma": (2,)},
    ),
    "head": Case(MeanPoolHeadAt, pooled, {"Z": (2, 2), "W_c": (2, 2), "b_c": (2,)}),
    "squared error": Case(
        lambda Z: MeanSquaredErrorAt(Z, CONSTANTS + 0 * sympy.Integer(1)),
        lambda Z: [sum((z - sympy.Rational(str(t))) ** 2 for z, t in zip(Z[0], CONSTANTS[0], strict=True)) * THIRD],
        {"Z": (1, 3)},
    ),
    "cross entropy": Case(lambda T: CrossEntropyAt(T, [2]), lambda T: [log_loss(T, [2])], {"T": (1, 3)}),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbols(name: str) -> None:
    make, outputs, shapes = SYMBOLIC[name]
    point = {n: symbols(n, *shape) for n, shape in shapes.items()}
    operation = make(**point) if name != "cross entropy" else make(point["T"])
    entries, own = outputs(**point), dict(zip(operation.arguments, point.values(), strict=True))
    for i, x in own.items():
        assert same(operation.jacobian(i).sympy(), exact_jacobian(entries, x))
        for j, y in own.items():
            block, expected = operation.hessian(i, j), exact_hessian(entries, x, y)
            assert expected.is_zero_matrix if isinstance(block, Zero) else same(block.sympy(), expected), (i, j)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "tanh"])
def test_activations_at_a_rational_number(kind: str) -> None:
    x = sympy.Symbol("x", real=True)
    for order, value in enumerate(derivatives(kind, np.array([Fraction(-2, 3)], dtype=object))):
        expected = sympy.diff(ACTIVATIONS[kind](x), x, order).subs(x, sympy.Rational(-2, 3))
        assert sympy.N(value[0] - expected, 40, chop=True) == 0


def test_piecewise_linear_activations_at_fractions() -> None:
    X = np.array([[Fraction(-3, 2), Fraction(5, 7)]], dtype=object)
    point = ActivationAt("leaky_relu", X, Fraction(1, 5))
    assert point.value.tolist() == [[Fraction(-3, 10), Fraction(5, 7)]]
    assert point.jacobian("X").dense().tolist() == [[Fraction(1, 5), 0], [0, 1]]
    assert ActivationAt("leaky_relu", X).jacobian("X").dense()[0, 0] == Fraction(1, 100)
    relu = ActivationAt("relu", X)
    assert relu.value.tolist() == [[0, Fraction(5, 7)]]
    assert relu.jacobian("X").dense().tolist() == [[0, 0], [0, 1]]
    assert isinstance(relu.hessian("X", "X"), Zero)


def test_relu_of_a_symbol_distinguishes_cases() -> None:
    x = sympy.Symbol("x", real=True)
    value, first, second = derivatives("relu", np.array([x], dtype=object))
    assert [value[0].subs(x, v) for v in (-2, 3)] == [0, 3]
    assert [first[0].subs(x, v) for v in (-2, 3)] == [0, 1]
    assert second is None
    assert derivatives("relu", np.array([sympy.Symbol("p", positive=True)], dtype=object))[1][0] == 1


def test_masked_softmax_of_symbols() -> None:
    T = symbols("t", 1, 2)
    assert softmax(T, np.array([[True, False]])).tolist() == [[1, 0]]
    assert softmax(T, np.array([[0, -sympy.oo]], dtype=object)).tolist() == [[1, 0]]


ODDS = np.array([[1, 2, 5], [3, 1, 1]], dtype=object)
WEIGHTS = np.array([[Fraction(int(v), int(row.sum())) for v in row] for row in ODDS], dtype=object)
ZEROS = np.zeros((2, 3), dtype=object)


@pytest.mark.parametrize("name", ["softmax", "cross entropy"])
def test_rational_weights_stay_rational(name: str) -> None:
    """Logits are logarithms of the odds."""
    T = symbols("t", 2, 3)
    values = {t: sympy.log(v) for t, v in zip(T.reshape(-1), ODDS.reshape(-1), strict=True)}
    point = SoftmaxAt(ZEROS, weights=WEIGHTS) if name == "softmax" else CrossEntropyAt(ZEROS, [2, 0], WEIGHTS)
    outputs = softmax_rows(T) if name == "softmax" else [log_loss(T, [2, 0])]
    (argument,) = point.arguments
    assert point.jacobian(argument).dense().tolist() == at(exact_jacobian(outputs, T), values).tolist()
    second = point.hessian(argument, argument).dense()
    assert all(isinstance(v, (int, Fraction)) for v in second.reshape(-1))
    assert second.tolist() == at(exact_hessian(outputs, T, T), values).tolist()
    if name == "cross entropy":
        assert sympy.simplify(point.value[0, 0] - outputs[0].subs(values)) == 0
