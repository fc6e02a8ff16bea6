"""The symmetric P x P matrix that blocks are added to."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hessiankit.engine.jacobians import ParameterJacobian
from hessiankit.engine.kernel_sums import SINGLE, mirror
from hessiankit.support.kernels import kernels

Write: TypeAlias = Callable[[Tensor], float | None]  # adds something to a block; returns how far from symmetric it was, if it saw

EVERY = slice(None)
HUGE = 2**21  # bytes from which large pages pay: they arrive several times faster than small ones
TILE = 512
SPARE = 2**28  # bytes of a matrix up to which its memory is kept for the next one
KEPT = 2  # matrices whose memory is kept: in a loop the last result is alive while the next one is computed


def zeros(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an n x n matrix of zeros, in large pages where the system has them.

    >>> zeros(2, torch.float64, torch.device("cpu")).tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    pages = _pages(n, dtype, device)
    return torch.zeros(n, n, dtype=dtype, device=device) if pages is None else _on(pages, n, dtype)


def _pages(n: int, dtype: torch.dtype, device: torch.device) -> mmap.mmap | None:
    size = n * n * dtype.itemsize
    if device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    pages = mmap.mmap(-1, size + 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zero when first touched
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _on(pages: mmap.mmap, n: int, dtype: torch.dtype) -> Tensor:
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE  # a large page starts at a multiple of its size
    return torch.frombuffer(pages, dtype=dtype, count=n * n, offset=start).reshape(n, n)


class MatrixMemory:
    """Memory for n x n matrices, one after the other: that of a matrix that is gone is used again.

    New pages arrive zeroed by the system, which takes longer than to write into old ones.

    Args:
        size: n.
        dtype: Of the entries.
        device: Where they are kept.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._dtype, self._device = size, dtype, device
        self._kept: list[tuple[mmap.mmap, StorageWeakRef]] = []

    def again(self) -> Tensor | None:
        """Return a matrix in memory of one that is gone, whose entries it has; None where there is none."""
        for k, (pages, reference) in enumerate(self._kept):
            if reference.expired():
                found = _on(pages, self._size, self._dtype)
                self._kept[k] = (pages, StorageWeakRef(found.untyped_storage()))
                return found
        return None

    def new(self) -> Tensor:
        """Return a matrix in new memory."""
        fresh = _pages(self._size, self._dtype, self._device)
        if fresh is None:
            return torch.empty(self._size, self._size, dtype=self._dtype, device=self._device)
        found = _on(fresh, self._size, self._dtype)
        if len(self._kept) < KEPT and len(fresh) < SPARE:
            self._kept.append((fresh, StorageWeakRef(found.untyped_storage())))
        return found


class SymmetricStorage:
    """A symmetric matrix: the blocks (i, j) with i not after j are added to, and mirrored at the end.

    Args:
        slices: Rows of each parameter, one after the other.
        dtype: Of the entries.
        device: Where they are kept.
        data: The matrix, zero, if there is one.
    """

    def __init__(self, slices: Mapping[str, slice], dtype: torch.dtype, device: torch.device, data: Tensor | None = None) -> None:
        self.slices = dict(slices)
        size = max((rows.stop for rows in self.slices.values()), default=0)
        self.data = zeros(size, dtype, device) if data is None else data
        self.order = {name: n for n, name in enumerate(self.slices)}
        self.computed = dtype  # of what writes add: a module may compute in a wider type than its parameters
        self.is_finite = True  # as far as mirror() has seen
        self.skew = 0.0  # the largest of what writes have returned

    def wants(self, i: str, j: str) -> bool:
        """Tell whether the block of two parameters is stored."""
        return True

    def block(self, i: str, j: str) -> Tensor:
        """Return the block of two parameters; if j comes before i, that of (j, i), transposed."""
        if self.order[i] > self.order[j]:
            return self.block(j, i).T
        return self.data[self.slices[i], self.slices[j]]

    def add(self, u: ParameterJacobian, v: ParameterJacobian, write: Write, columns: slice = EVERY) -> None:
        """Call ``write`` to add to the block of the parameters of (u, v), or to some of its columns."""
        if self.wants(u.parameter, v.parameter):
            skew = write_block(self.block(u.parameter, v.parameter)[:, columns], u.at, v.at, write, self.computed)
            self.skew = max(self.skew, skew or 0.0)

    def add_both(self, u: ParameterJacobian, v: ParameterJacobian, write: Write, columns: slice = EVERY) -> None:
        """Add what ``write`` adds, and its transpose, to the block of one parameter that (u, v) share, or to columns of it."""
        if not self.wants(u.parameter, v.parameter):
            return
        block = self.block(u.parameter, v.parameter)
        part = block.new_zeros(u.size, len(range(v.size)[columns]), dtype=self.computed)
        write(part)
        write_block(block[:, columns], u.at, v.at, partial(_add, part), self.computed)
        write_block(block[columns], v.at, u.at, partial(_add, part.T), self.computed)

    def mirror(self) -> float:
        """Fill the lower half.

        Return the largest |H - H^T| of the blocks (i, i), which are averaged, relative to the largest diagonal entry; or of the
        curvature lifted to one, relative to its own, where that was averaged before.
        """
        library = kernels()
        if library is not None and self.data.is_cpu and self.data.dtype in SINGLE and self.slices:
            bounds = [0, *(rows.stop for rows in self.slices.values())]
            apart, self.is_finite = mirror(library, self.data, bounds)
            return max(apart, self.skew)
        worst = largest = 0.0
        for rows in self.slices.values():
            upper = self.data[rows, rows.start :]
            if not upper.numel():
                continue
            worst = max(worst, _average(upper[:, : upper.shape[0]]))
            self.is_finite &= math.isfinite(float(upper.sum()))
            largest = max(largest, float(upper.diagonal().abs().max()))
            _copy_transposed(upper[:, upper.shape[0] :], self.data[rows.stop :, rows])
        return max(worst / largest if largest else 0.0, self.skew)


