"""Products of many small matrices by the compiled kernel, which is two to four times as fast at them as ``torch.bmm``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hessiankit.engine.kernel_sums import SINGLE, SMALL
from hessiankit.engine.recorder import recorder
from hessiankit.support.kernels import kernels

LARGEST = 2**18  # multiply-adds of one product beyond which a library of linear algebra is as fast


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
    if library is None or a.ndim + b.ndim < 5 or not _fit(a, b):
        return a @ b
    a, b = (x if x.ndim == 3 else x.expand(len(y), -1, -1) for x, y in ((a, b), (b, a)))
    if len(a) != len(b) or a.shape[2] != b.shape[1]:
        return a @ b
    product = KernelProduct(a.new_empty(len(a), a.shape[1], b.shape[2]), a, b)
    if (watching := recorder()) is not None:
        watching.add_compiled(library.hessiankit_multiply, product)
    product.bound(library.hessiankit_multiply)()
    return product.into


def _fit(a: Tensor, b: Tensor) -> bool:
    """Tell whether there is a kernel for a product, and it pays."""
    graph = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    alike = a.dtype == b.dtype and a.dtype in SINGLE and a.is_cpu and b.is_cpu
    return not graph and alike and 0 < a.shape[-2] * a.shape[-1] * b.shape[-1] <= LARGEST and a.numel() * b.numel() > 0
