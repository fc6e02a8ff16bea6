"""Inner products of vectors, also of vectors of which each process holds a piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from hessiankit.support.errors import InputError

_TOTAL: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("_TOTAL", default=None)


@contextmanager
def spread_over(total: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let vectors be pieces within the context: ``total`` returns the sum of a tensor over the processes that hold them."""
    token = _TOTAL.set(total)
    try:
        yield
    finally:
        _TOTAL.reset(token)


def summed(terms: Tensor) -> Tensor:
    """Return sums over a piece of vectors as sums over the whole of them.

    >>> with spread_over(lambda terms: 2 * terms):
    ...     inner(torch.ones(3), torch.ones(3))
    6.0
    """
    total = _TOTAL.get()
    return terms if total is None else total(terms)


def check_sums(caller: str, operator: Any) -> None:
    """Raise InputError for an operator of pieces of vectors, unless inner products are summed over the processes."""
    if getattr(operator, "of_pieces", False) and _TOTAL.get() is None:
        raise InputError(
            f"{caller}: the operator is of a sharded model, and this process holds a piece of each vector; use operator @ v, "
            "operator.solve(b) and hessiankit.training.distributed.top_eigenvalues"
        )


def inner(u: Tensor, v: Tensor) -> float:
    """Return <u, v>, summed in float64 where the device has it."""
    return float(summed((u * v).sum(dtype=u.dtype if u.device.type == "mps" else torch.float64)))


def norm(v: Tensor) -> float:
    """Return |v|."""
    return math.sqrt(inner(v, v))


def entries(v: Tensor) -> int:
    """Return the number of entries of a vector."""
    return int(summed(torch.tensor(v.numel(), device=v.device)))
