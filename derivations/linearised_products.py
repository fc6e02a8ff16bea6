"""Products A B linearised: the tangent a B + A b, and the covectors bar B^T + w b^T and A^T bar + a^T w for an adjoint w.

Where one matrix B serves all rows of A, all rows enter one product, and the second term of each sum is added by the product
itself, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from derivations.broadcasting import align, unbroadcast
from derivations.linearised import Linearised, plus

if TYPE_CHECKING:
    from derivations.primitive import Covectors, Inputs, Primitive, Tangents


class SharedProduct(Linearised):
    """N = A B + c for one matrix B (k, j), or N = A B^T + c for B stored as (j, k); c is a row, or absent."""

    def __init__(
        self,
        primitive: Primitive,
        inputs: Inputs,
        adjoint: Tensor | None,
        wanted: Sequence[bool] | None,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(primitive, inputs, adjoint, wanted)
        self.transposed = transposed
        self.B = self._turned(inputs[1])
        self.rows = inputs[0].reshape(-1, self.B.shape[0])
        self.shape = (*inputs[0].shape[:-1], self.B.shape[1])
        self.w = None if adjoint is None else adjoint.reshape(-1, self.B.shape[1])

    def push(self, tangents: Tangents) -> Tensor:
        """Return a B + A b + c."""
        a, b, c = (*tangents, None)[:3]
        out = None if a is None else _add_product(None, a.reshape(a.shape[0], *self.rows.shape), self.B)
        if b is not None:
            out = _add_product(out, self.rows, self._turned(b))
        if c is not None:
            c = c.unsqueeze(1)
            out = c.expand(-1, len(self.rows), -1) if out is None else out.add_(c)
        if out is None:
            raise ValueError("jvp: every tangent is None; at least one input must move")
        return out.reshape(-1, *self.shape)

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return bar B^T + w b^T, A^T bar + a^T w and the sum of bar over the rows."""
        a, b = (None, None) if tangents is None else tangents[:2]
        bar = None if bar is None else bar.reshape(bar.shape[0], -1, self.B.shape[1])
        to_A = to_B = to_c = None
        if self.wanted[0]:
            to_A = None if bar is None else _add_product(None, bar, self.B.mT)
            to_A = to_A if b is None else _add_product(to_A, self._w, self._turned(b).mT)
        if self.wanted[1]:
            to_B = None if bar is None else self._add_outer(None, self.rows, bar)
            to_B = to_B if a is None else self._add_outer(to_B, a.reshape(a.shape[0], *self.rows.shape), self._w)
        if bar is not None and len(self.inputs) > 2 and self.wanted[2]:
            to_c = bar.sum(1)
        to_A = None if to_A is None else to_A.reshape(-1, *self.inputs[0].shape)
        return (to_A, to_B, to_c)[: len(self.inputs)]

    @property
    def _w(self) -> Tensor:
        if self.w is None:
            raise ValueError(f"{type(self.primitive).__name__}: linearised without an adjoint, so no tangents can be pulled")
        return self.w

    def _turned(self, b: Tensor) -> Tensor:
        return b.mT if self.transposed else b

    def _add_outer(self, out: Tensor | None, a: Tensor, w: Tensor) -> Tensor:
        """Add a^T w, in B's own layout."""
        return _add_product(out, w.mT, a) if self.transposed else _add_product(out, a.mT, w)


