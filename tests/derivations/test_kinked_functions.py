"""Functions with kinks, against torch.func on formulas by cases; at the kinks, against torch's own first derivative."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from action_reference import check_actions
from second_order_reference import random_point

from derivations.elementwise import Elementwise
from derivations.kinked_functions import KINKED

X = 2 * random_point(64, X=(2, 3, 4))["X"]


def by_cases(condition, yes, no):
    return lambda x: torch.where(condition(x), yes(x), no(x))


CASES = {
    "elu": ((), by_cases(lambda x: x > 0, lambda x: x, lambda x: torch.exp(x.clamp(max=0)) - 1)),
    "elu, three constants": (
        (0.7, 1.3, 2.0),
        by_cases(lambda x: x > 0, lambda x: 1.3 * x, lambda x: 0.91 * (torch.exp(2 * x.clamp(max=0)) - 1)),
    ),
    "hardsigmoid": ((), lambda x: (x / 6 + 0.5).clamp(0, 1)),
    "hardswish": ((), lambda x: x * (x / 6 + 0.5).clamp(0, 1)),
    "hardshrink": ((0.8,), by_cases(lambda x: x.abs() > 0.8, lambda x: x, torch.zeros_like)),
    "softshrink": ((0.8,), lambda x: torch.sign(x) * (x.abs() - 0.8).relu()),
    "threshold": ((0.4, 3.0), by_cases(lambda x: x > 0.4, lambda x: x, lambda x: torch.full_like(x, 3.0))),
    "frac": ((), lambda x: x - x.detach().trunc()),
    "remainder": ((0.7,), lambda x: x - 0.7 * (x / 0.7).detach().floor()),
    "fmod": ((0.7,), lambda x: x - 0.7 * (x / 0.7).detach().trunc()),
    "finite": ((), lambda x: x * 1),
}


@pytest.mark.parametrize("name", CASES)
def test_actions(name):
    constants, f = CASES[name]
    check_actions(Elementwise(name.partition(",")[0], constants), f, (X,), [0])


def test_logit_within():
    inside = torch.sigmoid(X)
    check_actions(
        Elementwise("logit_within", (0.3,)), lambda x: (lambda p: torch.log(p / (1 - p)))(x.clamp(0.3, 0.7)), (inside,), [0]
    )


def test_every_kind_is_tested():
    assert {name.partition(",")[0] for name in CASES} | {"logit_within"} == set(KINKED)


KINKS = {
    "elu": ((0.7, 1.3, 1.0), lambda x: torch.ops.aten.elu(x, 0.7, 1.3), [0.0]),
    "hardsigmoid": ((), F.hardsigmoid, [-3.0, 3.0]),
    "hardshrink": ((0.5,), F.hardshrink, [-0.5, 0.5]),
    "softshrink": ((0.5,), F.softshrink, [-0.5, 0.5]),
    "threshold": ((0.5, 2.0), lambda x: F.threshold(x, 0.5, 2.0), [0.5]),
    "frac": ((), torch.frac, [1.0]),
    "remainder": ((0.5,), lambda x: torch.remainder(x, 0.5), [1.0]),
    "fmod": ((0.5,), lambda x: torch.fmod(x, 0.5), [1.0]),
    "logit_within": ((0.25,), lambda x: torch.logit(x, 0.25), [0.25, 0.75]),
}


@pytest.mark.parametrize("kind", KINKS)
def test_derivatives_at_the_kink_are_torchs(kind):
    constants, f, points = KINKS[kind]
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(f(x).sum(), x)
    seen = Elementwise(kind, constants).vjp((x.detach(),), torch.ones(1, len(points), dtype=torch.float64))[0][0]
    assert torch.allclose(seen, slope, rtol=1e-15, atol=0)


def test_what_is_not_finite_stands_still():
    x = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    primitive = Elementwise("finite", (5.0, 6.0, 7.0))
    assert primitive.value(x).tolist() == [1.0, 6.0, 7.0, 5.0]
    assert primitive.vjp((x,), torch.ones(1, 4, dtype=torch.float64))[0].tolist() == [[1.0, 0.0, 0.0, 0.0]]