def _average(square: Tensor) -> float:
    worst, n = 0.0, square.shape[0]
    step = max(1, 2**16 // max(n, 1))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        upper, lower = square[rows, start:], square[start:, rows].T
        worst = max(worst, float((upper - lower).abs_().max()))
        mean = (upper + lower).mul_(0.5)
        square[rows, start:] = mean
        square[start:, rows] = mean.T
    return worst


class Panel(SymmetricStorage):
    """Some blocks (i, j) of a symmetric matrix: i among the parameters ``rows``, j among ``columns`` and not before i.

    Args:
        slices: Rows of each parameter in the whole matrix.
        rows: Positions in ``slices``, consecutive.
        columns: The same, none before ``rows``; either ``columns`` starts where ``rows`` do, or the two are disjoint.
        dtype: Of the entries.
        device: Where they are kept.
    """

    def __init__(
        self, slices: Mapping[str, slice], rows: range, columns: range, dtype: torch.dtype, device: torch.device
    ) -> None:
        names, cuts = list(slices), list(slices.values())
        self.order = {name: n for n, name in enumerate(names)}
        self.rows, self.columns = rows, columns
        self.top = slice(cuts[rows[0]].start, cuts[rows[-1]].stop)
        self.left = slice(cuts[columns[0]].start, cuts[columns[-1]].stop)
        self.slices = dict(slices)
        self.data = torch.zeros(self.top.stop - self.top.start, self.left.stop - self.left.start, dtype=dtype, device=device)
        self.computed = dtype
        self.is_finite = True
        self.skew = 0.0

    def wants(self, i: str, j: str) -> bool:
        first, last = sorted((self.order[i], self.order[j]))
        return first in self.rows and last in self.columns

    def block(self, i: str, j: str) -> Tensor:
        """Return the block of two parameters, if it is here."""
        if self.order[i] > self.order[j]:
            return self.block(j, i).T
        rows, columns = self.slices[i], self.slices[j]
        top, left = self.top.start, self.left.start
        return self.data[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]

    def mirror(self) -> float:
        """Average the blocks (i, i), and fill the blocks (j, i) whose rows are here; return the largest |H - H^T|."""
        worst = 0.0
        for name, n in self.order.items():
            if n in self.rows and n in self.columns:
                block = self.block(name, name)
                worst = max(worst, _average(block) if block.numel() else 0.0)
                below = slice(self.slices[name].stop - self.top.start, self.data.shape[0])
                across = slice(self.slices[name].start - self.left.start, self.slices[name].stop - self.left.start)
                self.data[below, across] = self.data[across, below].T
        self.is_finite = math.isfinite(float(self.data.sum()))
        return max(worst, self.skew * self.largest())

    def largest(self) -> float:
        """Return the largest diagonal entry of the whole matrix that is here."""
        diagonal = self.data.diagonal() if self.top.start == self.left.start else self.data[:0, 0]
        return float(diagonal.abs().max()) if diagonal.numel() else 0.0


class RecordedBlocks:
    """A recording of what is added to a symmetric matrix, which is replayed for one panel after another."""

    def __init__(self) -> None:
        self.pairs: list[tuple[ParameterJacobian, ParameterJacobian, Write, slice, bool]] = []
        self.computed: torch.dtype | None = None

    def wants(self, i: str, j: str) -> bool:
        """Return True: every block is recorded."""
        return True

    def add(self, u: ParameterJacobian, v: ParameterJacobian, write: Write, columns: slice = EVERY) -> None:
        """Record a write to a block."""
        self.pairs.append((u, v, write, columns, False))

    def add_both(self, u: ParameterJacobian, v: ParameterJacobian, write: Write, columns: slice = EVERY) -> None:
        """Record a write of a block and its transpose."""
        self.pairs.append((u, v, write, columns, True))

    def replay(self, matrix: SymmetricStorage) -> None:
        """Add everything that a matrix stores to it."""
        matrix.computed = self.computed or matrix.computed
        for u, v, write, columns, both in self.pairs:
            (matrix.add_both if both else matrix.add)(u, v, write, columns)


def write_block(block: Tensor, rows: Tensor | None, columns: Tensor | None, write: Write, computed: torch.dtype) -> float | None:
    """Let ``write``, which adds in the type ``computed``, add to those rows and columns of a block, or to all of them.

    Return what it returns.
    """
    if rows is None and columns is None and computed == block.dtype:
        return write(block)
    here = (block.shape[0] if rows is None else rows.numel(), block.shape[1] if columns is None else columns.numel())
    part = block.new_zeros(here, dtype=computed)
    skew = write(part)
    part = part.to(block.dtype)
    if rows is not None and columns is not None:
        block[rows.unsqueeze(1), columns] += part
    elif rows is not None:
        block.index_add_(0, rows, part)
    elif columns is not None:
        block.index_add_(1, columns, part)
    else:
        block += part
    return skew


def _add(part: Tensor, block: Tensor) -> None:
    block += part


def _copy_transposed(x: Tensor, into: Tensor) -> None:
    """Copy x^T tile by tile: reading across rows, every entry is in another line of the cache."""
    for rows, below in zip(x.split(TILE), into.split(TILE, 1), strict=True):
        for tile, target in zip(rows.split(TILE, 1), below.split(TILE), strict=True):
            target.copy_(tile.T)
