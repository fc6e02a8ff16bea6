"""What the compiled kernels compute: products of many small matrices, and blocks of two weights as sums over rows.

A block is stored with one index contiguous, the output q or the input j of the later weight:

    outputs:    into[(i, j), p, q] += sum_n (a_n[i] b_n[j])  K_n[p, q]
    inputs:     into[(p, q), i, j] += sum_n  K_n[p, q]      (a_n[i] b_n[j])

A factor is a tensor with a stride for each index, 0 for those that it does not depend on.
"""

from __future__ import annotations

import ctypes
import itertools
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
LARGEST = 2**18  # multiply-adds of one product beyond which a library of linear algebra is as fast


class KernelFactor(NamedTuple):
    """Entries of a tensor, read at ``strides`` along (row, first index, second index) and, in a vector, the column."""

    data: Tensor
    strides: tuple[int, ...]


@dataclass(frozen=True)
class KernelSum:
    """``into[m, x, z] += sum_n left[n, m] right[n, x, z]`` with m = (m1, m2) and x = (x1, x2); z is contiguous.

    The left side is a b, the right one s v, or s v + t w: see :func:`joined`.

    Attributes:
        into: What is added to.
        rows: How many n.
        left: Sizes of (m1, m2).
        right: Sizes of (x1, x2, z).
        strides: Of ``into`` along m1, m2, x1, x2.
        a: One factor of the left side.
        b: The other, or None.
        s: A scalar of (n, x1, x2) on the right side, or None.
        v: The vector of (n, x1, x2, z) that it multiplies.
        t: Another scalar, or None.
        w: The vector that it multiplies, or None.
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
    s: KernelFactor | None
    v: KernelFactor
    t: KernelFactor | None = None
    w: KernelFactor | None = None
    symmetric: bool = False
    mean: bool = False
    over: bool = False
    name: ClassVar[str] = "compiled sum"

    def add(self) -> float:
        """Add it; return the largest |left - its transpose| where the mean was taken, relative to the largest on its diagonal."""
        library = kernels()
        assert library is not None
        if (watching := recorder()) is not None:
            watching.add_compiled(library.hessiankit_lift, self)
        call = self.bound(library.hessiankit_lift)
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
        yield from ((self.a, 3), (self.b, 3), (self.s, 3), (self.v, 4), (self.t, 3), (self.w, 4))

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is added to and what is read."""
        yield self.into
        yield from (factor.data for factor, _ in self.factors() if factor is not None)

    def mapped(self, moved: Callable[[Any], Any]) -> KernelSum:
        """Return the sum of other tensors in place of these, of the same shapes and strides."""

        def other(factor: KernelFactor | None) -> Any:
            return None if factor is None else KernelFactor(moved(factor.data), factor.strides)

        a, b, s, v, t, w = (other(factor) for factor, _ in self.factors())
        return replace(self, into=moved(self.into), a=a, b=b, s=s, v=v, t=t, w=w)

    def bound(self, function: Any) -> BoundSum:
        """Return the call of the kernel."""
        return BoundSum(self, function)

    def axes(self) -> dict[int, int]:
        """Return how many entries there are along each axis, which is named by its stride in ``into``; z is 1."""
        sizes = zip((*self.strides, 1), (*self.left, *self.right), strict=True)
        return {stride: size for stride, size in sizes if size > 1}

    def terms(self) -> list[tuple[KernelFactor, dict[int, int]]]:
        """Return the factors of one term, each with its strides by axis."""
        m1, m2, x1, x2 = self.strides
        known = ((self.a, (m1, m2)), (self.b, (m1, m2)), (self.s, (x1, x2)), (self.v, (x1, x2, 1)))
        axes = self.axes()
        return [
            (factor, {axis: step for axis, step in zip(along, factor.strides[1:], strict=True) if step and axis in axes})
            for factor, along in known
            if factor is not None
        ]


FEWEST = 8  # rows of a left side for which it pays to write out the right one


def joined(sums: Sequence[KernelSum]) -> list[KernelSum]:
    """Return the sums with those to one block as one, where they have a factor in common:

        sum_n a_n[i] T_n[p, j] d_n[q] + sum_n a_n[i] b_n[j] K_n[p, q] = sum_n a_n[i] (T_n[p, j] d_n[q] + b_n[j] K_n[p, q]).

    The first is the curvature between a weight and the Jacobian of what it multiplies, the second that of a later vertex.
    """
    blocks: dict[tuple[int, Any, Any], list[KernelSum]] = {}
    for one in sums:
        found = blocks.setdefault(_place(one.into), [])
        both = _joined(found[-1], one) if found else None
        found[len(found) - (both is not None) :] = [one if both is None else both]
    return [one for found in blocks.values() for one in found]


