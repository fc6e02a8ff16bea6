"""Linear and bilinear primitives: matrix products, sums, products, masks and re-arrangements.

With N = A W B, dN/dW = A (x) B^T in vec_r (Property 5 of "Closing the Curvature Gap"; ``derivations.affine``). The actions below
are this statement at size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from hessiankit.primitives.directions import align, joint_shape, same_rows, unbroadcast
from hessiankit.primitives.linearised_products import BatchedProduct, BroadcastProduct, SharedProduct
from hessiankit.primitives.primitive import (
    AffineByEntry,
    ByLinearising,
    Covectors,
    Inputs,
    Linearised,
    Primitive,
    Role,
    Tangents,
    total,
)


def _aligned(inputs: Inputs, tangents: Tangents) -> tuple[torch.Size, list[Tensor | None]]:
    """Return the output's shape and the tangents aligned with it."""
    if inputs[0].shape == inputs[1].shape:
        return inputs[0].shape, list(tangents)
    shape = joint_shape(inputs[0].shape, inputs[1].shape)
    return shape, [None if t is None else align(t, x.shape, len(shape)) for x, t in zip(inputs, tangents, strict=True)]


@dataclass(frozen=True)
class MatMul(ByLinearising):
    """N = A B with ``torch.matmul``'s broadcasting, for A and B of two or more axes; or A B + c with B (i, j) and c (j,).

    Bilinear: D^2 N [(a, b), (a', b')] = a b' + a' b.
    """

    is_product = True
    roles = MappingProxyType({1: "weight"})

    def value(self, *inputs: Tensor) -> Tensor:
        product = inputs[0] @ inputs[1]
        return product if len(inputs) == 2 else product + inputs[2]

    def multiplications(self, inputs: Inputs, output: Tensor) -> int:
        return output.numel() * inputs[0].shape[-1]

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        A, B = inputs[:2]
        kind = SharedProduct if B.ndim == 2 else BatchedProduct if A.shape[:-2] == B.shape[:-2] else BroadcastProduct
        return kind(self, inputs, adjoint, needs)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        A, B = inputs[:2]
        if B.ndim == 2 and not any(motion[1:]):
            return axes <= A.ndim - 1
        rows = joint_shape(A.shape[:-2], B.shape[:-2])
        if axes == len(rows) + 1:
            return not motion[1] and A.shape[:-2] == rows
        fits = (x.ndim - 2 == len(rows) and x.shape[:axes] == rows[:axes] for x, m in zip(inputs, motion, strict=True) if m)
        return axes <= len(rows) and all(fits)


@dataclass(frozen=True)
class Linear(ByLinearising):
    """N = X W^T + b with W stored as (d_out, d_in), as ``torch.nn.functional.linear``; b may be absent (None)."""

    is_product = True
    roles = MappingProxyType({1: "transposed weight", 2: "bias"})

    def value(self, *inputs: Tensor) -> Tensor:
        return torch.nn.functional.linear(*inputs)

    def multiplications(self, inputs: Inputs, output: Tensor) -> int:
        return output.numel() * inputs[0].shape[-1]

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        return SharedProduct(self, inputs, adjoint, needs, transposed=True)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim - 1 and not any(motion[1:])


@dataclass(frozen=True)
class Add(Primitive):
    """N = a + alpha b with broadcasting."""

    alpha: float = 1.0
    is_linear = True
    is_entrywise = is_quick = True

    @property
    def roles(self) -> Mapping[int, Role]:
        return {0: "term", 1: "term"} if self.alpha == 1 else {}

    def value(self, *inputs: Tensor) -> Tensor:
        return torch.add(inputs[0], inputs[1], alpha=self.alpha)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        shape, (a, b) = _aligned(inputs, tangents)
        tangent = total(self, a, b if b is None or self.alpha == 1 else b * self.alpha)
        return tangent if tangent.shape[1:] == shape else tangent.expand(tangent.shape[0], *shape)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        to_b = adjoint if self.alpha == 1 else self.alpha * adjoint
        return unbroadcast(adjoint, inputs[0].shape), unbroadcast(to_b, inputs[1].shape)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return same_rows(inputs, axes, motion)


@dataclass(frozen=True)
class Multiply(Primitive):
    """N = a o b with broadcasting; D^2 N [(a, b), (a', b')] = a b' + a' b."""

    is_entrywise = is_quick = True

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0] * inputs[1]

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        shape, (a, b) = _aligned(inputs, tangents)
        tangent = total(self, None if a is None else a * inputs[1], None if b is None else inputs[0] * b)
        return tangent.expand(tangent.shape[0], *shape)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        a, b = inputs
        return unbroadcast(adjoint * b, a.shape), unbroadcast(adjoint * a, b.shape)

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        to: list[Tensor | None] = []
        for target, partner in ((0, 1), (1, 0)):
            t = tangents[partner]
            product = None if t is None else adjoint * align(t, inputs[partner].shape, adjoint.ndim)
            to.append(None if product is None else unbroadcast(product, inputs[target].shape))
        return tuple(to)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return same_rows(inputs, axes, motion)


@dataclass(frozen=True)
class Multiple(AffineByEntry):
    """N = c x for a constant number c."""

    c: float

    is_entrywise = is_quick = True

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0] * self.c

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return total(self, tangents[0]) * self.c

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        return (adjoint * self.c,)


@dataclass(frozen=True)
class Shift(AffineByEntry):
    """N = x + c for a constant number c."""

    c: float

    is_entrywise = is_quick = True

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0] + self.c

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return total(self, tangents[0])

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        return (adjoint,)


@dataclass(frozen=True, eq=False)
class MaskedFill(AffineByEntry):
    """N = x where the mask is False and a constant where it is True (minus infinity for attention masks)."""

    mask: Tensor
    fill: float

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0].masked_fill(self.mask, self.fill)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return total(self, tangents[0]).masked_fill(self.mask, 0)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        return (adjoint.masked_fill(self.mask, 0),)


@dataclass(frozen=True)
class Reshape(Primitive):
    """N = x read in another shape of as many entries."""

    shape: tuple[int, ...]
    is_linear = True
    selects = True

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0].reshape(self.shape)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        t = total(self, tangents[0])
        return t.reshape(t.shape[0], *self.shape)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        return (adjoint.reshape(adjoint.shape[0], *inputs[0].shape),)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        input_shape = inputs[0].shape
        keeps_axes = tuple(input_shape[:axes]) == tuple(self.shape[:axes])
        return keeps_axes and math.prod(input_shape[axes:]) == math.prod(self.shape[axes:])


@dataclass(frozen=True)
class Permute(Primitive):
    """N = x with its axes in another order."""

    order: tuple[int, ...]
    is_linear = True
    selects = True

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0].permute(self.order)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return total(self, tangents[0]).permute(0, *(i + 1 for i in self.order))

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return (adjoint.permute(0, *(i + 1 for i in inverse)),)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return self.order[:axes] == tuple(range(axes))


@dataclass(frozen=True)
class Expand(Primitive):
    """N = x repeated along axes of length one, or along new leading axes."""

    shape: tuple[int, ...]
    is_linear = True
    selects = True

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0].expand(self.shape)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        t = align(total(self, tangents[0]), inputs[0].shape, len(self.shape))
        return t.expand(t.shape[0], *self.shape)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        return (unbroadcast(adjoint, inputs[0].shape),)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        keeps_axes = tuple(inputs[0].shape[:axes]) == self.shape[:axes]
        return keeps_axes and inputs[0].ndim == len(self.shape)  # a new axis in front would shift the rows
