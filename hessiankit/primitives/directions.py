"""Stacks of directions: broadcasting of tangents and covectors, parts that stay in a cache, products with matrices.

A product a b is fastest where the rows of a and the columns of b are contiguous, so that both are read along the index that
is summed: with 64 to 1024 rows and columns of float64 by 3 to 25 % over b by rows, and by much more over a by columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def joint_shape(*shapes: torch.Size) -> torch.Size:
    """Return the shape that broadcasts from these, which fit: ``torch.broadcast_shapes``, without its checks, in less time.

    >>> joint_shape(torch.Size([2, 1, 3]), torch.Size([4, 1]))
    torch.Size([2, 4, 3])
    """
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    ndim = max(map(len, shapes))
    aligned = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    return torch.Size(next((n for n in lengths if n != 1), 1) for lengths in zip(*aligned, strict=True))


def align(t: Tensor, shape: torch.Size, ndim: int) -> Tensor:
    """Return a tangent (S, *shape) with unit axes put behind S, so that it broadcasts like a value of ``ndim`` axes."""
    return t.reshape(t.shape[0], *(1,) * (ndim - len(shape)), *shape)


def unbroadcast(t: Tensor, shape: torch.Size) -> Tensor:
    """Return a covector (S, ...) summed over the axes along which a value of ``shape`` was repeated: (S, *shape)."""
    extra = t.ndim - 1 - len(shape)
    if extra:
        t = t.sum(dim=tuple(range(1, 1 + extra)))
    axes = tuple(i + 1 for i, n in enumerate(shape) if n == 1 and t.shape[i + 1] != 1)
    return t.sum(dim=axes, keepdim=True) if axes else t


def same_rows(inputs: Sequence[Tensor], axes: int, motion: Sequence[bool], shape: torch.Size | None = None) -> bool:
    """Tell whether the moving operands of a broadcasting operation have all of the leading axes of its output."""
    out = joint_shape(*(x.shape for x in inputs)) if shape is None else shape
    return all(x.ndim == len(out) and x.shape[:axes] == out[:axes] for x, m in zip(inputs, motion, strict=True) if m)


def add_at(out: Tensor, axis: int, at: Tensor, x: Tensor) -> Tensor:
    """Add entries along an axis to those of ``out`` at some indices (n,), in place, in the same order whenever it is called.

    An accelerator's ``index_add_`` adds in any order; this one sorts, and does not wait to compare indices with the length.

    >>> add_at(torch.zeros(1, 3), 1, torch.tensor([2, 2]), torch.tensor([[1.0, 2.0]])).tolist()
    [[0.0, 0.0, 3.0]]
    """
    if out.device.type == "cpu":
        return out.index_add_(axis, at, x)
    torch._index_put_impl_(out.movedim(axis, 0), (at,), x.movedim(axis, 0), True, True)
    return out


ON_AN_ACCELERATOR = 32
"""Factor of the entries treated together where calls cost, and large arrays are as fast as small ones."""


def together(entries: int, like: Tensor) -> int:
    """Return how many entries are treated together: as many as a processor's caches hold, or more on an accelerator.

    >>> together(4, torch.zeros(1)), together(4, torch.zeros(1, device="meta"))
    (4, 128)
    """
    return entries if like.device.type == "cpu" else entries * ON_AN_ACCELERATOR


CACHE_ENTRIES = 2**17
"""Entries of one part, about a megabyte of float64: it stays in a core's second-level cache through several passes."""


def parts(t: Tensor) -> Iterator[slice]:
    """Yield slices of the leading axis of ``t`` that together cover it, each of about ``CACHE_ENTRIES`` entries or of one row.

    Several passes over a large array cost as many trips to memory; over its parts, in turn, they cost one. On an
    accelerator there is one part: its memory is fast and its kernels want large arrays.

    >>> import torch
    >>> list(parts(torch.zeros(5, CACHE_ENTRIES // 2)))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    count = int(t.shape[0])
    row = t.numel() // count if count else 1
    step = count if t.device.type != "cpu" else max(1, CACHE_ENTRIES // max(1, row))
    for start in range(0, count, max(1, step)):
        yield slice(start, min(start + step, count))


def stacks(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield the same :func:`parts` of several stacks of directions, shaped like the first one; None stays None.

    >>> import torch
    >>> [(a.shape[0], b) for a, b in stacks(torch.zeros(3, 2), None)]
    [(3, None)]
    """
    first = tensors[0]
    assert first is not None
    if first.shape[0] == 1:
        yield tensors
        return
    for part in parts(first):
        yield tuple(None if t is None else t[part] for t in tensors)


ALONE = 2**12
"""Entries from which the matrices of a stack are transposed one by one, which is several times faster."""


def by_columns(b: Tensor) -> Tensor:
    """Return matrices (..., k, j) with contiguous columns, copied where they lie otherwise; on an accelerator, unchanged.

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
