"""Tensors assembled from the entries of several, and entries added at given places: scatter, padding, index_add.

All are linear: N = P [vec_r(X_1); ...; vec_r(X_m)] for a choice of entries, and N = X + alpha P^T vec_r(Y) for an addition,
with a matrix P of zeros and ones that is never formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.primitives.directions import add_at
from hessiankit.primitives.primitive import Covectors, Inputs, Primitive, Tangents, total


@dataclass(frozen=True, eq=False)
class TakeAmong(Primitive):
    """N = [vec_r(X_1); ...; vec_r(X_m)][at]: any choice of entries from several tensors; inputs (X_1, ..., X_m).

    Args:
        at: positions in the concatenated vectors, integers of the output's shape.

    >>> padded = TakeAmong(torch.tensor([0, 1, 2, 0]))  # [c, x_1, x_2, c]
    >>> [c.tolist() for c in padded.vjp((torch.tensor(0.0), torch.ones(2)), torch.tensor([[3.0, 4.0, 5.0, 6.0]]))]
    [[9.0], [[4.0, 5.0]]]
    """

    at: Tensor
    is_linear = True

    def value(self, *inputs: Tensor) -> Tensor:
        return torch.cat([x.reshape(-1) for x in inputs])[self.at]

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        terms: list[Tensor] = []
        start = 0
        for x, t in zip(inputs, tangents, strict=True):
            if t is not None:
                mask = (self.at >= start) & (self.at < start + x.numel())
                terms.append(t.reshape(t.shape[0], -1)[:, torch.where(mask, self.at - start, 0)].masked_fill(~mask, 0))
            start += x.numel()
        return total(self, *terms)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        out = adjoint.new_zeros(adjoint.shape[0], sum(x.numel() for x in inputs))
        add_at(out, 1, self.at.reshape(-1), adjoint.reshape(adjoint.shape[0], -1))
        pieces = out.split([x.numel() for x in inputs], 1)
        return tuple(piece.reshape(-1, *x.shape) for piece, x in zip(pieces, inputs, strict=True))

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        start, rows = 0, self.at.shape[:axes]
        if axes > self.at.ndim or not self.at.numel():
            return False
        flat = self.at.reshape(rows.numel(), -1)
        row = torch.arange(rows.numel(), device=flat.device).unsqueeze(1)
        for x, moves in zip(inputs, motion, strict=True):
            if moves:
                if x.ndim < axes or x.shape[:axes] != rows:
                    return False
                mask = (flat >= start) & (flat < start + x.numel())
                if not bool((~mask | ((flat - start) // max(x.shape[axes:].numel(), 1) == row)).all()):
                    return False
            start += x.numel()
        return True


@dataclass(frozen=True, eq=False)
class AddAt(Primitive):
    """N = X with alpha vec_r(Y)[k] added to vec_r(X)[at[k]] for every k; positions may repeat; inputs (X, Y).

    Args:
        at: positions in vec_r(X), integers of Y's shape.
        alpha: a constant factor.

    >>> AddAt(torch.tensor([1, 1])).value(torch.zeros(2), torch.tensor([3.0, 4.0])).tolist()
    [0.0, 7.0]
    """

    at: Tensor
    alpha: float = 1.0
    is_linear = True

    def value(self, *inputs: Tensor) -> Tensor:
        X, Y = inputs
        return (X.reshape(-1) + self._put(Y.unsqueeze(0), X)[0]).reshape(X.shape)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        (x, y), X = tangents, inputs[0]
        return total(self, x, None if y is None else self._put(y, X).reshape(-1, *X.shape))

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        entries = adjoint.reshape(adjoint.shape[0], -1)[:, self.at]
        return adjoint, entries if self.alpha == 1 else self.alpha * entries

    def _put(self, y: Tensor, X: Tensor) -> Tensor:
        out = y.new_zeros(y.shape[0], X.numel())
        return add_at(out, 1, self.at.reshape(-1), self.alpha * y.reshape(y.shape[0], -1))
