"""Products of matrices added in place, with factors laid out as a processor's libraries multiply them fastest.

A product a b is fastest where the rows of a and the columns of b are contiguous, so that both are read along the index that
is summed: with 64 to 1024 rows and columns of float64 by 3 to 25 % over b by rows, and by much more over a by columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALONE = 2**12
"""Entries from which the matrices of a stack are transposed one by one, which is several times faster."""


def by_columns(b: Tensor) -> Tensor:
    """Return matrices (..., k, j) with contiguous columns, copied where they lie otherwise; on an accelerator, as they are.

    >>> by_columns(torch.zeros(5, 2, 3)).stride()
    (6, 1, 2)
    """
    if b.device.type != "cpu" or b.mT.is_contiguous():
        return b
    if b.ndim != 3 or b.shape[-1] * b.shape[-2] < ALONE:
        return b.mT.contiguous().mT
    out = b.new_empty(b.mT.shape)
    for one, into in zip(b, out, strict=True):
        into.copy_(one.T)
    return out.mT


def stacked(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Return directions (S, ...) as matrices (S, *shape), or one direction as one matrix.

    >>> stacked(torch.zeros(1, 2, 3, 4), (6, 4)).shape, stacked(torch.zeros(2, 2, 3, 4), (6, 4)).shape
    (torch.Size([6, 4]), torch.Size([2, 6, 4]))
    """
    return t.reshape(*shape) if t.shape[0] == 1 else t.reshape(t.shape[0], *shape)


def add_product(out: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return out + a b, in out's memory, for one matrix or S of them; one of a and b may be a single matrix for all."""
    if a.ndim == b.ndim == 2:
        return a @ b if out is None else out.addmm_(a, b)
    if out is None and b.ndim == 2 and a.is_contiguous():
        return (a.reshape(-1, a.shape[-1]) @ b).reshape(*a.shape[:-1], -1)
    count = len(a) if a.ndim == 3 else len(b)
    a, b = (x.expand(count, *x.shape[-2:]) for x in (a, b))
    return torch.bmm(a, b) if out is None else out.baddbmm_(a, b)
