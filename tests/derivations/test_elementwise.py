"""Entrywise functions and the quotient, against torch.func on torch's own functions and on sums and products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from action_reference import check_actions
from second_order_reference import random_point, relative_error

from derivations.elementwise import KINDS, Divide, Elementwise
from derivations.kinked_functions import KINKED
from derivations.scalar_functions import SMOOTH

X = random_point(61, X=(2, 3, 4))["X"]
POSITIVE = X.abs() + 0.3

CASES = {
    "exp": (Elementwise("exp"), torch.exp, X),
    "expm1": (Elementwise("expm1"), torch.expm1, X),
    "exponential": (Elementwise("exponential", (2.5,)), lambda x: 2.5**x, X),
    "log": (Elementwise("log"), torch.log, POSITIVE),
    "log1p": (Elementwise("log1p"), torch.log1p, POSITIVE),
    "sqrt": (Elementwise("sqrt"), torch.sqrt, POSITIVE),
    "rsqrt": (Elementwise("rsqrt"), torch.rsqrt, POSITIVE),
    "reciprocal": (Elementwise("reciprocal"), torch.reciprocal, X),
    "sigmoid": (Elementwise("sigmoid"), torch.sigmoid, X),
    "log_sigmoid": (Elementwise("log_sigmoid"), lambda x: -torch.log1p(torch.exp(-x)), X),
    "softplus": (Elementwise("softplus"), F.softplus, X),
    "softplus, bent": (Elementwise("softplus", (2.0, 1.5)), lambda x: F.softplus(x, 2, 1.5), X),
    "erf": (Elementwise("erf"), torch.erf, X),
    "sin": (Elementwise("sin"), torch.sin, X),
    "cos": (Elementwise("cos"), torch.cos, X),
    "abs": (Elementwise("abs"), torch.abs, X),
    "clamp": (Elementwise("clamp", (-0.4, 0.7)), lambda x: x.clamp(-0.4, 0.7), X),
    "clamp from below": (Elementwise("clamp", (-0.4,)), lambda x: x.clamp(min=-0.4), X),
    **{f"power {p}": (Elementwise("power", (p,)), lambda x, p=p: x**p, X) for p in (1, 2, 3, -2)},
    **{f"power {p}": (Elementwise("power", (p,)), lambda x, p=p: x**p, POSITIVE) for p in (0.5, -1.5)},
}


@pytest.mark.parametrize("name", CASES)
def test_actions(name):
    primitive, f, x = CASES[name]
    check_actions(primitive, f, (x,), [0])
    assert primitive.rowwise((x,), 3, (True,))


def test_every_kind_is_tested():
    assert {primitive.kind for primitive, _, _ in CASES.values()} == set(KINDS) - set(SMOOTH) - set(KINKED)


@pytest.mark.parametrize("kind", ["sigmoid", "log_sigmoid", "softplus", "erf"])
def test_far_from_the_origin(kind):
    x = torch.linspace(-40, 40, 81, dtype=torch.float64)
    for part in KINDS[kind](x):
        assert torch.isfinite(part).all()
    value, first, second = KINDS["sigmoid"](x)
    assert relative_error(first / torch.exp(-x.abs()), 1 / (1 + torch.exp(-x.abs())) ** 2) <= 1e-14
    assert relative_error(second, first - 2 * value * first) <= 1e-14


def test_derivatives_at_the_kink_are_torchs():
    x = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    for primitive, f in ((Elementwise("abs"), torch.abs), (Elementwise("clamp", (-1.0, 1.0)), lambda v: v.clamp(-1, 1))):
        (slope,) = torch.autograd.grad(f(x).sum(), x)
        assert torch.equal(primitive.vjp((x.detach(),), torch.ones(1, 3, dtype=torch.float64))[0][0], slope)


@pytest.mark.parametrize("p", [0, 1, 2, 3])
def test_powers_of_zero(p):
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    power = Elementwise("power", (p,))
    (first,), (second,) = power.vjp((zero,), one.unsqueeze(0)), power.curvature((zero,), one, (one.unsqueeze(0),))
    assert float(first) == (1 if p == 1 else 0)
    assert second is None if p < 2 else float(second) == (2 if p == 2 else 0)


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (4,)), ((4,), (2, 3, 1)), ((), (2, 3)), ((2, 3), ())])
def test_division(shapes):
    a, b = random_point(62, a=shapes[0], b=shapes[1]).values()
    b = b.abs() + 0.5
    for moving in ([0, 1], [0], [1]):
        check_actions(Divide(), lambda x, y: x * y**-1, (a, b), moving)


def test_division_by_a_count_is_in_double_precision():
    pulled = Divide().vjp((X, torch.tensor(3)), torch.ones(1, *X.shape, dtype=torch.float64))[0]
    assert pulled.dtype == torch.float64
    assert relative_error(pulled, torch.full_like(pulled, 1 / 3)) <= 1e-16


def test_errors():
    with pytest.raises(ValueError, match="no kind 'cube'; the kinds are exp, expm1"):
        Elementwise("cube")
    with pytest.raises(ValueError, match="tangent of X is None"):
        Elementwise("exp").jvp((X,), (None,))
