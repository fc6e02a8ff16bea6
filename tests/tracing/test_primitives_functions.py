"""Entrywise functions of the tracer, with one argument and with two."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_exact, draw, mse
from operation_cases import applied, check_closed_form, module_of

import hessiankit as hk
from derivations.activation import Activation
from derivations.binary import Binary
from derivations.elementwise import Elementwise

OTHER, SLOPES = draw(2, 3, 4, seed=13), draw(4, seed=11)

FUNCTIONS = {
    **{name: getattr(torch, name) for name in ["erfc", "sinh", "cosh", "tan", "asin", "acos", "atan", "asinh", "nan_to_num"]},
    "mish": F.mish,
    "elu": F.elu,
    "elu with a slope": lambda y: F.elu(y, 0.7),
    "selu": F.selu,
    "celu": lambda y: F.celu(y, 0.5),
    "hardswish": lambda y: F.hardswish(4 * y),
    "hardshrink": lambda y: F.hardshrink(y, 0.3),
    "softshrink": lambda y: F.softshrink(y, 0.3),
    "threshold": lambda y: F.threshold(y, 0.1, 0.3),
    "logit": lambda y: torch.logit(y.sigmoid()),
    "logit within": lambda y: torch.logit(y.sigmoid(), 0.3),
    "erfinv": lambda y: torch.erfinv(0.9 * y),
    "acosh": lambda y: torch.acosh(y + 3),
    "atanh": lambda y: torch.atanh(0.9 * y),
    "log2": lambda y: torch.log2(y + 2),
    "log10": lambda y: torch.log10(y + 2),
    "frac": lambda y: torch.frac(3 * y),
    "remainder": lambda y: torch.remainder(y, 0.3),
    "fmod": lambda y: torch.fmod(y, 0.3),
    "clip": lambda y: y.clip(-0.3, 0.4),
    "entr": lambda y: torch.special.entr(y + 2),
}

BINARIES = {
    "maximum": lambda y: torch.maximum(y, OTHER),
    "minimum": lambda y: torch.minimum(y, y[:, :1] + 0.1),
    "max of two": lambda y: torch.max(y, OTHER),
    "fmax": lambda y: torch.fmax(y, OTHER),
    "clamp": lambda y: y.clamp(-OTHER.abs(), OTHER.abs()),
    "clamp from below": lambda y: y.clamp(min=OTHER),
    "clamp_max": lambda y: torch.clamp_max(y, y[:1] * OTHER),
    "power": lambda y: (y + 2) ** OTHER,
    "power, both moving": lambda y: (y + 2) ** y,
    "atan2": lambda y: torch.atan2(y, OTHER),
    "logaddexp": lambda y: torch.logaddexp(y, y[0] * OTHER),
    "xlogy of numbers": lambda y: torch.xlogy(2.0, y + 2) + torch.special.xlogy(y, 3.0),
    "xlog1py": lambda y: torch.special.xlog1py(y, y[:1] * 0.2) + torch.special.xlog1py(2.0, 0.3 * y),
    "copysign": lambda y: torch.copysign(y, OTHER),
    "remainder": lambda y: torch.remainder(y, OTHER.abs()),
    "fmod": lambda y: torch.fmod(y, OTHER),
}

PARTS = {
    "tanhshrink": F.tanhshrink,
    "prelu": lambda y: F.prelu(y.flatten(0, 1), SLOPES),
    "prelu, moving": lambda y: F.prelu(y.mT, y[0, 0]),
    "prelu, one slope": lambda y: F.prelu(y, SLOPES[:1]),
    "addcdiv": lambda y: torch.addcdiv(y, OTHER, 2 + y, value=2),
    "lerp": lambda y: torch.lerp(y, OTHER, 0.3),
    "lerp by a tensor": lambda y: torch.lerp(y, OTHER, y.sin()),
    "hypot": lambda y: torch.hypot(y, OTHER),
    "xlogy": lambda y: torch.xlogy(OTHER, y.exp()),
    "xlogy at zero": lambda y: torch.xlogy(y * (OTHER > 0), (y + 2) * (OTHER > 0)),
    "ldexp": lambda y: torch.ldexp(y, torch.tensor([1, 2, 0, 1])),
    "degrees": lambda y: torch.rad2deg(torch.deg2rad(y) * y),
    "where": lambda y: torch.where(y > OTHER, y, OTHER * y),
}

STEPS = {
    **{name: getattr(torch, name) for name in ["sign", "floor", "ceil", "round", "trunc"]},
    "round to digits": lambda y: torch.round(y, decimals=1),
    "division with rounding": lambda y: y.div(OTHER, rounding_mode="floor"),
    "one_hot": lambda y: F.one_hot(y.argmax(-1), 4),
    "bucketize": lambda y: SLOPES[torch.bucketize(y, torch.linspace(-1, 1, 3))],
    "heaviside": lambda y: torch.heaviside(y.detach(), SLOPES),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    check_closed_form(FUNCTIONS[name], Elementwise)


@pytest.mark.parametrize("name", BINARIES)
def test_binary(name):
    check_closed_form(BINARIES[name], Binary)


@pytest.mark.parametrize("name", PARTS)
def test_parts(name):
    check_closed_form(PARTS[name], handshake=name != "xlogy at zero")  # where torch's own gradient is NaN


@pytest.mark.parametrize("name", STEPS)
def test_step(name):
    check_closed_form(lambda y: y * STEPS[name](3 * y) + y)
    assert len(applied(module_of(lambda y: y + STEPS[name](3 * y)))) <= 6  # the step itself is no application


def test_floor_division_which_autograd_refuses():
    module = module_of(lambda y: y * torch.floor_divide(y, 0.3))
    found = hk.hessian(module, draw(2, 3, 5), torch.zeros(2, 3, 4).double(), handshake=False)
    same = hk.hessian(module_of(lambda y: y * torch.floor(y / 0.3)), draw(2, 3, 5), torch.zeros(2, 3, 4).double())
    assert torch.equal(found.matrix, same.matrix)
    assert found.fallbacks == ()


def test_hardsigmoid_which_autograd_differentiates_once():
    found = hk.hessian(module_of(lambda y: F.hardsigmoid(4 * y)), draw(2, 3, 5), torch.zeros(2, 3, 4).double())
    same = assert_exact(
        module_of(lambda y: (4 * y / 6 + 0.5).clamp(0, 1)), draw(2, 3, 5), torch.zeros(2, 3, 4).double(), loss=mse
    )
    assert (found.matrix - same.matrix).abs().max() <= 1e-13 * same.matrix.abs().max()
    assert found.fallbacks == ()


def test_rrelu_in_evaluation():
    module = Formula(lambda s, x: torch.tanh(F.rrelu(x @ s.W)), W=(5, 4))
    assert Activation in {type(p) for p in applied(module)}
    assert assert_exact(module, draw(3, 5), draw(3, 4)).fallbacks == ()


@pytest.mark.parametrize("f", [F.elu, F.selu, lambda z: F.celu(z, 0.5), lambda z: F.elu(z, 0.7)])
def test_the_second_derivative_at_the_kink_is_that_of_torch(f) -> None:
    """Of an entry that is zero and moves, as behind a hard choice."""
    chosen = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    module, x = Formula(lambda s, x: f(x @ s.W * chosen), W=(3, 4)), draw(5, 3)
    assert_exact(module, x, draw(5, 4, seed=2))
    assert_exact(Formula(lambda s, x: f(x @ s.W * (s.W.sum() - s.W.sum().detach())), W=(3, 4)), x, draw(5, 4, seed=2))
