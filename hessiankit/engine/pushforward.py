"""Pushforward of tangents through one primitive, D phi T, and the curvature T^T [lambda . D^2 phi] T', by their structure.

A vertex moves its own value by an identity, entrywise functions of it by diag(slopes), and the product of those with one weight W
for all rows by diag(slopes) W, row by row: none of them needs a matrix product with tangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from derivations.activation import Activation
from derivations.cast import Cast
from derivations.elementwise import Elementwise
from derivations.linear import Add, Linear, MaskedFill, MatMul, Multiple, Shift
from derivations.linearised_norms import LinearisedNorm
from derivations.loss import MeanSquaredError
from derivations.normalization import LayerNorm, RMSNorm
from derivations.primitive import Linearised, Primitive
from hessiankit.engine.kernel_products import multiply
from hessiankit.engine.tangents import EntrywiseTangents, StackedTangents, TangentGroup, by_row

ENTRYWISE = (Activation, Elementwise)
LINEAR_ENTRYWISE = (Cast, MaskedFill, Multiple, Shift)


class LazyLinearisation:
    """A primitive at its inputs; its derivatives are computed when first read, and shared by pushforward and contraction.

    Args:
        primitive: phi.
        inputs: The point.
        adjoint: lambda, of the output's shape; None where the second derivative is not wanted.
        moving: Which inputs move.
    """

    def __init__(self, primitive: Primitive, inputs: tuple[Any, ...], adjoint: Tensor | None, moving: Sequence[bool]) -> None:
        self.primitive, self.inputs, self.adjoint, self.moving = primitive, inputs, adjoint, moving

    @cached_property
    def linearised(self) -> Linearised:
        """The linearised primitive."""
        return self.primitive.linearise(self.inputs, self.adjoint, self.moving)


def push_forward(point: LazyLinearisation, g: TangentGroup) -> StackedTangents:
    """Return the tangents D phi T of a primitive's output by the vertices of a group."""
    primitive, inputs = point.primitive, point.inputs
    copies = isinstance(primitive, Add) and primitive.alpha == 1 and inputs[0].shape == inputs[1].shape
    alone, by_last = g.entrywise, g.level == inputs[0].ndim - 1
    if alone is not None:
        if copies:
            return alone
        if isinstance(primitive, (*ENTRYWISE, *LINEAR_ENTRYWISE)):
            slopes = point.linearised.push([alone.slopes.unsqueeze(0)])[0]
            if slopes.shape == alone.slopes.shape:
                return EntrywiseTangents(slopes, g.vertices[0], g.level)
        if isinstance(primitive, (LayerNorm, RMSNorm)) and primitive.dims == 1 and alone.identities and g.moving[0] and by_last:
            assert isinstance(point.linearised, LinearisedNorm)
            return _rows(point.linearised.jacobian_rows(), inputs[0].shape, g)
    if isinstance(primitive, (Linear, MatMul)) and g.moving[0] and sum(g.moving) == 1 and inputs[1].ndim == 2 and by_last:
        weight = inputs[1].mT if isinstance(primitive, Linear) else inputs[1]
        return _rows(_times(g, weight), (*inputs[0].shape[:-1], weight.shape[1]), g)
    return StackedTangents(point.linearised.push(g.tangents), g.vertices, g.widths, g.identities if copies else frozenset())


def _times(g: TangentGroup, weight: Tensor) -> Tensor:
    """Return T W, row by row, for one weight W (k, p): (R, S, p); of an identity, W for all rows."""
    alone = g.entrywise
    if alone is None:
        (t,) = (t for t in g.tangents if t is not None)
        return multiply(by_row(t, g.level), weight)
    return weight.expand(len(alone.rows), -1, -1) if alone.identities else alone.rows.unsqueeze(2) * weight


def _rows(rows: Tensor, shape: Sequence[int], g: TangentGroup) -> StackedTangents:
    """Return tangents from rows (R, S, f)."""
    return StackedTangents(rows.transpose(0, 1).reshape(rows.shape[1], *shape), g.vertices, g.widths)


def contract(g: TangentGroup, k: int, w: Tensor) -> Tensor:
    """Return T^T w for the tangents T of input k and covectors w (R, c, f), row by row: (R, S, c)."""
    if g.entrywise is None:
        t = g.tangents[k]
        assert t is not None
        return multiply(by_row(t, g.level), w.mT)
    if g.identities:
        return w.contiguous().mT
    return (w * g.entrywise.rows.unsqueeze(1)).mT


def structured_curvature(point: LazyLinearisation, g: TangentGroup) -> Tensor | None:
    """Return the curvature of one vertex that moves a primitive's first input entrywise: (R, w, w), or its diagonal (R, w).

    Empty where it vanishes; None where no structure can be used, and tangents have to be contracted.
    """
    alone, primitive = g.entrywise, point.primitive
    if alone is None or not g.moving[0] or g.level != point.inputs[0].ndim - 1:
        return None
    if isinstance(primitive, (*ENTRYWISE, MeanSquaredError)):
        still = [None] * (len(point.inputs) - 1)
        bent = point.linearised.pull(None, [alone.slopes.unsqueeze(0), *still])[0]
        return alone.rows.new_zeros(0) if bent is None else alone.rows * bent.reshape(alone.rows.shape)
    if isinstance(primitive, (LayerNorm, RMSNorm)) and primitive.dims == 1 and alone.identities:
        assert isinstance(point.linearised, LinearisedNorm)
        return point.linearised.curvature_rows()
    return None
