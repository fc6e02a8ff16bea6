"""Products A B linearised: the tangent a B + A b, and the covectors bar B^T + w b^T and A^T bar + a^T w for an adjoint w.

Where one matrix B serves all rows of A, all rows enter one product, and the second term of each sum is added by the product
itself, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hessiankit.primitives.directions import add_product, align, by_columns, stacked, unbroadcast
from hessiankit.primitives.primitive import CovectorSum, Linearised, Sums, hollow, into, plus, total

if TYPE_CHECKING:
    from hessiankit.primitives.primitive import Covectors, Inputs, Primitive, Tangents


class SharedProduct(Linearised):
    """N = A B + c for one matrix B (k, j), or N = A B^T + c for B stored as (j, k); c is a row, or absent."""

    def __init__(
        self,
        primitive: Primitive,
        inputs: Inputs,
        adjoint: Tensor | None,
        needs: Sequence[bool] | None,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(primitive, inputs, adjoint, needs)
        self.transposed = transposed
        self._B = self._turned(inputs[1])
        self.rows = inputs[0].reshape(-1, self._B.shape[0])
        self.shape = (*inputs[0].shape[:-1], self._B.shape[1])
        self.w = None if adjoint is None else adjoint.reshape(-1, self._B.shape[1])

    @property
    def B(self) -> Tensor:
        """B, in the type of the rows."""
        return self._B.to(self.rows.dtype)

    @property
    def matrix(self) -> Tensor | None:
        """B."""
        return self.B

    def forget(self) -> None:
        """Keep the rows and the matrix alone."""
        self.inputs = tuple(map(hollow, self.inputs))

    def hold(self, inputs: Inputs) -> None:
        """Hold B as it is stored."""
        self._B = self._turned(inputs[1])

    def push(self, tangents: Tangents) -> Tensor:
        """Return a B + A b + c."""
        a, b, c = (*tangents, None)[:3]
        out = None if a is None else add_product(None, stacked(a, self.rows.shape), self.B)
        if b is not None:
            out = add_product(out, self.rows, self._turned(stacked(b, self.inputs[1].shape)))
        if c is not None:
            c = c if c.shape[0] == 1 else c.unsqueeze(1)  # (1, j) or (S, 1, j)
            out = c.expand(*c.shape[:-2], len(self.rows), -1) if out is None else out.add_(c)
        return total(self.primitive, out).reshape(-1, *self.shape)

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return bar B^T + w b^T, A^T bar + a^T w and the sum of bar over the rows."""
        return self.pull_into(bar, tangents, (None,) * len(self.inputs))

    def pull_into(self, bar: Tensor | None, tangents: Tangents | None, sums: Sums) -> Covectors:
        """Pull into the sums; the product that a covector of B is goes straight into its sum."""
        a, b = (None, None) if tangents is None else tangents[:2]
        to_A = to_B = to_c = None
        count = next((len(x) for x in (bar, a) if x is not None), 1)
        if bar is not None:
            if len(self.inputs) > 2 and self.needs[2]:
                to_c = bar.reshape(bar.shape[0], -1, self.shape[-1]).sum(1)
            bar = stacked(bar, (len(self.rows), self.shape[-1]))
        if self.needs[0]:
            to_A = None if bar is None else add_product(None, bar, self.B.mT)
            if b is not None:
                to_A = add_product(to_A, self._w, self._turned(stacked(b, self.inputs[1].shape)).mT)
            to_A = None if to_A is None else to_A.reshape(-1, *self.inputs[0].shape)
        if self.needs[1] and not (bar is None and a is None):
            into_B = sums[1] or CovectorSum(self.rows.new_empty(count, *self.inputs[1].shape))
            for left, right in ((self.rows, bar), (None if a is None else stacked(a, self.rows.shape), self.w)):
                if left is not None and right is not None:
                    into_B.add_product(*((right.mT, left) if self.transposed else (left.mT, right)))
            to_B = None if sums[1] is not None else into_B.memory
        covectors = into((sums[0], None, *sums[2:]), (to_A, None, to_c)[: len(self.inputs)])
        return (covectors[0], to_B, *covectors[2:])

    @property
    def _w(self) -> Tensor:
        if self.w is None:
            raise ValueError(f"{type(self.primitive).__name__}: linearised without an adjoint, so no tangents can be pulled")
        return self.w

    def _turned(self, b: Tensor) -> Tensor:
        return b.mT if self.transposed else b


