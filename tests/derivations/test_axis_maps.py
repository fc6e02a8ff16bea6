"""Matrices along axes, against torch.func on sums written out."""

from __future__ import annotations

import pytest
import torch
from action_reference import check_actions
from second_order_reference import random_point

from derivations.axis_maps import AxisMaps

X, M, K = random_point(67, X=(2, 3, 4), M=(5, 3), K=(2, 4)).values()
CASES = {
    "last": (AxisMaps((-1,), (K,)), "bij,qj->biq", (K,)),
    "middle": (AxisMaps((1,), (M,)), "bij,pi->bpj", (M,)),
    "both": (AxisMaps((1, 2), (M, K)), "bij,pi,qj->bpq", (M, K)),
    "both, from the end": (AxisMaps((-1, -2), (K, M)), "bij,qj,pi->bpq", (K, M)),
}


@pytest.mark.parametrize("name", CASES)
def test_actions(name):
    primitive, equation, matrices = CASES[name]
    check_actions(primitive, lambda x: torch.einsum(equation, x, *matrices), (X,), [0])
    assert primitive.is_linear


def test_rows():
    assert AxisMaps((-1,), (K,)).rowwise((X,), 2, (True,))
    assert not AxisMaps((1,), (M,)).rowwise((X,), 2, (True,))
    assert AxisMaps((1, 2), (M, K)).rowwise((X,), 1, (True,))


def test_errors():
    with pytest.raises(ValueError, match="tangent of X is None"):
        AxisMaps((0,), (M,)).jvp((X,), (None,))
