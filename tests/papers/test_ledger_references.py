"""The points and derivatives that the rows of Closing the Curvature Gap share."""

from __future__ import annotations

import pytest
import torch

from papers.autodiff import confirmations, hessian_of, jacobian_of, kept
from papers.curvature_gap.point import EQUAL, GENERIC, WEIGHTS, point
from papers.notation import if_it_conforms


def test_a_function_that_does_not_depend_on_its_argument():
    assert hessian_of(lambda x: torch.ones(2, dtype=x.dtype), torch.zeros(3, dtype=torch.float64)).abs().max() == 0


def test_sizes_of_the_points():
    assert len(set(GENERIC)) == 4
    assert len(set(EQUAL)) == 1
    p = point(0)
    assert [p.n(i) for i in WEIGHTS] == [20, 20, 8, 8, 16]
    assert p.second("S", "1", "Q").shape == (12 * 20, 8)


def test_uniform_points_have_uniform_attention():
    p = point(0, uniform=True)
    assert torch.allclose(p.at.A, torch.full((3, 3), 1 / 3, dtype=torch.float64), atol=1e-15)
    assert all(p.weights[k].abs().max() > 0 for k in ("Q", "K"))


def test_products_that_do_not_conform():
    A, B = torch.ones(2, 3), torch.ones(2, 3)
    assert if_it_conforms(torch.matmul, A, B).numel() == 0
    assert if_it_conforms(torch.matmul, A, B.T).shape == (2, 2)
    with pytest.raises(RuntimeError, match="singular"):
        if_it_conforms(torch.linalg.inv, torch.zeros(2, 2))


def test_a_derivative_of_zero_is_confirmed_to_the_rounding_of_differences():
    with confirmations() as errors:
        hessian_of(lambda x: 100 * x.softmax(0).sum(), torch.linspace(-1, 2, 7, dtype=torch.float64))
    assert len(errors) == 1
    assert errors[0] < 1e-5


def test_confirmations_see_a_wrong_derivative():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] ** 2 * g  # 3 x^2 is right

    x = torch.tensor([0.5, 2.0], dtype=torch.float64)
    with confirmations() as errors:
        jacobian_of(lambda x: x**3, x)
        hessian_of(lambda x: (x**4).sum(), x)
    assert len(errors) == 2
    assert max(errors) < 1e-7
    store = {}
    for _ in range(2):
        with confirmations() as errors:
            kept(store, "cube", lambda: torch.stack([jacobian_of(lambda v: Cube.apply(v), x)]))
        assert errors[0] > 0.1
