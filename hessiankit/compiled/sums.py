"""What the kernels are asked for: sums over the rows of a value, added to a block; and the lower half of a matrix.

A factor is a tensor with a stride for each index it is read at, and 0 for those it does not depend on.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SINGLE = {torch.float32: 1, torch.float64: 0}
SMALL = 2**22  # multiply-adds that one thread does sooner than two share them


class Factor(NamedTuple):
    """Entries of a tensor, read at ``strides`` along (row, first index, second index) and, in a vector, the column."""

    data: Tensor
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """``into[m, x, z] += sum_n left[n, m] right[n, x, z]`` with m = (m1, m2) and x = (x1, x2); z is contiguous.

    Attributes:
        into: What is added to.
        rows: How many n.
        left: Sizes of (m1, m2).
        right: Sizes of (x1, x2, z).
        strides: Of ``into`` along m1, m2, x1, x2.
        a: One factor of the left side.
        b: The other, or None.
        terms: Of the right side, each a product: a scalar of (n, x1, x2), or None, and a vector of (n, x1, x2, z).
        symmetric: Whether into[m1, m2] and into[m2, m1] take the same, so that it is summed once.
        mean: Whether the left side is symmetric up to rounding, and its mean is taken.
    """

    into: Tensor
    rows: int
    left: tuple[int, int]
    right: tuple[int, int, int]
    strides: tuple[int, int, int, int]
    a: Factor
    b: Factor | None
    terms: Sequence[tuple[Factor | None, Factor]]
    symmetric: bool = False
    mean: bool = False

    def add(self, kernels: ctypes.CDLL) -> float:
        """Add it; return the largest |left - its transpose| where the mean was taken, relative to the largest on its diagonal."""
        numbers = [self.rows, *self.left, 2 if self.mean else int(self.symmetric), *self.right, *self.strides, len(self.terms)]
        pointers: list[int | None] = []
        for factor, indices in itertools.chain(((self.a, 3), (self.b, 3)), *(((s, 3), (v, 4)) for s, v in self.terms)):
            pointers.append(None if factor is None else factor.data.data_ptr())
            numbers += (0,) * indices if factor is None else factor.strides
        work = self.rows * self.left[0] * self.left[1] * self.right[0] * self.right[1] * self.right[2]
        seen = (ctypes.c_double * 2)()
        failed = kernels.hessiankit_lift(
            SINGLE[self.into.dtype],
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int64 * len(numbers))(*numbers),
            self.into.data_ptr(),
            torch.get_num_threads() if work > SMALL else 1,
            seen,
        )
        if failed:
            raise MemoryError("hessiankit: no memory for a block of the Hessian while it is summed")
        return seen[0] / seen[1] if seen[1] else 0.0


def mirror(kernels: ctypes.CDLL, matrix: Tensor, bounds: Sequence[int]) -> tuple[float, bool]:
    """Fill the lower half of a matrix from the upper one; of the blocks on the diagonal both get the mean.

    Args:
        kernels: The library.
        matrix: (P, P), contiguous.
        bounds: Where each parameter starts, and where the last one ends.

    Returns:
        The largest |H - H^T| of the blocks on the diagonal, relative to the largest diagonal entry; whether all is finite.
    """
    result = (ctypes.c_double * 3)()
    kernels.hessiankit_mirror(
        SINGLE[matrix.dtype],
        matrix.data_ptr(),
        matrix.stride(0),
        (ctypes.c_int64 * len(bounds))(*bounds),
        len(bounds) - 1,
        torch.get_num_threads() if matrix.numel() > SMALL else 1,
        result,
    )
    return (result[0] / result[1] if result[1] else 0.0), not result[2]
