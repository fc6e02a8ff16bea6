"""The symmetric P x P matrix that blocks are added to."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.engine.jacobians import ParameterJacobian
from hessiankit.engine.kernel_calls import SINGLE, KernelSum, joined, mirror
from hessiankit.support.kernels import kernels

Write: TypeAlias = Callable[[Tensor], KernelSum | None]  # adds something to a block; returns what is left to be added

EVERY = slice(None)
HUGE = 2**21  # bytes from which large pages pay: they arrive several times faster than small ones


def zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix of zeros, in large pages where the system has them.

    >>> zeros((2, 2), torch.float64, torch.device("cpu")).tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size + 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zero when first touched
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE  # a large page starts at a multiple of its size
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=start).reshape(shape)


class SymmetricStorage:
    """A symmetric matrix, or a panel of it: blocks (i, j) with i not after j are added to, and mirrored at the end.

    Args:
        slices: Rows of each parameter in the whole matrix, one after the other.
        dtype: Of the entries.
        device: Where they are kept.
        data: The entries, zero, if there is memory for them.
        rows: Of a panel: parameters i, as consecutive positions in ``slices``; None: all.
        columns: The same of j, none before ``rows``; either they start where ``rows`` do, or the two are disjoint.
    """

    def __init__(
        self,
        slices: Mapping[str, slice],
        dtype: torch.dtype,
        device: torch.device,
        data: Tensor | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> None:
        self.slices, self.order = dict(slices), {name: n for n, name in enumerate(slices)}
        every, cuts = range(len(self.order)), list(self.slices.values())
        self.rows, self.columns = rows or every, columns or every
        self.top, self.left = (
            slice(cuts[some[0]].start, cuts[some[-1]].stop) if some else slice(0, 0) for some in (self.rows, self.columns)
        )
        shape = (self.top.stop - self.top.start, self.left.stop - self.left.start)
        self.data = zeros(shape, dtype, device) if data is None else data
        self.computed = dtype  # of what writes add: a module may compute in a wider type than its parameters
        self.is_finite = True  # as far as mirror() has seen
        self.skew = 0.0  # the largest of what sums have returned
        self._sums: list[KernelSum] = []  # to be added
        self._written: set[int] = set()  # where blocks start that are no longer zero

    def wants(self, i: str, j: str) -> bool:
        """Tell whether the block of two parameters is stored."""
        first, last = sorted((self.order[i], self.order[j]))
        return first in self.rows and last in self.columns

    def block(self, i: str, j: str) -> Tensor:
        """Return the block of two parameters; if j comes before i, that of (j, i), transposed."""
        if self.order[i] > self.order[j]:
            return self.block(j, i).T
        return self.data[self._within(i, self.top), self._within(j, self.left)]

    def _within(self, name: str, panel: slice) -> slice:
        return slice(self.slices[name].start - panel.start, self.slices[name].stop - panel.start)

    def add(self, u: ParameterJacobian, v: ParameterJacobian, write: Write, columns: slice = EVERY) -> None:
        """Call ``write`` to add to the block of the parameters of (u, v), or to some of its columns; see :meth:`finish`."""
        if self.wants(u.parameter, v.parameter):
            block = self.block(u.parameter, v.parameter)
            self._written.update(() if columns == EVERY else (block.data_ptr(),))  # some columns of it begin elsewhere
            left = self._write(block[:, columns], u.at, v.at, write)
            self._sums += [] if left is None else [left]

    def touch(self, block: Tensor) -> None:
        """Note that a block, or a view of it, is no longer zero."""
        self._written.add(block.data_ptr())

    def keep(self, rest: KernelSum | None) -> None:
        """Note a sum that is left to be added; see :meth:`finish`."""
        self._sums += [] if rest is None else [rest]

    def finish(self) -> None:
        """Add what writes have left: sums to one block together, where that is possible."""
        for left in joined(self._sums):
            is_first = left.covers and left.into.data_ptr() not in self._written
            self._run(replace(left, over=True) if is_first else left)
            self._written.add(left.into.data_ptr())
        self._sums = []

    def add_both(self, u: ParameterJacobian, v: ParameterJacobian, write: Write, columns: slice = EVERY) -> None:
        """Add what ``write`` adds, and its transpose, to the block of one parameter that (u, v) share, or to columns of it."""
        if not self.wants(u.parameter, v.parameter):
            return
        block = self.block(u.parameter, v.parameter)
        self._written.add(block.data_ptr())
        part = block.new_zeros(u.size, len(range(v.size)[columns]), dtype=self.computed)
        self._run(write(part))
        self._write(block[:, columns], u.at, v.at, partial(_add, part))
        self._write(block[columns], v.at, u.at, partial(_add, part.T))

    def _write(self, block: Tensor, rows: Tensor | None, columns: Tensor | None, write: Write) -> KernelSum | None:
        """Let ``write`` add to those rows and columns of a block, or to all of them; return what is left to be added."""
        if rows is None and columns is None and self.computed == block.dtype:
            left = write(block)
            self._written.update(() if left else (block.data_ptr(),))
            return left
        self._written.add(block.data_ptr())
        here = (block.shape[0] if rows is None else rows.numel(), block.shape[1] if columns is None else columns.numel())
        part = block.new_zeros(here, dtype=self.computed)
        self._run(write(part))
        part = part.to(block.dtype)
        if rows is not None and columns is not None:
            block[rows.unsqueeze(1), columns] += part
        elif rows is not None:
            block.index_add_(0, rows, part)
        elif columns is not None:
            block.index_add_(1, columns, part)
        else:
            block += part
        return None

    def add_rows(self, rows: slice, values: Tensor) -> None:
        """Add to all entries of some rows, counted from the first that is stored; :meth:`mirror` overwrites the lower half."""
        self.data[rows] += values
        names = list(self.slices)
        self._written.update(self.block(names[i], names[j]).data_ptr() for i in self.rows for j in self.columns if i <= j)

    def _run(self, left: KernelSum | None) -> None:
        if left is not None:
            self.skew = max(self.skew, left.add())

    def mirror(self) -> float:
        """Average the blocks (i, i), and fill those below them.

        Return the largest |H - H^T| of the blocks (i, i) before, relative to the largest diagonal entry; or of the curvature
        lifted to one, relative to its own, where that was averaged before.
        """
        library, whole = kernels(), 0 < len(self.slices) == len(self.rows) == len(self.columns)
        if library is not None and self.data.is_cpu and self.data.dtype in SINGLE and whole:
            bounds = [0, *(rows.stop for rows in self.slices.values())]
            apart, self.is_finite = mirror(library, self.data, bounds)
            return max(apart, self.skew)
        worst = 0.0
        for name, n in self.order.items():
            if n in self.rows and n in self.columns:
                across, worst = self._within(name, self.top), max(worst, _average(self.block(name, name)))
                below = slice(across.stop, self.data.shape[0])
                self.data[below, across] = self.data[across, below].T
        self.is_finite = math.isfinite(float(self.data.sum()))
        largest = self.largest()
        return max(worst / largest if largest else 0.0, self.skew)

    def largest(self) -> float:
        """Return the largest diagonal entry of the whole matrix that is here."""
        diagonal = self.data.diagonal() if self.top.start == self.left.start else self.data[:0, 0]
        return float(diagonal.abs().max()) if diagonal.numel() else 0.0


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

    def finish(self) -> None:
        """Leave everything to the replay."""

    def replay(self, matrix: SymmetricStorage) -> None:
        """Add everything that a matrix stores to it."""
        matrix.computed = self.computed or matrix.computed
        for u, v, write, columns, both in self.pairs:
            (matrix.add_both if both else matrix.add)(u, v, write, columns)
        matrix.finish()


def _add(part: Tensor, block: Tensor) -> None:
    block += part
