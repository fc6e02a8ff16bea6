"""An operation known by its value alone: its actions by automatic differentiation, against formulas by hand."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw

import hessiankit as hk
from hessiankit.tracing.fallback import AutomaticDifferentiation

PRODUCT = AutomaticDifferentiation(lambda a, b: a.exp() * b**3, "a^e b^3")
A, B, ADJOINT = (draw(2, 3, seed=k) for k in (3, 4, 5))
TA, TB = draw(7, 2, 3), draw(7, 2, 3, seed=8)


def close(seen: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return seen is not None and seen.shape == expected.shape and bool((seen - expected).abs().max() < 1e-13)


def test_first_derivatives():
    assert close(PRODUCT.value(A, B), A.exp() * B**3)
    both = TA * A.exp() * B**3 + TB * A.exp() * 3 * B**2
    assert close(PRODUCT.jvp((A, B), (TA, TB)), both)
    assert close(PRODUCT.jvp((A, B), (None, TB)), TB * A.exp() * 3 * B**2)
    to_a, to_b = PRODUCT.vjp((A, B), TA)
    assert close(to_a, TA * A.exp() * B**3)
    assert close(to_b, TA * A.exp() * 3 * B**2)


@pytest.mark.parametrize("tangents", [(TA, TB), (TA, None), (None, TB)])
def test_second_derivative(tangents):
    ta, tb = (torch.zeros_like(TA) if t is None else t for t in tangents)
    to_a, to_b = PRODUCT.curvature((A, B), ADJOINT, tangents)
    assert close(to_a, ADJOINT * A.exp() * (B**3 * ta + 3 * B**2 * tb))
    assert close(to_b, ADJOINT * A.exp() * (3 * B**2 * ta + 6 * B * tb))


def test_rows_are_never_claimed_to_stay_apart():
    assert not PRODUCT.rowwise((A, B), 1, (True, True))
    assert not PRODUCT.separable((A, B), 1, (True, True))
    assert not PRODUCT.is_linear


def test_errors_name_the_operation():
    broken = AutomaticDifferentiation(lambda a: torch.ops.aten.copy.default(a, a), "aten.copy.default")
    for action in (
        lambda: broken.jvp((A,), (TA,)),
        lambda: broken.vjp((A,), TA),
        lambda: broken.curvature((A,), ADJOINT, (TA,)),
    ):
        with pytest.raises(
            hk.TraceError, match=r"aten\.copy\.default has no closed form here, and torch cannot differentiate it twice"
        ):
            action()
