"""What the compiled kernels compute: products of many small matrices, and blocks of two weights as sums over rows.

A block has four axes, inputs and outputs of both weights, and every sum one of the forms

    into[i, p, j, q] += sum_n a_n[i] b_n[j] K_n[p, q]
    into[i, p, j, q] += sum_n a_n[i] (b_n[j] K_n[p, q] + d_n[q] T_n[p, j])

with one or two terms of three factors each, one of them in common. In which order they are summed, the kernel decides.
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
CACHES = 2**24  # bytes of a matrix that no cache holds until it is read again
LARGEST = 2**18  # multiply-adds of one product beyond which a library of linear algebra is as fast


class KernelFactor(NamedTuple):
    """Entries of a tensor, read at ``strides`` along the rows and the four axes; 0 where it does not depend on one."""

    data: Tensor
    strides: tuple[int, ...]


@dataclass(frozen=True)
class KernelSum:
    """``into[axes] += sum_n`` of the terms, each a product of factors.

    Attributes:
        into: What is added to.
        rows: How many n.
        axes: Of each axis the size, and the stride in ``into``.
        terms: One or two, of three factors each; two have a factor of one axis in common.
        symmetric: Whether both weights are one, and the curvature is symmetric up to rounding.
        over: Whether it is written over what lies in ``into``, all of which it has to cover, rather than added to it.
    """

    into: Tensor
    rows: int
    axes: tuple[tuple[int, int], ...]
    terms: tuple[tuple[KernelFactor, ...], ...]
    symmetric: bool = False
    over: bool = False
    name: ClassVar[str] = "compiled sum"

    def add(self) -> float:
        """Add it; return the largest |K - K^T| where their mean was taken, relative to the largest on the diagonal."""
        library = kernels()
        assert library is not None
        if (watching := recorder()) is not None:
            watching.add_compiled(library.hessiankit_sum, self)
        call = self.bound(library.hessiankit_sum)
        call()
        return call.skew

    @property
    def multiplications(self) -> int:
        """How many there are."""
        return self.rows * math.prod(size for size, _ in self.axes)

    @property
    def covers(self) -> bool:
        """Whether every entry of ``into`` is summed."""
        return self.multiplications == self.rows * math.prod(self.into.shape) > 0

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is added to and what is read."""
        yield self.into
        yield from (factor.data for term in self.terms for factor in term)

    def mapped(self, moved: Callable[[Any], Any]) -> KernelSum:
        """Return the sum of other tensors in place of these, of the same shapes and strides."""
        terms = tuple(tuple(KernelFactor(moved(data), strides) for data, strides in term) for term in self.terms)
        return replace(self, into=moved(self.into), terms=terms)

    def bound(self, function: Any) -> BoundSum:
        """Return the call of the kernel."""
        return BoundSum(self, function)


def joined(sums: Sequence[KernelSum]) -> list[KernelSum]:
    """Return the sums with those to one block as one, where they have a factor of one axis in common.

    So the curvature between a weight and the Jacobian of what it multiplies, a T d, and that of a later vertex, a b K.
    """
    found: list[KernelSum] = []
    for one in sums:
        k = next((k for k, other in enumerate(found) if _can_be_joined(other, one)), None)
        if k is None:
            found.append(one)
        else:
            found[k] = replace(found[k], terms=found[k].terms + one.terms)
    return found


def _can_be_joined(one: KernelSum, other: KernelSum) -> bool:
    alike = _place(one.into) == _place(other.into) and one.axes == other.axes
    if not alike or one.symmetric or other.symmetric or len(one.terms) + len(other.terms) > 2:
        return False
    return not _of_one_axis(one).isdisjoint(_of_one_axis(other))


def _of_one_axis(one: KernelSum) -> set[Any]:
    return {(_place(x.data), x.strides) for x in one.terms[0] if sum(map(bool, x.strides[1:])) <= 1}


def _place(x: Tensor) -> tuple[int, Any, Any]:
    return x.data_ptr(), x.shape, x.stride()


class BoundSum:
    """The call of the kernel for one sum, its arguments laid out once; ``skew`` is what :meth:`KernelSum.add` returns."""

    def __init__(self, terms: KernelSum, function: Any) -> None:
        self.sum, self._function = terms, function
        factors = [factor for term in terms.terms for factor in term]
        past_caches = terms.over and terms.into.untyped_storage().nbytes() > CACHES
        mode = int(terms.over) + int(past_caches)
        numbers = [terms.rows, len(terms.terms), int(terms.symmetric), mode, *(n for axis in terms.axes for n in axis)]
        numbers += [stride for factor in factors for stride in factor.strides]
        self._dtype = SINGLE[terms.into.dtype]
        self._pointers = (ctypes.c_void_p * len(factors))(*(factor.data.data_ptr() for factor in factors))
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


NARROW = 4  # entries of the longest axis below which a kernel's vectors are mostly empty


def compiled_sum(u: WeightJacobian, v: WeightJacobian, K: Tensor, into: Tensor, *, same: bool) -> KernelSum | None:
    """Return U^T K V of one weight with another, as a sum for the compiled kernels.

    Args:
        u: Jacobian of the rows of the block.
        v: Jacobian of its columns.
        K: Curvature (R, p, q).
        into: The block, or a view of it.
        same: Whether u and v are one Jacobian and K is symmetric.

    Returns:
        None if there are no kernels for this, or all axes are too short.
    """
    sizes = (u.X.shape[1], K.shape[1], v.X.shape[1], K.shape[2])
    if kernels() is None or not _are_plain(into, u.X, v.X, K) or max(sizes) < NARROW:
        return None
    (a_n, a_i), (b_n, b_j), (k_n, k_p, k_q) = u.X.stride(), v.X.stride(), K.stride()
    out = [step for w, step in zip((u, v), into.stride(), strict=True) for step in _strides(w, step)]
    order = range(4) if same else sorted(range(4), key=lambda axis: -out[axis])  # that of other sums to the block

    def factor(x: Tensor, row: int, *along: int) -> KernelFactor:
        return KernelFactor(x, (row, *(along[axis] * (sizes[axis] > 1) for axis in order)))

    term = (factor(u.X, a_n, a_i, 0, 0, 0), factor(v.X, b_n, 0, 0, b_j, 0), factor(K, k_n, 0, k_p, 0, k_q))
    return KernelSum(into, len(K), tuple((sizes[axis], out[axis]) for axis in order), (term,), symmetric=same)


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
    return not graph and _are_plain(a, b) and 0 < a.shape[-2] * a.shape[-1] * b.shape[-1] <= LARGEST and a.numel() * b.numel() > 0


def _are_plain(*tensors: Tensor) -> bool:
    """Tell whether all are of one type that the kernels know, and their entries are what lies in this processor's memory.

    A tensor whose negative bit is set (``z.conj().imag``) has other entries than its memory; torch's zero tensors have none.
    """
    dtype = tensors[0].dtype
    in_memory = all(x.is_cpu and x.dtype == dtype and not x.is_neg() and not x._is_zerotensor() for x in tensors)
    return dtype in SINGLE and in_memory