class BatchedProduct(Linearised):
    """N = A B for A and B of the same leading axes: one product each."""

    def __init__(self, primitive: Primitive, inputs: Inputs, adjoint: Tensor | None, wanted: Sequence[bool] | None) -> None:
        super().__init__(primitive, inputs, adjoint, wanted)
        self.A, self.B = (x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0) for x in inputs)
        self.shape = (*inputs[0].shape[:-1], inputs[1].shape[-1])

    def push(self, tangents: Tangents) -> Tensor:
        """Return a B + A b."""
        (a, b), count = self._flat(tangents)
        out = None if a is None else torch.bmm(a, _repeated(self.B, count))
        if b is not None:
            A = _repeated(self.A, count)
            out = torch.bmm(A, b) if out is None else out.baddbmm_(A, b)
        if out is None:
            raise ValueError("jvp: every tangent is None; at least one input must move")
        return out.reshape(count, *self.shape)

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return bar B^T + w b^T and A^T bar + a^T w."""
        (a, b), count = ((None, None), 1) if tangents is None else self._flat(tangents)
        to_A = to_B = None
        if bar is not None:
            count, bar = bar.shape[0], bar.reshape(-1, *self.shape[-2:])
            to_A = torch.bmm(bar, _repeated(self.B.mT, count)) if self.wanted[0] else None
            to_B = torch.bmm(_repeated(self.A.mT, count), bar) if self.wanted[1] else None
        if a is not None or b is not None:
            w = _repeated(self.adjoint.reshape(-1, *self.shape[-2:]), count)
            if b is not None and self.wanted[0]:
                to_A = torch.bmm(w, b.mT) if to_A is None else to_A.baddbmm_(w, b.mT)
            if a is not None and self.wanted[1]:
                to_B = torch.bmm(a.mT, w) if to_B is None else to_B.baddbmm_(a.mT, w)
        found = zip((to_A, to_B), self.inputs, strict=True)
        return tuple(None if covector is None else covector.reshape(count, *x.shape) for covector, x in found)

    def _flat(self, tangents: Tangents) -> tuple[list[Tensor | None], int]:
        count = next((t.shape[0] for t in tangents if t is not None), 1)
        return [None if t is None else t.reshape(-1, *x.shape[-2:]) for t, x in zip(tangents, self.inputs, strict=True)], count


class BroadcastProduct(Linearised):
    """N = A B with the broadcasting of ``torch.matmul``."""

    def push(self, tangents: Tangents) -> Tensor:
        """Return a B + A b."""
        (A, B), (a, b) = self.inputs, self._aligned(tangents)
        out = None if a is None else a @ B
        if b is not None:
            moved = A @ b
            out = moved if out is None else out.add_(moved)
        if out is None:
            raise ValueError("jvp: every tangent is None; at least one input must move")
        return out

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return bar B^T + w b^T and A^T bar + a^T w, summed over what was repeated."""
        (A, B), (a, b) = self.inputs, (None, None) if tangents is None else self._aligned(tangents)
        to_A = to_B = None
        if self.wanted[0]:
            to_A = plus(
                None if bar is None else unbroadcast(bar @ B.mT, A.shape),
                None if b is None else unbroadcast(self.adjoint @ b.mT, A.shape),
            )
        if self.wanted[1]:
            to_B = plus(
                None if bar is None else unbroadcast(A.mT @ bar, B.shape),
                None if a is None else unbroadcast(a.mT @ self.adjoint, B.shape),
            )
        return to_A, to_B

    def _aligned(self, tangents: Tangents) -> list[Tensor | None]:
        ndim = max(x.ndim for x in self.inputs)
        return [None if t is None else align(t, x.shape, ndim) for t, x in zip(tangents, self.inputs, strict=True)]


def _repeated(x: Tensor, count: int) -> Tensor:
    """Return x once for each direction."""
    return x if count == 1 else x.expand(count, *x.shape).flatten(0, 1)


def _add_product(out: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return out + a b, of shape (S, i, j), in out's memory; one of a (S, i, k) and b (S, k, j) may lack S."""
    count = a.shape[0] if a.ndim == 3 else b.shape[0]
    if out is None and b.ndim == 2 and a.is_contiguous():
        return (a.reshape(-1, a.shape[-1]) @ b).reshape(*a.shape[:-1], -1)
    if count == 1:
        a, b = (x[0] if x.ndim == 3 else x for x in (a, b))
        return (a @ b).unsqueeze(0) if out is None else out[0].addmm_(a, b).unsqueeze(0)
    a, b = (x.expand(count, *x.shape[-2:]) for x in (a, b))
    return torch.bmm(a, b) if out is None else out.baddbmm_(a, b)
