"""Derivatives by automatic differentiation, reverse over reverse, laid out row-wise as the papers have them.

They are the independent route of the rows: they share nothing with ``derivations``. Within ``confirmations`` each of them
is compared in turn, along random directions, with central differences of the function's values, without autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_FOUND: ContextVar[list[float] | None] = ContextVar("confirmations", default=None)


def kept(store: dict[Any, tuple[Tensor, list[float]]], key: Any, compute: Callable[[], Tensor]) -> Tensor:
    """Return a derivative from a store, computed once; its comparisons count in every row that reads it."""
    if key not in store:
        with confirmations() as errors:
            store[key] = (compute(), errors)
    value, errors = store[key]
    found = _FOUND.get()
    if found is not None:
        found.extend(errors)
    return value


@contextmanager
def confirmations() -> Iterator[list[float]]:
    """Compare every derivative taken inside with central differences; the list gets the relative errors."""
    found: list[float] = []
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)


def jacobian_of(function: Callable[..., Tensor], *arguments: Tensor, wrt: int = 0) -> Tensor:
    """Return d vec_r(f) / d vec_r(x) for the argument ``wrt``, of shape (numbers in f) x (numbers in x).

    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> jacobian_of(lambda x: x**2, x).tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    inputs = _inputs(arguments)
    values = function(*inputs)
    J = _rows(values.reshape(-1), inputs[wrt], False).detach()
    (v,) = _directions(inputs[wrt])
    _confirm(values, J @ v.reshape(-1), lambda h: _difference(function, inputs, [(wrt, v)], h))
    return J


def hessian_of(function: Callable[..., Tensor], *arguments: Tensor, wrt: tuple[int, int] = (0, 0)) -> Tensor:
    """Return the second derivative, of shape (numbers in f times numbers in x_i) x (numbers in x_j).

    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> hessian_of(lambda x: x[0] * x[1] ** 2, x).tolist()
    [[0.0, 4.0], [4.0, 2.0]]
    """
    inputs = _inputs(arguments)
    values = function(*inputs)
    first = _rows(values.reshape(-1), inputs[wrt[0]], True)
    H = _rows(first.reshape(-1), inputs[wrt[1]], False).detach()
    u, v = _directions(inputs[wrt[0]], inputs[wrt[1]])
    along = H.reshape(-1, u.numel(), v.numel()) @ v.reshape(-1) @ u.reshape(-1)
    _confirm(values, along, lambda h: _difference(function, inputs, [(wrt[0], u), (wrt[1], v)], h))
    return H


def _directions(*inputs: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) / x.numel() ** 0.5 for x in inputs]


@torch.no_grad()
def _difference(function: Callable[..., Tensor], inputs: list[Tensor], steps: list[tuple[int, Tensor]], h: float) -> Tensor:
    """Return the central difference along one direction, or the mixed one along two."""
    if not steps:
        return function(*inputs).reshape(-1)
    (k, v), rest = steps[0], steps[1:]
    sides = ([x + sign * h * v if i == k else x for i, x in enumerate(inputs)] for sign in (1, -1))
    up, down = (_difference(function, side, rest, h) for side in sides)
    return (up - down) / (2 * h)


def _confirm(values: Tensor, derivative: Tensor, difference: Callable[[float], Tensor]) -> None:
    found = _FOUND.get()
    if found is None or not derivative.numel():
        return
    least = max(1e-6 * float(values.detach().abs().max()), 1e-9)  # of a derivative of zero, differences leave rounding
    best, size = math.inf, max(float(derivative.abs().max()), least)
    for h in (1e-2, 1e-3, 1e-4, 1e-6):  # a step may cross a kink
        extrapolated = (4 * difference(h / 2) - difference(h)) / 3
        best = min(best, float((extrapolated - derivative).abs().max()) / size)
    found.append(best)


def _inputs(arguments: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in arguments]


def _rows(values: Tensor, x: Tensor, again: bool) -> Tensor:
    if not values.requires_grad:
        return torch.zeros(values.numel(), x.numel(), dtype=x.dtype)
    each = torch.eye(values.numel(), dtype=values.dtype)
    (rows,) = torch.autograd.grad(values, x, each, is_grads_batched=True, create_graph=again, materialize_grads=True)
    return rows.reshape(values.numel(), x.numel())