class BatchedProduct(Linearised):
    """N = A B for A and B of the same leading axes, at least one: one product each."""

    def __init__(self, primitive: Primitive, inputs: Inputs, adjoint: Tensor | None, needs: Sequence[bool] | None) -> None:
        super().__init__(primitive, inputs, adjoint, needs)
        self.A, self.B = (x.flatten(0, -3) for x in inputs)
        self.shape = (*inputs[0].shape[:-1], inputs[1].shape[-1])

    def push(self, tangents: Tangents) -> Tensor:
        """Return a B + A b."""
        (a, b), count = self._flat(tangents)
        out = None if a is None else torch.bmm(a, _repeated(self._B, count))
        if b is not None:
            A = _repeated(self.A, count)
            out = torch.bmm(A, b) if out is None else out.baddbmm_(A, b)
        return total(self.primitive, out).reshape(count, *self.shape)

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return bar B^T + w b^T and A^T bar + a^T w, each laid out as its input is."""
        (a, b), count = ((None, None), 1) if tangents is None else self._flat(tangents)
        to_A = to_B = None
        if bar is not None:
            count, bar = bar.shape[0], bar.reshape(-1, *self.shape[-2:])
            to_A = torch.bmm(bar, _repeated(self._B_T, count)) if self.needs[0] else None
            to_B = self._add_to_B(None, _repeated(self.A, count), bar) if self.needs[1] else None
        if a is not None or b is not None:
            w = _repeated(self._w, count)
            if b is not None and self.needs[0]:
                to_A = torch.bmm(w, b.mT) if to_A is None else to_A.baddbmm_(w, b.mT)
            if a is not None and self.needs[1]:
                to_B = self._add_to_B(to_B, a, w)
        if to_B is not None and self._by_columns:
            to_B = to_B.mT
        covectors = zip((to_A, to_B), self.inputs, strict=True)
        return tuple(None if covector is None else covector.unflatten(0, (count, *x.shape[:-2])) for covector, x in covectors)

    @cached_property
    def _B(self) -> Tensor:
        return by_columns(self.B)

    @cached_property
    def _B_T(self) -> Tensor:
        return by_columns(self.B.mT)

    @cached_property
    def _w(self) -> Tensor:
        return self.adjoint.reshape(-1, *self.shape[-2:])

    @cached_property
    def _by_columns(self) -> bool:
        return self.B.mT.is_contiguous()

    def _add_to_B(self, out: Tensor | None, a: Tensor, w: Tensor) -> Tensor:
        """Add a^T w, or its transpose where B lies by columns."""
        left, right = (w.mT, a) if self._by_columns else (a.mT, w)
        return torch.bmm(left, right) if out is None else out.baddbmm_(left, right)

    def _flat(self, tangents: Tangents) -> tuple[list[Tensor | None], int]:
        count = next((t.shape[0] for t in tangents if t is not None), 1)
        return [None if t is None else t.reshape(-1, *x.shape[-2:]) for t, x in zip(tangents, self.inputs, strict=True)], count


class BroadcastProduct(Linearised):
    """N = A B with the broadcasting of ``torch.matmul``."""

    def push(self, tangents: Tangents) -> Tensor:
        """Return a B + A b."""
        (A, B), (a, b) = self.inputs, self._aligned(tangents)
        return total(self.primitive, None if a is None else a @ B, None if b is None else A @ b)

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return bar B^T + w b^T and A^T bar + a^T w, summed over what was repeated."""
        (A, B), (a, b) = self.inputs, (None, None) if tangents is None else self._aligned(tangents)
        to_A = to_B = None
        if self.needs[0]:
            to_A = plus(
                None if bar is None else unbroadcast(bar @ B.mT, A.shape),
                None if b is None else unbroadcast(self.adjoint @ b.mT, A.shape),
            )
        if self.needs[1]:
            to_B = plus(
                None if bar is None else unbroadcast(A.mT @ bar, B.shape),
                None if a is None else unbroadcast(a.mT @ self.adjoint, B.shape),
            )
        return to_A, to_B

    def _aligned(self, tangents: Tangents) -> list[Tensor | None]:
        ndim = max(x.ndim for x in self.inputs)
        return [None if t is None else align(t, x.shape, ndim) for t, x in zip(tangents, self.inputs, strict=True)]


def _repeated(x: Tensor, count: int) -> Tensor:
    """Return x once for each direction, laid out as it is."""
    if count == 1:
        return x
    if x.mT.is_contiguous():
        return x.mT.expand(count, *x.mT.shape).flatten(0, 1).mT
    return x.expand(count, *x.shape).flatten(0, 1)
