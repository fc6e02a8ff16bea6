"""Tangents and covectors of values that an operation repeats along axes."""

from __future__ import annotations

from collections.abc import Sequence

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
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    return torch.Size(next((n for n in lengths if n != 1), 1) for lengths in zip(*padded, strict=True))


def align(t: Tensor, shape: torch.Size, ndim: int) -> Tensor:
    """Return a tangent (S, *shape) with unit axes put behind S, so that it broadcasts like a value of ``ndim`` axes."""
    return t.reshape(t.shape[0], *(1,) * (ndim - len(shape)), *shape)


def unbroadcast(t: Tensor, shape: torch.Size) -> Tensor:
    """Return a covector (S, ...) summed over the axes along which a value of ``shape`` was repeated: (S, *shape)."""
    extra = t.ndim - 1 - len(shape)
    if extra:
        t = t.sum(dim=tuple(range(1, 1 + extra)))
    repeated = tuple(i + 1 for i, n in enumerate(shape) if n == 1 and t.shape[i + 1] != 1)
    return t.sum(dim=repeated, keepdim=True) if repeated else t


def same_rows(inputs: Sequence[Tensor], axes: int, moving: Sequence[bool], shape: torch.Size | None = None) -> bool:
    """Tell whether the moving operands of a broadcasting operation have all of the leading axes of its output."""
    out = joint_shape(*(x.shape for x in inputs)) if shape is None else shape
    return all(x.ndim == len(out) and x.shape[:axes] == out[:axes] for x, m in zip(inputs, moving, strict=True) if m)
