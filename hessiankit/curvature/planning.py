"""Plans: the cost of samples in chunks, from shapes, and the matrix in panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hessiankit.engine.parts import is_split, parts
from hessiankit.engine.product_rows import product_cost
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.support.errors import TraceError
from hessiankit.support.memory import byte_size, check_room

Panel: TypeAlias = tuple[range, range]
"""Rows and columns of a symmetric matrix, as positions of parameters."""
PANEL = 256 * 2**20  # bytes of the rows of the matrix that are computed before they are written
MEASURED = 8  # batches of different lengths that are measured; the others count as the next larger one


@dataclass(frozen=True)
class Cost:
    """Cost of one chunk of samples."""

    samples: int
    flops: float  # of matrix products, a multiply-add counted as two
    moved: float  # bytes that operations read and write
    operations: int
    bytes: int  # alive at once, the matrix not counted
    fallbacks: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The cost of each chunk of samples, and a matrix in panels of at most ``limit`` bytes, if no block is larger."""

    costs: tuple[Cost, ...]
    sizes: tuple[int, ...]  # of the parameters
    itemsize: int
    limit: float

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """The panels."""
        return panels(self.sizes, self.itemsize, self.limit)

    @property
    def largest(self) -> int:
        """Bytes of the largest panel."""
        blocks = ((sum(self.sizes[at.start : at.stop]) for at in panel) for panel in self.panels)
        return self.itemsize * max(map(math.prod, blocks))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Operations without a closed form."""
        return tuple(dict.fromkeys(name for cost in self.costs for name in cost.fallbacks))

    @property
    def workspace(self) -> int:
        """Bytes needed besides the matrix, or one panel of it."""
        return max((cost.bytes for cost in self.costs), default=0)

    def total(self, what: str) -> float:
        """Return the sum over chunks of "flops", "moved" or "operations"; rows are swept once per panel that contains them."""
        rows = {part.start for part, _ in self.panels}
        return float(sum(getattr(cost, what) for cost in self.costs)) * len(self.panels) / max(1, len(rows))


def panels(sizes: Sequence[int], itemsize: int, limit: float) -> tuple[Panel, ...]:
    """Divide the upper half of a symmetric matrix into panels of at most ``limit`` bytes, if no block is larger.

    Rows of whole parameters, and all columns not before them; of a parameter too large for that, some columns at a time.

    >>> panels([2, 3, 1], 1, 16)
    ((range(0, 1), range(0, 3)), (range(1, 3), range(1, 3)))
    >>> panels([2, 3], 1, 6)
    ((range(0, 1), range(0, 1)), (range(0, 1), range(1, 2)), (range(1, 2), range(1, 2)))
    """
    parts: list[Panel] = []
    start, n = 0, len(sizes)
    while start < n:
        width = sum(sizes[start:])
        stop, height = start + 1, sizes[start]
        while stop < n and (height + sizes[stop]) * width * itemsize <= limit:
            height, stop = height + sizes[stop], stop + 1
        left = start
        while left < n:
            right, across = left + 1, sizes[left]
            while right < n and (stop > start + 1 or height * (across + sizes[right]) * itemsize <= limit):
                across, right = across + sizes[right], right + 1
            parts.append((range(start, stop), range(left, right)))
            left = right
        start = stop
    return tuple(parts)


def make_plan(batches: Sequence[BatchLoss], batch_size: int | None, limit: float = math.inf) -> Plan:
    """Measure a few samples, by their shapes, and divide the matrix into panels of ``limit`` bytes."""
    by_signature: dict[Any, Cost | None] = {}
    last: Cost | None = None
    costs: list[Cost] = []
    for batch in sorted(batches, key=_entries, reverse=True):
        key = _signature(batch)
        if key not in by_signature:
            by_signature[key] = _measured(batch, batch_size) if len(by_signature) < MEASURED else last
        last = by_signature[key]
        if last is not None:
            costs += [last] * math.ceil(batch.n_samples / last.samples)
    sizes = tuple(p.numel() for p in batches[0].parameters.values())
    return Plan(tuple(costs), sizes, batches[0].dtype.itemsize, limit)


def _measured(batch: BatchLoss, batch_size: int | None) -> Cost | None:
    """Return the cost of a chunk of a batch; None if the loss does not depend on the parameters."""
    split = is_split(batch, batch_size)
    with batch.at(), torch.no_grad():
        try:
            part = next(parts(batch, batch_size, split=split))
        except TraceError:
            if batch.reached():
                raise
            return None
    trace, cost, itemsize = part.paths.trace, part.cost, batch.dtype.itemsize
    if part.is_long:
        products = product_cost(trace, batch.size, itemsize)
        values = 4 * itemsize * sum(x.numel() for x in trace.values)
        bytes_moved, bytes_taken = itemsize * products.passes, products.bytes + values
        return Cost(part.stop, 2 * products.multiplications, bytes_moved, products.operations, bytes_taken, trace.fallbacks)
    bytes_moved = itemsize * cost.passes
    return Cost(part.stop, 2 * cost.multiplications, bytes_moved, cost.operations, part.bytes, trace.fallbacks)


def check_workspace(need: int, matrix: int, device: torch.device, free: int | None = None) -> None:
    """Raise OutOfMemoryError if workspace and matrix exceed the free memory (``free``, or what is free now)."""
    parts = f"the derivatives of one chunk of samples, {byte_size(need)}, and the matrix, {byte_size(matrix)},"
    remedy = "pass batch_size=1, shorter sequences, fewer params=[...], or use hessian_operator, which needs neither"
    check_room("hessian", need + matrix, parts, device, remedy, free=free)


def _entries(batch: BatchLoss) -> int:
    return sum(x.numel() for x in torch.utils._pytree.tree_leaves((batch.args, batch.kwargs)) if isinstance(x, Tensor))


def _signature(batch: BatchLoss) -> Any:
    leaves = torch.utils._pytree.tree_leaves((batch.args, batch.kwargs, batch.target))
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves), batch.normalizer > 0
