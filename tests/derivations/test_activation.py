"""Activations: derivatives against autograd of torch's own functions and against sympy.diff; vec_r forms and primitive."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
from action_reference import check_actions, check_against_matrices
from second_order_reference import check_all_blocks, exact_hessian, exact_jacobian, random_point, relative_error, same, symbols

from derivations.activation import KINDS, SMOOTH, Activation, ActivationAt, derivatives
from derivations.matrix import Zero

FUNCTIONS = {
    "identity": lambda x: x * 1,
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
}


def symbolic(kind, x):
    k = sympy.sqrt(2 / sympy.pi)
    return {
        "gelu": x * (1 + sympy.erf(x / sympy.sqrt(2))) / 2,
        "gelu_tanh": x * (1 + sympy.tanh(k * (x + sympy.Rational(44715, 1000000) * x**3))) / 2,
        "silu": x / (1 + sympy.exp(-x)),
        "tanh": sympy.tanh(x),
        "identity": x,
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_against_autograd(kind):
    point = random_point(40, X=(3, 4))
    check_all_blocks(ActivationAt(kind, **point), lambda X: FUNCTIONS[kind](X), point)


@pytest.mark.parametrize("kind", KINDS)
def test_actions(kind):
    X = random_point(41, X=(2, 3, 4))["X"]
    check_actions(Activation(kind), FUNCTIONS[kind], (X,), (0,))
    check_against_matrices(Activation(kind), (X[0],), ActivationAt(kind, X[0]))


@pytest.mark.parametrize("kind", SMOOTH)
def test_far_from_the_origin(kind):
    X = torch.linspace(-40, 40, 81, dtype=torch.float64).requires_grad_()
    value, first, second = derivatives(kind, X.detach())
    (slope,) = torch.autograd.grad(FUNCTIONS[kind](X).sum(), X, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), X)
    assert torch.allclose(value, FUNCTIONS[kind](X), rtol=1e-13, atol=1e-14)
    assert torch.allclose(first, slope, rtol=1e-13, atol=1e-14)
    assert torch.allclose(second, bend, rtol=1e-12, atol=1e-14)
    for far in derivatives(kind, torch.tensor([-1e4, 1e4])):
        assert torch.isfinite(far).all()


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "tanh", "identity"])
def test_symbolic_blocks(kind):
    X = symbols("x", 1, 2)
    outputs = [symbolic(kind, x) for x in X[0]]
    point = ActivationAt(kind, X)
    assert same(point.jacobian("X").sympy(), exact_jacobian(outputs, X))
    assert same(point.hessian("X", "X").sympy(), exact_hessian(outputs, X, X))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "tanh"])
def test_exact_at_a_rational_number(kind):
    x = sympy.Symbol("x", real=True)
    values = derivatives(kind, np.array([Fraction(-2, 3)], dtype=object))
    for order, value in enumerate(values):
        expected = sympy.diff(symbolic(kind, x), x, order).subs(x, sympy.Rational(-2, 3))
        assert sympy.N(value[0] - expected, 40, chop=True) == 0


def test_piecewise_linear_kinds_on_fractions():
    X = np.array([[Fraction(-3, 2), Fraction(5, 7)]], dtype=object)
    point = ActivationAt("leaky_relu", X, Fraction(1, 5))
    assert point.value.tolist() == [[Fraction(-3, 10), Fraction(5, 7)]]
    assert point.jacobian("X").dense().tolist() == [[Fraction(1, 5), 0], [0, 1]]
    assert ActivationAt("leaky_relu", X).jacobian("X").dense()[0, 0] == Fraction(1, 100)
    relu = ActivationAt("relu", X)
    assert relu.value.tolist() == [[0, Fraction(5, 7)]]
    assert relu.jacobian("X").dense().tolist() == [[0, 0], [0, 1]]
    assert isinstance(relu.hessian("X", "X"), Zero)
    assert relu.hessian("X", "X").shape == (4, 2)


def test_relu_of_a_symbol_distinguishes_cases():
    x = sympy.Symbol("x", real=True)
    value, first, second = derivatives("relu", np.array([x], dtype=object))
    assert [value[0].subs(x, v) for v in (-2, 3)] == [0, 3]
    assert [first[0].subs(x, v) for v in (-2, 3)] == [0, 1]
    assert second is None
    positive = sympy.Symbol("p", positive=True)
    assert derivatives("relu", np.array([positive], dtype=object))[1][0] == 1


def test_derivative_at_the_kink_is_torchs():
    zero = torch.zeros(1, requires_grad=True)
    for kind in ("relu", "leaky_relu"):
        (slope,) = torch.autograd.grad(FUNCTIONS[kind](zero).sum(), zero)
        assert torch.equal(derivatives(kind, zero.detach())[1], slope)


def test_float32():
    X, w, t = (v.float() for v in random_point(42, X=(50,), w=(50,), t=(3, 50)).values())
    for kind in SMOOTH:
        (single,) = Activation(kind).curvature((X,), w, (t,))
        (double,) = Activation(kind).curvature((X.double(),), w.double(), (t.double(),))
        assert relative_error(single.double(), double) <= 2e-6, kind


def test_what_vanishes_is_none():
    X = torch.ones(2)
    for kind in KINDS:
        primitive = Activation(kind)
        assert primitive.is_linear == (kind == "identity")
        (seen,) = primitive.curvature((X,), X, (torch.ones(1, 2),))
        assert (seen is None) == (kind not in SMOOTH)
        assert primitive.rowwise((X,), 1, (True,))


def test_errors():
    for make in (lambda: Activation("swish"), lambda: ActivationAt("swish", torch.ones(1, 1))):
        with pytest.raises(ValueError, match="no kind 'swish'; the kinds are identity, relu"):
            make()
    with pytest.raises(ValueError, match="no argument is called 'Y'"):
        ActivationAt("tanh", torch.ones(1, 1)).jacobian("Y")
    with pytest.raises(ValueError, match="tangent of X is None"):
        Activation("tanh").jvp((torch.ones(1),), (None,))
