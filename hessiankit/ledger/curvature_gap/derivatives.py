"""Reverse over reverse, the rows of a derivative taken together: what ``hessiankit.ledger.autodiff`` gives one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def jacobian_of(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return d vec_r(f) / d vec_r(x)^T, of shape (numbers in f) x (numbers in x).

    >>> jacobian_of(lambda x: x**2, torch.tensor([1.0, 2.0], dtype=torch.float64)).tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    x = x.detach().clone().requires_grad_()
    return _rows(function(x), x, again=False).detach()


def hessian_of(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return the second derivative, of shape (numbers in f times numbers in x) x (numbers in x).

    >>> hessian_of(lambda x: x[0] * x[1] ** 2, torch.tensor([1.0, 2.0], dtype=torch.float64)).tolist()
    [[0.0, 4.0], [4.0, 2.0]]
    """
    x = x.detach().clone().requires_grad_()
    return _rows(_rows(function(x), x, again=True), x, again=False).detach()


def _rows(values: Tensor, x: Tensor, *, again: bool) -> Tensor:
    values = values.reshape(-1)
    if not values.requires_grad:
        return torch.zeros(values.numel(), x.numel(), dtype=x.dtype)
    each = torch.eye(values.numel(), dtype=values.dtype)
    (rows,) = torch.autograd.grad(values, x, each, is_grads_batched=True, create_graph=again, materialize_grads=True)
    return rows.reshape(values.numel(), x.numel())
