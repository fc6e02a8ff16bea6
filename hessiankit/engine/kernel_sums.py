"""Blocks of two weights as sums over rows that the compiled kernels add up.

A block is stored with one index contiguous, the output q or the input j of the later weight:

    outputs:    into[(i, j), p, q] += sum_n (a_n[i] b_n[j])  K_n[p, q]
    inputs:     into[(p, q), i, j] += sum_n  K_n[p, q]      (a_n[i] b_n[j])

Several Jacobians v_t of one later weight are summed before they meet the earlier one:

    into[i, (p, y), z] += sum_n a_n[i] sum_t s_tn[p, y] v_tn[p, z],    y, z the indices of the later weight as it is stored.

A factor is a tensor with a stride for each index, 0 for those that it does not depend on.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hessiankit.engine.jacobians import WeightJacobian
from hessiankit.engine.recorder import recorder
from hessiankit.support.kernels import kernels

SINGLE = {torch.float32: 1, torch.float64: 0}
SMALL = 2**22  # multiply-adds that one thread does sooner than two share them


class KernelFactor(NamedTuple):
    """Entries of a tensor, read at ``strides`` along (row, first index, second index) and, in a vector, the column."""

    data: Tensor
    strides: tuple[int, ...]


@dataclass(frozen=True)
class KernelSum:
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
        over: Whether it is written over what lies in ``into``, all of which it has to cover, rather than added to it.
    """

    into: Tensor
    rows: int
    left: tuple[int, int]
    right: tuple[int, int, int]
    strides: tuple[int, int, int, int]
    a: KernelFactor
    b: KernelFactor | None
    terms: Sequence[tuple[KernelFactor | None, KernelFactor]]
    symmetric: bool = False
    mean: bool = False
    over: bool = False
    name: ClassVar[str] = "compiled sum"

    def add(self, kernels: ctypes.CDLL) -> float:
        """Add it; return the largest |left - its transpose| where the mean was taken, relative to the largest on its diagonal."""
        if (watching := recorder()) is not None:
            watching.add_compiled(kernels.hessiankit_lift, self)
        call = self.bound(kernels.hessiankit_lift)
        call()
        return call.skew

    @property
    def multiplications(self) -> int:
        """How many there are."""
        return self.rows * self.left[0] * self.left[1] * self.right[0] * self.right[1] * self.right[2]

    @property
    def covers(self) -> bool:
        """Whether every entry of ``into`` is summed."""
        return self.multiplications == self.rows * math.prod(self.into.shape) > 0

    def factors(self) -> Iterator[tuple[KernelFactor | None, int]]:
        """Yield every factor with how many strides it has."""
        yield self.a, 3
        yield self.b, 3
        for scalar, vector in self.terms:
            yield scalar, 3
            yield vector, 4

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is added to and what is read."""
        yield self.into
        yield from (factor.data for factor, _ in self.factors() if factor is not None)

    def mapped(self, moved: Callable[[Any], Any]) -> KernelSum:
        """Return the sum of other tensors in place of these, of the same shapes and strides."""

        def other(factor: KernelFactor | None) -> Any:
            return None if factor is None else KernelFactor(moved(factor.data), factor.strides)

        terms = [(other(scalar), other(vector)) for scalar, vector in self.terms]
        return replace(self, into=moved(self.into), a=other(self.a), b=other(self.b), terms=terms)

    def bound(self, function: Any) -> BoundSum:
        """Return the call of the kernel."""
        return BoundSum(self, function)


class BoundSum:
    """The call of the kernel for one sum, its arguments laid out once; ``skew`` is what :meth:`KernelSum.add` returns."""

    def __init__(self, terms: KernelSum, function: Any) -> None:
        self.sum, self._function = terms, function
        numbers = [terms.rows, *terms.left, 2 if terms.mean else int(terms.symmetric), *terms.right, *terms.strides]
        numbers += (int(terms.over), len(terms.terms))
        pointers: list[int | None] = []
        for factor, indices in terms.factors():
            pointers.append(None if factor is None else factor.data.data_ptr())
            numbers += (0,) * indices if factor is None else factor.strides
        self._dtype = SINGLE[terms.into.dtype]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self._numbers = (ctypes.c_int64 * len(numbers))(*numbers)
        self._many = terms.multiplications > SMALL
        self._address = ctypes.cast(function, ctypes.c_void_p)
        self._seen = (ctypes.c_double * 2)()

    def __call__(self) -> None:
        """Put the sum where it belongs."""
        self._seen[0] = self._seen[1] = 0.0
        threads = torch.get_num_threads() if self._many else 1
        into = self.sum.into.data_ptr()
        if self._function(self._dtype, self._pointers, self._numbers, into, threads, self._seen):
            raise MemoryError("hessiankit: no memory for a block of the Hessian while it is summed")

    def add_to(self, library: ctypes.CDLL, tape: ctypes.c_void_p) -> None:
        """Add the call to a tape of :mod:`hessiankit.engine.replay`, which reads what is laid out here."""
        into = self.sum.into._cdata
        library.hessiankit_tape_sum(tape, self._address, self._dtype, self._many, self._pointers, self._numbers, into, self._seen)

    @property
    def skew(self) -> float:
        """Of the last call."""
        return self._seen[0] / self._seen[1] if self._seen[1] else 0.0


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


NARROW = 4  # contiguous entries below which a kernel's vectors are mostly empty


def add_compiled(u: WeightJacobian, pairs: Sequence[tuple[WeightJacobian, Tensor]], into: Tensor, *, same: bool) -> float | None:
    """Add U^T K V of one weight with another, which may enter by several Jacobians, by the compiled kernels.

    Args:
        u: Jacobian of the rows of the block.
        pairs: Jacobians v of its columns, all of one parameter, each with its curvature (R, p, q).
        into: The block, or a view of it.
        same: Whether u and v are one Jacobian and K is symmetric.

    Returns:
        How far from symmetric K was, as far as it was compared; None if there are no kernels for this.
    """
    library = kernels()
    if library is None or not _fit(into, u.X, *(t for v, K in pairs for t in (v.X, K))):
        return None
    found = _one(u, *pairs[0], into, same) if len(pairs) == 1 else _several(u, pairs, into)
    return None if found is None else found.add(library)


def add_rows_compiled(u: WeightJacobian, K: Tensor, into: Tensor) -> bool:
    """Add U^T K for K (R, p, c) to ``into`` (size_u, c); False if there are no kernels for this.

    into[i, p, c] += sum_n a_n[i] K_n[p, c]
    """
    library = kernels()
    if library is None or not _fit(into, u.X, K) or into.stride(1) != 1 or K.shape[2] < NARROW:
        return False
    (u_i, u_p), (k_n, k_p, k_c) = _strides(u, into.stride(0)), K.stride()
    a, terms = KernelFactor(u.X, (*u.X.stride(), 0)), [(None, KernelFactor(K, (k_n, k_p, 0, k_c)))]
    KernelSum(into, K.shape[0], (u.X.shape[1], 1), (K.shape[1], 1, K.shape[2]), (u_i, 0, u_p, 0), a, None, terms).add(library)
    return True


def _fit(into: Tensor, *factors: Tensor) -> bool:
    return into.dtype in SINGLE and all(x.is_cpu and x.dtype == into.dtype for x in (into, *factors))


def _one(u: WeightJacobian, v: WeightJacobian, K: Tensor, into: Tensor, same: bool) -> KernelSum | None:
    if into.stride(1) != 1:
        if into.stride(0) != 1:
            return None
        u, v, K, into = v, u, K.mT, into.T
    i, j = u.X.shape[1], v.X.shape[1]
    n, p, q = K.shape
    (u_i, u_p), (v_j, v_q) = (_strides(w, step) for w, step in ((u, into.stride(0)), (v, 1)))
    (a_n, a_i), (b_n, b_j), (k_n, k_p, k_q) = u.X.stride(), v.X.stride(), K.stride()
    if (j if v.transposed else q) < NARROW:
        return None
    if v.transposed:
        outer = (KernelFactor(u.X, (a_n, a_i, 0)), KernelFactor(v.X, (b_n, 0, 0, b_j)))
        steps, curvature = (u_p, v_q, u_i, 0), KernelFactor(K, (k_n, k_p, k_q))
        return KernelSum(into, n, (p, q), (i, 1, j), steps, curvature, None, [outer], symmetric=same, mean=same)
    terms = [(None, KernelFactor(K, (k_n, k_p, 0, k_q)))]
    a, b = KernelFactor(u.X, (a_n, a_i, 0)), KernelFactor(v.X, (b_n, 0, b_j))
    return KernelSum(into, n, (i, j), (p, 1, q), (u_i, v_j, u_p, 0), a, b, terms, symmetric=same)


def _several(u: WeightJacobian, pairs: Sequence[tuple[WeightJacobian, Tensor]], into: Tensor) -> KernelSum | None:
    first = pairs[0][0]
    p, (y, z) = u.width, (first.width, first.X.shape[1]) if first.transposed else (first.X.shape[1], first.width)
    if into.stride(1) != 1 or z < NARROW:
        return None
    u_i, u_p = _strides(u, into.stride(0))
    terms: list[tuple[KernelFactor | None, KernelFactor]] = []
    for v, K in pairs:
        (b_n, b_j), (k_n, k_p, k_q) = v.X.stride(), K.stride()
        if v.transposed:
            terms.append((KernelFactor(K, (k_n, k_p, k_q)), KernelFactor(v.X, (b_n, 0, 0, b_j))))
        else:
            terms.append((KernelFactor(v.X, (b_n, 0, b_j)), KernelFactor(K, (k_n, k_p, 0, k_q))))
    a = KernelFactor(u.X, (*u.X.stride(), 0))
    return KernelSum(into, u.X.shape[0], (u.X.shape[1], 1), (p, y, z), (u_i, 0, u_p, z), a, None, terms)


def _strides(w: WeightJacobian, step: int) -> tuple[int, int]:
    """Return how far apart the inputs and the outputs of a weight are, whose entries are ``step`` apart."""
    return (step, step * w.X.shape[1]) if w.transposed else (step * w.width, step)
