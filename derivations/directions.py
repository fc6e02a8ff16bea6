"""Batches of directions, walked a few at a time so that the scratch of an entrywise action stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

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
