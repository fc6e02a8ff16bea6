"""Derivatives by automatic differentiation, reverse over reverse, laid out row-wise as the papers have them.

They are the independent route of the rows: they share nothing with ``derivations``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def jacobian_of(function: Callable[..., Tensor], *arguments: Tensor, wrt: int = 0) -> Tensor:
    """Return d vec_r(f) / d vec_r(x) for the argument ``wrt``, of shape (numbers in f) x (numbers in x).

    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> jacobian_of(lambda x: x**2, x).tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    inputs = _inputs(arguments)
    return _rows(function(*inputs).reshape(-1), inputs[wrt], False).detach()


def hessian_of(function: Callable[..., Tensor], *arguments: Tensor, wrt: tuple[int, int] = (0, 0)) -> Tensor:
    """Return the second derivative, of shape (numbers in f times numbers in x_i) x (numbers in x_j).

    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> hessian_of(lambda x: x[0] * x[1] ** 2, x).tolist()
    [[0.0, 4.0], [4.0, 2.0]]
    """
    inputs = _inputs(arguments)
    first = _rows(function(*inputs).reshape(-1), inputs[wrt[0]], True)
    return _rows(first.reshape(-1), inputs[wrt[1]], False).detach()


def _inputs(arguments: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in arguments]


def _rows(values: Tensor, x: Tensor, again: bool) -> Tensor:
    rows = []
    for value in values:
        row = None
        if value.requires_grad:
            (row,) = torch.autograd.grad(value, x, retain_graph=True, create_graph=again, allow_unused=True)
        rows.append(torch.zeros_like(x).reshape(-1) if row is None else row.reshape(-1))
    return torch.stack(rows)