def _joined(one: KernelSum, other: KernelSum) -> KernelSum | None:
    """Return two sums as one, if they can be."""
    axes = one.axes()
    if one.symmetric or other.symmetric or one.w or other.w or one.rows != other.rows or axes != other.axes():
        return None
    terms, others = one.terms(), other.terms()
    for (factor, along), (again, likewise) in itertools.product(terms, others):
        same = len(along) == 1 and along == likewise and factor.strides[0] == again.strides[0]
        if not same or _place(factor.data) != _place(again.data):
            continue
        (left,) = along
        right = [axis for axis in axes if axis not in (left, 1)]
        if left != 1 and axes[left] >= FEWEST and len(right) <= 2:
            x1, x2 = (*right, 0, 0)[:2]
            first = _scalar_and_vector(terms, factor, (x1, x2))
            second = _scalar_and_vector(others, again, (x1, x2))
            if first is not None and second is not None:
                sizes = (axes.get(x1, 1), axes.get(x2, 1), axes.get(1, 1))
                a = KernelFactor(factor.data, (factor.strides[0], along[left], 0))
                return KernelSum(one.into, one.rows, (axes[left], 1), sizes, (left, 0, x1, x2), a, None, *first, *second)
    return None


def _scalar_and_vector(
    terms: Sequence[tuple[KernelFactor, dict[int, int]]], skipped: KernelFactor, right: tuple[int, int]
) -> tuple[KernelFactor | None, KernelFactor] | None:
    """Return the factors of a term but one as a scalar and a vector of a right side with these axes; None if there are more."""
    found: dict[bool, KernelFactor] = {}
    for factor, along in terms:
        if factor is not skipped:
            is_vector = 1 in along
            if is_vector in found or not {*along} <= {*right, 1}:
                return None
            strides = (factor.strides[0], *(along.get(axis, 0) for axis in right))
            found[is_vector] = KernelFactor(factor.data, (*strides, along[1]) if is_vector else strides)
    return (found.get(False), found[True]) if True in found else None


def _place(x: Tensor) -> tuple[int, Any, Any]:
    return x.data_ptr(), x.shape, x.stride()


class BoundSum:
    """The call of the kernel for one sum, its arguments laid out once; ``skew`` is what :meth:`KernelSum.add` returns."""

    def __init__(self, terms: KernelSum, function: Any) -> None:
        self.sum, self._function = terms, function
        numbers = [terms.rows, *terms.left, 2 if terms.mean else int(terms.symmetric), *terms.right, *terms.strides]
        numbers.append(int(terms.over))
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


def compiled_sum(u: WeightJacobian, v: WeightJacobian, K: Tensor, into: Tensor, *, same: bool) -> KernelSum | None:
    """Return U^T K V of one weight with another, as a sum for the compiled kernels.

    Args:
        u: Jacobian of the rows of the block.
        v: Jacobian of its columns.
        K: Curvature (R, p, q).
        into: The block, or a view of it.
        same: Whether u and v are one Jacobian and K is symmetric.

    Returns:
        None if there are no kernels for this, or the entries of the block that lie side by side are too few.
    """
    if kernels() is None or not _fit(into, u.X, v.X, K):
        return None
    if into.stride(1) != 1:
        if into.stride(0) != 1:
            return None
        u, v, K, into = v, u, K.mT, into.T
    i, j = u.X.shape[1], v.X.shape[1]
    n, p, q = K.shape
    if (j if v.transposed else q) < NARROW:
        return None
    K = K if v.transposed else K.contiguous()  # its rows are read as vectors
    (u_i, u_p), (v_j, v_q) = (_strides(w, step) for w, step in ((u, into.stride(0)), (v, 1)))
    (a_n, a_i), (b_n, b_j), (k_n, k_p, k_q) = u.X.stride(), v.X.stride(), K.stride()
    if v.transposed:
        outer = (KernelFactor(u.X, (a_n, a_i, 0)), KernelFactor(v.X, (b_n, 0, 0, b_j)))
        steps, curvature = (u_p, v_q, u_i, 0), KernelFactor(K, (k_n, k_p, k_q))
        return KernelSum(into, n, (p, q), (i, 1, j), steps, curvature, None, *outer, symmetric=same, mean=same)
    a, b = KernelFactor(u.X, (a_n, a_i, 0)), KernelFactor(v.X, (b_n, 0, b_j))
    curvature = KernelFactor(K, (k_n, k_p, 0, k_q))
    return KernelSum(into, n, (i, j), (p, 1, q), (u_i, v_j, u_p, 0), a, b, None, curvature, symmetric=same)


