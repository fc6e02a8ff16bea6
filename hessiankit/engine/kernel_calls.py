"""Sums that the compiled kernels compute: blocks of two weights, over rows.

A block has four axes, inputs and outputs of both weights, and every sum one of the forms

    into[i, p, j, q] += sum_n a_n[i] b_n[j] K_n[p, q]
    into[i, p, j, q] += sum_n a_n[i] (b_n[j] K_n[p, q] + d_n[q] T_n[p, j])

with one or two terms of three factors each, of which one is shared. The kernel chooses the order of summation.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hessiankit.support.kernels import kernels

SINGLE = {torch.float32: 1, torch.float64: 0}
SMALL = 2**22  # multiply-adds that one thread does sooner than two share them
CACHES = 2**24  # bytes of a matrix that no cache holds until it is read again


class KernelFactor(NamedTuple):
    """Entries of a tensor, read at ``strides`` along the rows and the four axes; 0 where it does not depend on one."""

    data: Tensor
    strides: tuple[int, ...]


@dataclass(frozen=True)
class KernelSum:
    """``into[axes] += sum_n`` of the terms, each a product of factors.

    Attributes:
        into: Tensor that is added to.
        rows: Number of rows n.
        axes: Size of each axis, and its stride in ``into``.
        terms: One or two, of three factors each; two have a factor of one axis in common.
        symmetric: Whether both weights are one, and the curvature is symmetric up to rounding.
        overwrites: Whether the sum replaces the entries of ``into``, which it covers, rather than being added.
    """

    into: Tensor
    rows: int
    axes: tuple[tuple[int, int], ...]
    terms: tuple[tuple[KernelFactor, ...], ...]
    symmetric: bool = False
    overwrites: bool = False

    def add(self) -> float:
        """Add the sum; return the largest |K - K^T| where their mean was taken, relative to the largest diagonal entry."""
        library = kernels()
        assert library is not None
        factors = [factor for term in self.terms for factor in term]
        mode = int(self.overwrites) * (1 + (self.into.untyped_storage().nbytes() > CACHES))  # 2: past the caches
        sizes, strides = (n for axis in self.axes for n in axis), (stride for factor in factors for stride in factor.strides)
        numbers = [self.rows, len(self.terms), int(self.symmetric), mode, *sizes, *strides]
        threads = torch.get_num_threads() if self.rows * math.prod(size for size, _ in self.axes) > SMALL else 1
        skew = (ctypes.c_double * 2)()
        failed = library.hessiankit_sum(
            SINGLE[self.into.dtype],
            (ctypes.c_void_p * len(factors))(*(factor.data.data_ptr() for factor in factors)),
            (ctypes.c_int64 * len(numbers))(*numbers),
            self.into.data_ptr(),
            threads,
            skew,
        )
        if failed:
            raise MemoryError("hessiankit: no memory for a block of the Hessian while it is summed")
        return skew[0] / skew[1] if skew[1] else 0.0


def joined(sums: Sequence[KernelSum]) -> list[KernelSum]:
    """Return the sums with those to one block as one, where they have a factor of one axis in common.

    So the curvature between a weight and the Jacobian of what it multiplies, a T d, and that of a later place, a b K.
    """
    result: list[KernelSum] = []
    for one in sums:
        k = next((k for k, total in enumerate(result) if _can_be_joined(total, one)), None)
        if k is None:
            result.append(one)
        else:
            result[k] = replace(result[k], terms=result[k].terms + one.terms)
    return result


def _can_be_joined(one: KernelSum, total: KernelSum) -> bool:
    alike = one.into.data_ptr() == total.into.data_ptr() and one.axes == total.axes
    if not alike or one.symmetric or total.symmetric or len(one.terms) + len(total.terms) > 2:
        return False
    return not _of_one_axis(one).isdisjoint(_of_one_axis(total))


def _of_one_axis(one: KernelSum) -> set[Any]:
    return {(_place(x.data), x.strides) for x in one.terms[0] if sum(map(bool, x.strides[1:])) <= 1}


def _place(x: Tensor) -> tuple[int, Any, Any]:
    return x.data_ptr(), x.shape, x.stride()


def mirror(kernels: ctypes.CDLL, matrix: Tensor, bounds: Sequence[int]) -> tuple[float, bool]:
    """Fill the lower half of a matrix from the upper one; of the blocks on the diagonal both get the mean.

    The matrix (P, P) is contiguous; each parameter starts at one of the bounds, and the last one ends at the last.

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


NARROW = 4  # entries of the longest axis below which a kernel's vectors are mostly empty


def kernel_sum(X: Tensor, Y: Tensor, K: Tensor, into: Tensor, *, is_symmetric: bool) -> KernelSum | None:
    """Return sum_n x_n[i] K_n[p, q] y_n[j], to be added to ``into`` (i, p, j, q), as a sum for the compiled kernels.

    None if there are no kernels for this, or all axes are too short.

    Args:
        X: (R, i); Y is (R, j), and the curvature K (R, p, q).
        into: The block, or a view of it.
        is_symmetric: Whether X and Y are one, and K is symmetric.
    """
    sizes = (X.shape[1], K.shape[1], Y.shape[1], K.shape[2])
    if kernels() is None or not _are_plain(into, X, Y, K) or max(sizes) < NARROW:
        return None
    K = (
        K.contiguous() if is_symmetric and 0 in K.stride() else K
    )  # the kernels tell the factors of a symmetric sum by their strides
    (a_n, a_i), (b_n, b_j), (k_n, k_p, k_q) = X.stride(), Y.stride(), K.stride()
    into_strides = into.stride()
    # the order of other sums to the block
    order = range(4) if is_symmetric else sorted(range(4), key=lambda axis: -into_strides[axis])

    def factor(x: Tensor, row: int, *strides: int) -> KernelFactor:
        return KernelFactor(x, (row, *(strides[axis] * (sizes[axis] > 1) for axis in order)))

    term = (factor(X, a_n, a_i, 0, 0, 0), factor(Y, b_n, 0, 0, b_j, 0), factor(K, k_n, 0, k_p, 0, k_q))
    return KernelSum(into, len(K), tuple((sizes[axis], into_strides[axis]) for axis in order), (term,), symmetric=is_symmetric)


def _are_plain(*tensors: Tensor) -> bool:
    """Tell whether all are of one type that the kernels know, and store their entries in this processor's memory.

    A tensor whose negative bit is set (``z.conj().imag``) has other entries than its memory; torch's zero tensors have none.
    """
    dtype = tensors[0].dtype
    in_memory = all(x.is_cpu and x.dtype == dtype and not x.is_neg() and not x._is_zerotensor() for x in tensors)
    return dtype in SINGLE and in_memory
