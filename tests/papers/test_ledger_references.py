"""The derivatives that the rows share, and what confirms them."""

from __future__ import annotations

import pytest
import torch

from papers.autodiff import confirmations, hessian_of, jacobian_of, kept
from papers.notation import if_it_conforms


def test_products_that_do_not_conform():
    A, B = torch.ones(2, 3), torch.ones(2, 3)
    assert if_it_conforms(torch.matmul, A, B).numel() == 0
    assert if_it_conforms(torch.matmul, A, B.T).shape == (2, 2)
    with pytest.raises(RuntimeError, match="singular"):
        if_it_conforms(torch.linalg.inv, torch.zeros(2, 2))


def test_derivatives_of_functions_known_by_hand():
    x, y = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3.0, 5.0], dtype=torch.float64)
    assert jacobian_of(lambda a, b: a * b**2, x, y, wrt=1).tolist() == [[6.0, 0.0], [0.0, 20.0]]
    assert hessian_of(lambda a, b: (a * b**2).sum(), x, y, wrt=(0, 1)).tolist() == [[6.0, 0.0], [0.0, 10.0]]
    assert hessian_of(lambda a: a.sum(), x).tolist() == [[0.0, 0.0], [0.0, 0.0]]


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
