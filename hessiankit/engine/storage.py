"""The symmetric P x P matrix that blocks are added to."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hessiankit.engine.kernel_calls import SINGLE, KernelSum, joined, mirror
from hessiankit.primitives.directions import together
from hessiankit.support.kernels import kernels
from hessiankit.support.torch_state import read_numbers

HUGE = 2**21  # bytes from which large pages pay: they arrive several times faster than small ones
MMAP_THRESHOLD = 2**25  # bytes from which glibc's malloc takes new pages each time; it keeps smaller blocks


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros, in large pages where the system has them.

    >>> zeros((2, 2), torch.float64, torch.device("cpu")).tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    pages = _large_pages(shape, dtype, device, HUGE)
    return torch.zeros(shape, dtype=dtype, device=device) if pages is None else pages


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a tensor whose entries are written next, in large pages where malloc would take new ones.

    >>> empty((2, 3), torch.float64, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    pages = _large_pages(shape, dtype, device, MMAP_THRESHOLD)
    return torch.empty(shape, dtype=dtype, device=device) if pages is None else pages


def _large_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, smallest: int) -> Tensor | None:
    """Return zeros in large pages; None for fewer bytes than the smallest that pay, or where the system has none."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < smallest or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    pages = mmap.mmap(-1, size + 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zero when first touched
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE  # a large page starts at a multiple of its size
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=start).reshape(shape)


class SymmetricStorage:
    """A symmetric matrix, or a panel of it: blocks (i, j) with i not after j are added to, and mirrored at the end.

    Args:
        slices: Rows of each parameter in the whole matrix, one after the other.
        dtype: Type of the entries.
        device: Device of the entries.
        data: Zeros to which entries are added; None: they are allocated.
        rows: Parameters i of a panel, as consecutive positions in ``slices``; None: all.
        columns: Parameters j of a panel, none before ``rows``; either they start where ``rows`` do, or the two are disjoint.
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
        full_range, spans = range(len(self.order)), list(self.slices.values())
        self.rows, self.columns = rows or full_range, columns or full_range
        self.top, self.left = (
            slice(spans[positions[0]].start, spans[positions[-1]].stop) if positions else slice(0, 0)
            for positions in (self.rows, self.columns)
        )
        shape = (self.top.stop - self.top.start, self.left.stop - self.left.start)
        self.data = zeros(shape, dtype, device) if data is None else data
        self.is_finite = True  # as far as mirror() has seen
        self.skew = 0.0  # the largest of what sums have returned
        self.asymmetries: list[Tensor] = []  # differences of entries from their mirror images, half of them, as they are met
        self.skews: list[tuple[Tensor, Tensor]] = []  # differences of curvature from its transpose, and its size
        self._sums: list[KernelSum] = []  # to be added
        self._blocks: dict[int, tuple[str, str]] = {}  # where these begin: the parameters
        self._nonzero_blocks: set[tuple[str, str]] = set()  # the blocks that are no longer zero

    def wants(self, i: str, j: str) -> bool:
        """Tell whether the block of two parameters is stored."""
        first, last = sorted((self.order[i], self.order[j]))
        return first in self.rows and last in self.columns

    def block(self, i: str, j: str) -> Tensor:
        """Return the block of two parameters; if j comes before i, that of (j, i), transposed."""
        if self.order[i] > self.order[j]:
            return self.block(j, i).T
        return self.data[self._within(i, self.top), self._within(j, self.left)]

    def rows_of(self, name: str) -> slice:
        """Return the rows of a parameter that is stored."""
        return self._within(name, self.top)

    def _within(self, name: str, panel: slice) -> slice:
        return slice(self.slices[name].start - panel.start, self.slices[name].stop - panel.start)

    def touch(self, i: str, j: str) -> None:
        """Mark a block as nonzero."""
        self._nonzero_blocks.add(self._pair(i, j))

    def keep(self, i: str, j: str, rest: KernelSum | None) -> None:
        """Mark a block as nonzero, or if a sum into it is left to be added, queue that sum for :meth:`finish`."""
        if rest is None:
            self.touch(i, j)
        else:
            self._sums.append(rest)
            self._blocks[rest.into.data_ptr()] = self._pair(i, j)

    def _pair(self, i: str, j: str) -> tuple[str, str]:
        return (i, j) if self.order[i] <= self.order[j] else (j, i)

    def _read_notes(self) -> float:
        """Return the largest recorded difference between an entry and its mirror image."""
        numbers = read_numbers([x for pair in self.skews for x in pair])
        for difference, size in zip(numbers[::2], numbers[1::2], strict=True):
            self.skew = max(self.skew, difference / size if size else 0.0)
        return 2 * max(read_numbers(self.asymmetries), default=0.0)

    def finish(self) -> None:
        """Add the queued sums, joined per block where possible; the first sum of a whole block overwrites it."""
        for pending in joined(self._sums):
            pair = self._blocks[pending.into.data_ptr()]
            is_first = pair not in self._nonzero_blocks and pending.into.numel() == self.block(*pair).numel()
            self.skew = max(self.skew, replace(pending, overwrites=is_first).add())
            self._nonzero_blocks.add(pair)
        self._sums, self._blocks = [], {}

    def add_rows(self, rows: slice, values: Tensor) -> None:
        """Add to all entries of some rows, counted from the first that is stored; :meth:`mirror` overwrites the lower half."""
        self.data[rows] += values
        names = list(self.slices)
        self._nonzero_blocks.update((names[i], names[j]) for i in self.rows for j in self.columns if i <= j)

    def mirror(self) -> float:
        """Average the blocks (i, i), and fill those below them.

        Return the largest |H - H^T| of the blocks (i, i) before, relative to the largest diagonal entry; or of the curvature
        lifted to one, relative to its own, where that was averaged before.
        """
        noted = self._read_notes()
        library, is_complete = kernels(), 0 < len(self.slices) == len(self.rows) == len(self.columns)
        if library is not None and self.data.is_cpu and self.data.dtype in SINGLE and is_complete:
            bounds = [0, *(rows.stop for rows in self.slices.values())]
            difference, self.is_finite = mirror(library, self.data, bounds)
            largest = self.largest()
            return max(difference, self.skew, noted / largest if largest else 0.0)
        worst = noted
        for name, n in self.order.items():
            if n in self.rows and n in self.columns:
                columns, worst = self._within(name, self.top), max(worst, _average(self.block(name, name)))
                lower_rows = slice(columns.stop, self.data.shape[0])
                self.data[lower_rows, columns] = self.data[columns, lower_rows].T
        self.is_finite = math.isfinite(float(self.data.sum()))
        largest = self.largest()
        return max(worst / largest if largest else 0.0, self.skew)

    def largest(self) -> float:
        """Return the largest magnitude on the whole matrix's diagonal that is stored here, or 0."""
        diagonal = self.data.diagonal() if self.top.start == self.left.start else self.data[:0, 0]
        return float(diagonal.abs().max()) if diagonal.numel() else 0.0


def _average(square: Tensor) -> float:
    differences, n = [], square.shape[0]
    step = max(1, together(2**16, square) // max(n, 1))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        upper, lower = square[rows, start:], square[start:, rows].T
        differences.append((upper - lower).abs_().max())
        mean = (upper + lower).mul_(0.5)
        square[rows, start:] = mean
        square[start:, rows] = mean.T
    return max(read_numbers(differences), default=0.0)
