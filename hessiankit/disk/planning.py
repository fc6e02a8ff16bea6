"""Before the work: how samples are cut into chunks and the matrix into panels, and what that will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessiankit.disk.accounting import Cost, measure
from hessiankit.engine.assembly import CHUNK, is_split, next_step
from hessiankit.errors import OutOfMemoryError, TraceError
from hessiankit.request.loss_trace import LossTrace, loss_trace, normalizer_of
from hessiankit.request.own_call import reached
from hessiankit.request.task import Task, available_memory, check_memory, gib

PANEL = 256 * 2**20  # bytes of the rows of the matrix that are computed before they are written
KEPT = 512 * 2**20  # bytes of curvature that is kept from one panel to the next
MEASURED = 8  # batches of different lengths that are measured; the others count as the next larger one


@dataclass(frozen=True)
class Chunk:
    """Some samples of one batch, treated together; ``whole`` if they are all of it."""

    batch: int
    start: int
    stop: int
    whole: bool


@dataclass(frozen=True)
class Panels:
    """Panels (rows, columns) of a symmetric matrix, as positions of parameters, and the bytes of the largest."""

    parts: tuple[tuple[range, range], ...]
    largest: int


@dataclass(frozen=True)
class Plan:
    """Chunks with their costs, and panels."""

    chunks: tuple[Chunk, ...]
    costs: tuple[Cost, ...]
    panels: Panels
    fallbacks: tuple[str, ...]

    @property
    def kept(self) -> int:
        """Number of chunks, the first ones, whose curvature is kept from panel to panel."""
        if len(self.panels.parts) == 1:
            return 0
        total = 0
        for n, cost in enumerate(self.costs):
            total += cost.kept_bytes
            if total > KEPT:
                return n
        return len(self.costs)

    @property
    def workspace(self) -> int:
        """Bytes needed besides the matrix, or one panel of it."""
        kept = sum(cost.kept_bytes for cost in self.costs[: self.kept])
        return kept + max((cost.peak_bytes for cost in self.costs), default=0)

    def total(self, what: str) -> float:
        """Return the sum over chunks, and over panels where curvature is not kept, of "flops", "moved" or "operations"."""
        again = len(self.panels.parts) - 1
        total = float(sum(getattr(cost, what) for cost in self.costs))
        return total + again * sum(getattr(cost, f"{what}_again") for cost in self.costs[self.kept :])


def panels(sizes: Sequence[int], itemsize: int, limit: int) -> Panels:
    """Cut the upper half of a symmetric matrix into panels of at most ``limit`` bytes, if no block is larger.

    Rows of whole parameters, and all columns not before them; of a parameter too large for that, some columns at a time.

    >>> panels([2, 3, 1], 1, 16).parts
    ((range(0, 1), range(0, 3)), (range(1, 3), range(1, 3)))
    >>> panels([2, 3], 1, 6).parts
    ((range(0, 1), range(0, 1)), (range(0, 1), range(1, 2)), (range(1, 2), range(1, 2)))
    """
    parts: list[tuple[range, range]] = []
    largest, start, n = 0, 0, len(sizes)
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
            largest = max(largest, height * across * itemsize)
            left = right
        start = stop
    return Panels(tuple(parts), largest)


def make_plan(tasks: Sequence[Task], batch_size: int | None, limit: int | None) -> Plan:
    """Measure a few samples, by their shapes, and cut the work.

    Args:
        tasks: One request a batch.
        batch_size: Samples treated at once, or None.
        limit: Bytes of a panel, or None for the whole matrix at once.
    """
    first = tasks[0]
    sizes, slices = [p.numel() for p in tasks[0].parameters.values()], tasks[0].slices
    cut = (
        panels(sizes, first.dtype.itemsize, limit) if limit is not None else Panels(((range(len(sizes)), range(len(sizes))),), 0)
    )
    keep = len(cut.parts) > 1
    known: dict[Any, tuple[int, Cost, tuple[str, ...]] | None] = {}
    by_size = sorted(range(len(tasks)), key=lambda n: -_entries(tasks[n]))
    last: tuple[int, Cost, tuple[str, ...]] | None = None
    found: dict[int, tuple[int, Cost, tuple[str, ...]] | None] = {}
    for n in by_size:
        key = _signature(tasks[n])
        if key not in known:
            known[key] = _measured(tasks[n], batch_size, slices, first.dtype, keep=keep) if len(known) < MEASURED else last
        found[n] = last = known[key]
    chunks: list[Chunk] = []
    costs: list[Cost] = []
    fallbacks: list[str] = []
    for n, task in enumerate(tasks):
        one = found[n]
        if one is None:  # nothing in it depends on the parameters
            continue
        step, cost, names = one
        fallbacks += names
        for start in range(0, task.batch, step):
            chunks.append(Chunk(n, start, min(start + step, task.batch), step >= task.batch))
            costs.append(cost)
    return Plan(tuple(chunks), tuple(costs), cut, tuple(dict.fromkeys(fallbacks)))


def _measured(
    task: Task, batch_size: int | None, slices: Mapping[str, slice], dtype: torch.dtype, *, keep: bool
) -> tuple[int, Cost, tuple[str, ...]] | None:
    """Return samples a chunk, what a chunk costs, and what is differentiated automatically; None if nothing moves."""
    normalizer, batch = normalizer_of(task), task.batch
    with torch.no_grad():
        split = is_split(task, batch_size)
        step = batch if not split else min(batch_size or 1, batch)
        try:
            traced = loss_trace(task.part(slice(0, step)) if split else task, normalizer)
        except TraceError:
            if reached(task):
                raise
            return None
        cost = _cost(traced, slices, dtype, keep)
        if split and batch_size is None and (more := min(batch, next_step(step, cost.sweep_bytes))) > step:
            step = more
            cost = _cost(loss_trace(task.part(slice(0, step)), normalizer), slices, dtype, keep)
    return step, cost, traced.trace.fallbacks


def _cost(traced: LossTrace, slices: Mapping[str, slice], dtype: torch.dtype, keep: bool) -> Cost:
    """Return what a chunk costs, by its shapes; an operation whose shapes depend on its entries is run for it."""
    limit = KEPT if keep else None
    try:
        return measure(traced, slices, dtype, keep=limit)
    except (RuntimeError, NotImplementedError, TypeError):
        return measure(traced, slices, dtype, keep=limit, shapes=False)


def check_matrix(who: str, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise OutOfMemoryError if the matrix and the least work space do not fit; a look at the first chunk says how much it is."""
    check_memory(who, size, dtype, device, copies=1, workspace=min(CHUNK, size * size * dtype.itemsize))


def check_workspace(who: str, need: int, matrix: int, device: torch.device, free: int | None = None) -> None:
    """Raise OutOfMemoryError if work space and matrix do not fit in what is free, or was before they were begun."""
    free = available_memory(device) if free is None else free
    if need + matrix > free:
        raise OutOfMemoryError(
            f"{who}: the derivatives of one chunk of samples take {gib(need)} beside {gib(matrix)} of the matrix, but only "
            f"{gib(free)} are free on {device}. Pass batch_size=1, shorter sequences, fewer params=[...], or use "
            "hessian_operator, which needs neither"
        )


def _entries(task: Task) -> int:
    return sum(x.numel() for x in torch.utils._pytree.tree_leaves(task.inputs) if isinstance(x, Tensor))


def _signature(task: Task) -> Any:
    leaves = torch.utils._pytree.tree_leaves((task.inputs, task.target))
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves), normalizer_of(task) > 0
