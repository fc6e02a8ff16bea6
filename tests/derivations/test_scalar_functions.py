"""Smooth functions of one number, against torch.func on torch's own functions and against exact values far out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from action_reference import check_actions
from second_order_reference import random_point, relative_error

from derivations.elementwise import Elementwise
from derivations.scalar_functions import SMOOTH

X = random_point(63, X=(2, 3, 4))["X"]
INSIDE = 0.95 * torch.tanh(X)
CASES = {
    "log2": (torch.log2, X.abs() + 0.3),
    "log10": (torch.log10, X.abs() + 0.3),
    "logit": (lambda x: torch.log(x / (1 - x)), torch.sigmoid(X)),
    "tan": (torch.tan, INSIDE),
    "asin": (torch.asin, INSIDE),
    "acos": (torch.acos, INSIDE),
    "atan": (torch.atan, X),
    "sinh": (lambda x: (torch.exp(x) - torch.exp(-x)) / 2, X),
    "cosh": (lambda x: (torch.exp(x) + torch.exp(-x)) / 2, X),
    "asinh": (torch.asinh, X),
    "acosh": (torch.acosh, X.abs() + 1.2),
    "atanh": (torch.atanh, INSIDE),
    "erfc": (lambda x: 1 - torch.erf(x), X),
    "erfinv": (torch.erfinv, INSIDE),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), X),
}


@pytest.mark.parametrize("kind", SMOOTH)
def test_actions(kind):
    f, x = CASES[kind]
    check_actions(Elementwise(kind), f, (x,), [0])


@pytest.mark.parametrize("kind", ["mish", "erfc", "atan", "asinh"])
def test_far_from_the_origin(kind):
    for part in SMOOTH[kind](torch.linspace(-40, 40, 81, dtype=torch.float64)):
        assert torch.isfinite(part).all()


def test_known_values():
    one = torch.ones(1, dtype=torch.float64)
    assert relative_error(torch.cat(SMOOTH["atan"](one)), torch.tensor([math.pi / 4, 0.5, -0.5], dtype=torch.float64)) <= 1e-15
    half = torch.full((1,), 0.5, dtype=torch.float64)
    assert relative_error(torch.cat(SMOOTH["logit"](half)), torch.tensor([0.0, 4.0, 0.0], dtype=torch.float64)) <= 1e-15
    _, first, second = SMOOTH["erfc"](3 * one)
    assert relative_error(second, -6 * first) <= 1e-15
