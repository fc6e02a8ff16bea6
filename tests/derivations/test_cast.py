"""A change of type: exact in double precision, rounded once in a shorter type, and typed right on the way back."""

from __future__ import annotations

import pytest
import torch
from second_order_reference import random_point

from derivations.cast import Cast

X, T, W = random_point(68, X=(2, 3), T=(4, 2, 3), W=(4, 2, 3)).values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_actions(dtype):
    cast = Cast(dtype)
    assert torch.equal(cast.value(X), X.to(dtype))
    assert torch.equal(cast.jvp((X,), (T,)), T.to(dtype))
    (pulled,) = cast.vjp((X,), W.to(dtype))
    assert pulled.dtype == torch.float64
    assert torch.equal(pulled, W.to(dtype).double())
    assert cast.curvature((X,), W[0].to(dtype), (T,)) == (None,)
    assert cast.rowwise((X,), 2, (True,))


def test_from_single_to_double_nothing_is_lost():
    x, t = X.float(), T.float()
    assert torch.equal(Cast(torch.float64).jvp((x,), (t,)).float(), t)
    assert Cast(torch.float64).vjp((x,), W)[0].dtype == torch.float32


def test_errors():
    with pytest.raises(ValueError, match="tangent of X is None"):
        Cast(torch.float32).jvp((X,), (None,))