def _fit(into: Tensor, *factors: Tensor) -> bool:
    return into.dtype in SINGLE and all(x.is_cpu and x.dtype == into.dtype for x in (into, *factors))


def _strides(w: WeightJacobian, step: int) -> tuple[int, int]:
    """Return how far apart the inputs and the outputs of a weight are, whose entries are ``step`` apart."""
    return (step, step * w.X.shape[1]) if w.transposed else (step * w.width, step)


@dataclass(frozen=True)
class KernelProduct:
    """``into = a b`` for stacks of matrices (R, m, k) and (R, k, n); the columns of ``into`` are contiguous."""

    into: Tensor
    a: Tensor
    b: Tensor
    name: ClassVar[str] = "compiled product"

    @property
    def multiplications(self) -> int:
        """How many there are."""
        (count, m, k), n = self.a.shape, self.b.shape[2]
        return count * m * k * n

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return what is read."""
        return self.a, self.b

    def mapped(self, moved: Callable[[Any], Any]) -> KernelProduct:
        """Return the product of other tensors in place of these, of the same shapes and strides."""
        return KernelProduct(moved(self.into), moved(self.a), moved(self.b))

    def bound(self, function: Any) -> BoundProduct:
        """Return the call of the kernel."""
        return BoundProduct(self, function)


class BoundProduct:
    """The call of the kernel for one product, its arguments laid out once."""

    def __init__(self, product: KernelProduct, function: Any) -> None:
        self.product, self._function = product, function
        a, b, into = product.a, product.b, product.into
        numbers = (len(a), a.shape[1], b.shape[2], a.shape[2], *a.stride(), *b.stride(), *into.stride()[:2])
        self._single = SINGLE[into.dtype]
        self._numbers = (ctypes.c_int64 * len(numbers))(*numbers)
        self._pointers = (ctypes.c_void_p * 3)(*(x.data_ptr() for x in (a, b, into)))
        self._many = product.multiplications > SMALL
        self._address = ctypes.cast(function, ctypes.c_void_p)

    def __call__(self) -> None:
        """Multiply the present entries."""
        threads = torch.get_num_threads() if self._many else 1
        if self._function(self._single, *self._pointers, self._numbers, threads):
            raise MemoryError("hessiankit: no memory for a product of matrices")

    def add_to(self, library: ctypes.CDLL, tape: ctypes.c_void_p) -> None:
        """Add the call to a tape of :mod:`hessiankit.engine.replay`, which reads what is laid out here."""
        library.hessiankit_tape_product(tape, self._address, self._single, self._many, self._pointers, self._numbers)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a b for stacks of matrices (R, m, k) and (R, k, n), or one matrix for all.

    >>> multiply(torch.ones(2, 1, 3), torch.ones(3, 1)).flatten().tolist()
    [3.0, 3.0]
    """
    library = kernels()
    if library is None or a.ndim + b.ndim < 5 or not _pays(a, b):
        return a @ b
    a, b = (x if x.ndim == 3 else x.expand(len(y), -1, -1) for x, y in ((a, b), (b, a)))
    if len(a) != len(b) or a.shape[2] != b.shape[1]:
        return a @ b
    product = KernelProduct(a.new_empty(len(a), a.shape[1], b.shape[2]), a, b)
    if (watching := recorder()) is not None:
        watching.add_compiled(library.hessiankit_multiply, product)
    product.bound(library.hessiankit_multiply)()
    return product.into


def _pays(a: Tensor, b: Tensor) -> bool:
    """Tell whether there is a kernel for a product, and it pays."""
    graph = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    alike = a.dtype == b.dtype and a.dtype in SINGLE and a.is_cpu and b.is_cpu
    return not graph and alike and 0 < a.shape[-2] * a.shape[-1] * b.shape[-1] <= LARGEST and a.numel() * b.numel() > 0
