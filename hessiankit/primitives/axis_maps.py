"""A constant matrix along each of some axes: average pooling, interpolation, cumulative sums.

Each of them maps the vectors along one axis by a matrix M of its own, N = X x_k M in tensor notation; along two axes
of an image this is M X K^T, with vec_r(N) = (M (x) K) vec_r(X) (Property 5 of "Closing the Curvature Gap").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.primitives.primitive import Covectors, Inputs, Primitive, Tangents, total


@dataclass(frozen=True, eq=False)
class AxisMaps(Primitive):
    """N[..., i, ...] = sum_j M[i, j] X[..., j, ...] for each of some axes; inputs (X,).

    Args:
        dims: the axes, no two the same.
        matrices: for each axis a constant matrix of shape (length in N, length in X).

    >>> halves = AxisMaps((-1,), (torch.tensor([[0.5, 0.5]]),))
    >>> halves.value(torch.tensor([1.0, 3.0])).tolist(), halves.vjp((torch.ones(2),), torch.ones(1, 1))[0].tolist()
    ([2.0], [[0.5, 0.5]])
    """

    dims: tuple[int, ...]
    matrices: tuple[Tensor, ...]
    is_linear = True

    def value(self, *inputs: Tensor) -> Tensor:
        return self._apply(inputs[0].ndim, inputs[0], [M.mT for M in self.matrices])

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return self._apply(inputs[0].ndim, total(self, tangents[0]), [M.mT for M in self.matrices])

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        return (self._apply(inputs[0].ndim, adjoint, self.matrices),)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim and all(dim % inputs[0].ndim >= axes for dim in self.dims)

    def _apply(self, ndim: int, x: Tensor, transposed: Sequence[Tensor]) -> Tensor:
        for dim, M in zip(self.dims, transposed, strict=True):
            axis = dim % ndim - ndim  # counted from the end, which is the same for X and for a stack of tangents
            x = torch.movedim(torch.movedim(x, axis, -1) @ M.to(x.dtype), -1, axis)
        return x
