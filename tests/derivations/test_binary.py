"""Functions of two numbers, against torch.func on torch's own functions, broadcast in every way."""

from __future__ import annotations

import pytest
import torch
from action_reference import check_actions
from second_order_reference import random_point

from derivations.binary import KINDS, Binary

SHAPES = [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (4,)), ((4,), (2, 3, 1)), ((), (2, 3)), ((2, 3), ())]
CASES = {
    "power": lambda a, b: torch.exp(b * torch.log(a)),
    "atan2": torch.atan2,
    "logaddexp": lambda a, b: torch.log(torch.exp(a) + torch.exp(b)),
    "maximum": lambda a, b: torch.where(a > b, a, b),
    "minimum": lambda a, b: torch.where(a < b, a, b),
    "at_least": lambda a, b: torch.where(a > b, a, b),
    "at_most": lambda a, b: torch.where(a < b, a, b),
    "remainder": lambda a, b: a - b * (a / b).detach().floor(),
    "fmod": lambda a, b: a - b * (a / b).detach().trunc(),
    "copysign": lambda a, b: a.abs() * torch.sign(b).detach() + 0 * b,
}


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_actions(kind, shapes):
    a, b = random_point(65, a=shapes[0], b=shapes[1]).values()
    a = a.abs() + 0.2 if kind == "power" else a
    for moving in ([0, 1], [0], [1]):
        check_actions(Binary(kind), CASES[kind], (a, b), moving)


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind):
    a, b = torch.rand(2, 3), torch.rand(3)
    assert Binary(kind).rowwise((a, a), 2, (True, True))
    assert Binary(kind).rowwise((a, b), 2, (True, False))
    assert not Binary(kind).rowwise((a, b), 1, (True, True))


@pytest.mark.parametrize("kind", ["maximum", "minimum", "at_least", "at_most"])
def test_ties_are_torchs(kind):
    f = {
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "at_least": lambda a, b: torch.clamp(a, min=b),
        "at_most": lambda a, b: torch.clamp(a, max=b),
    }[kind]
    a, b = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]))
    expected = torch.autograd.grad(f(a, b).sum(), (a, b))
    seen = Binary(kind).vjp((a.detach(), b.detach()), torch.ones(1, 3, dtype=torch.float64))
    assert all(torch.equal(s[0], e) for s, e in zip(seen, expected, strict=True))


def test_powers_of_zero_and_of_negative_numbers():
    a = torch.tensor([0.0, 0.0, 0.0, -2.0], dtype=torch.float64)
    b = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    one = torch.ones(1, 4, dtype=torch.float64)
    assert Binary("power").vjp((a, b), one)[0].tolist() == [[0.0, 1.0, 0.0, 12.0]]
    assert Binary("power").curvature((a, b), one[0], (one, None))[0].tolist() == [[0.0, 0.0, 2.0, -12.0]]


def test_errors():
    x = torch.ones(1)
    with pytest.raises(ValueError, match="no kind 'hypot'; the kinds are power, atan2"):
        Binary("hypot")
    with pytest.raises(ValueError, match="every tangent is None"):
        Binary("power").jvp((x, x), (None, None))
