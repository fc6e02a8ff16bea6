"""Tangents: the Jacobian of a value by earlier vertices, as directions (S, *shape), at the finest level that is exact.

A :class:`Vertex` has ``width`` entries in each of its rows, which its leading ``axes`` index. At level k rows are grouped by the
first k axes, R_k groups, and tangents couple entries of one group only:

    k = axes of the vertex    S = width                      row r of the value depends on row r of the vertex
    k = 1                     S = width x rows of a sample   a sample of the value depends on that sample
    k = 0                     S = all entries of the vertex  dense

Coordinates of a vertex are numbered (R_k, S) at level k.

A vertex moves its own value by an identity, entrywise functions of it by diag(d), and the product of those with one weight W for
all rows by diag(d) W, row by row: none of them needs a matrix product with tangents when it is pushed through a
primitive, D phi T, or contracted with its second derivative, T^T [lambda . D^2 phi] T'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from derivations.activation import Activation
from derivations.cast import Cast
from derivations.elementwise import Elementwise
from derivations.linear import Add, Linear, MaskedFill, MatMul, Multiple, Shift
from derivations.linearised_norms import LinearisedNorm
from derivations.loss import MeanSquaredError
from derivations.normalization import LayerNorm, RMSNorm
from derivations.primitive import Linearised, Primitive
from hessiankit.engine.jacobians import ParameterJacobian
from hessiankit.engine.kernel_calls import multiply


@dataclass
class StackedTangents:
    """Tangents of one value by several vertices, concatenated along S.

    Attributes:
        data: (S, *shape).
        vertices: Their numbers.
        widths: S of each.
        identities: The vertices of which the value is a copy.
    """

    data: Tensor
    vertices: tuple[int, ...]
    widths: tuple[int, ...]
    identities: frozenset[int] = frozenset()

    @property
    def bytes(self) -> int:
        """Bytes of memory, axes along which entries are repeated counted once."""
        return memory_of(self.data)

    def part(self, vertices: Sequence[int]) -> Tensor:
        """Return the columns of some vertices, in their order."""
        if tuple(vertices) == self.vertices:
            return self.data
        where = dict(zip(self.vertices, starts(self.widths), strict=True))
        cuts = [where[s] for s in vertices]
        if all(a.stop == b.start for a, b in pairwise(cuts)):
            return self.data[cuts[0].start : cuts[-1].stop]
        return torch.cat([self.data[cut] for cut in cuts])


class EntrywiseTangents(StackedTangents):
    """Tangents diag(d) of a value by one vertex, a diagonal for each row, which become columns when ``data`` is read.

    Args:
        derivative: That of each entry, d, of the value's shape.
        vertex: The number of the vertex.
        axes: How many leading axes index its rows.
        identity: Whether the value is a copy of the vertex, and the derivatives are ones.
    """

    def __init__(self, derivative: Tensor, vertex: int, axes: int, *, identity: bool = False) -> None:
        self.derivative, self.axes = derivative, axes
        self.vertices, self.widths = (vertex,), (derivative.shape[axes:].numel(),)
        self.identities = frozenset(self.vertices if identity else ())

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tangents (S, *shape)."""
        shape, width = self.derivative.shape, self.widths[0]
        eye = torch.eye(width, dtype=self.derivative.dtype, device=self.derivative.device)
        eye = eye.reshape(width, *(1,) * self.axes, *shape[self.axes :])
        return eye.expand(width, *shape) if self.identities else eye * self.derivative

    @property
    def bytes(self) -> int:
        """Bytes of the derivatives."""
        return memory_of(self.derivative)

    @property
    def rows(self) -> Tensor:
        """The derivatives (R, S)."""
        return self.derivative.reshape(-1, self.widths[0])


class SelectedTangents(StackedTangents):
    """Tangents of a value whose entries are entries of one vertex, a 0-1 matrix, which is made when ``data`` is read.

    Args:
        value: The value, for its shape, type and device.
        vertex: The number of the vertex.
        entries: Entries of the vertex in a sample.
        positions: Of each entry of the value, its position among all entries of the vertex; of the value's shape.
    """

    def __init__(self, value: Tensor, vertex: int, entries: int, positions: Tensor) -> None:
        self.value, self.entries, self.positions = value, entries, positions.reshape(-1)
        self.vertices, self.widths, self.identities = (vertex,), (entries,), frozenset()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tangents at level 1."""
        out = self.value.new_zeros(self.entries, self.value.shape[1:].numel())
        out.scatter_(0, self.in_sample.unsqueeze(0), 1.0)
        return out.reshape(self.entries, 1, *self.value.shape[1:]).expand(-1, *self.value.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the positions."""
        return memory_of(self.positions)

    @property
    def in_sample(self) -> Tensor:
        """Positions of the entries of the first sample."""
        return self.positions[: self.value.shape[1:].numel()]

    def pull(self, K: Tensor, at: int) -> Tensor:
        """Return J^T K for curvature K (R, columns, c) at level ``at``, at level 1 or below."""
        samples = self.value.shape[0]
        wide = K.reshape(samples, -1, K.shape[2]) if at == 0 else merged(K, samples)
        out = wide.new_zeros(samples, self.entries, wide.shape[2])
        out.index_add_(1, self.in_sample, wide)  # faster than to write them
        return out.reshape(1, -1, K.shape[2]) if at == 0 else out


def joined(stacks: Sequence[StackedTangents]) -> StackedTangents:
    """Concatenate tangents of one value; those by the same vertex are added."""
    if len(stacks) == 1:
        return stacks[0]
    where = [dict(zip(stack.vertices, zip(starts(stack.widths), stack.widths, strict=True), strict=True)) for stack in stacks]
    vertices = tuple(sorted({s for stack in stacks for s in stack.vertices}))
    if len(vertices) == sum(len(stack.vertices) for stack in stacks):  # no vertex twice
        return StackedTangents(
            torch.cat([stack.data for stack in stacks]),
            tuple(s for stack in stacks for s in stack.vertices),
            tuple(w for stack in stacks for w in stack.widths),
            frozenset().union(*(stack.identities for stack in stacks)),
        )
    parts, widths = [], []
    for s in vertices:
        found = [stack.data[by[s][0]] for stack, by in zip(stacks, where, strict=True) if s in by]
        parts.append(found[0] if len(found) == 1 else torch.stack(found).sum(0))
        widths.append(parts[-1].shape[0])
    return StackedTangents(torch.cat(parts), vertices, tuple(widths))


@dataclass
class Vertex:
    """A value at which tangents begin anew.

    Attributes:
        shape: Of the value; () for parameters taken whole.
        axes: How many of its leading axes index rows; 0 for parameters taken whole.
        width: Entries of a row.
        jacobians: Its Jacobians in the parameters that enter it.
        parents: Its tangents by earlier vertices, by level.
        tied: Other Jacobians of the same parameters, whose columns of H its own Jacobians add to.
    """

    shape: torch.Size
    axes: int
    width: int
    jacobians: list[ParameterJacobian] = field(default_factory=list)
    parents: dict[int, StackedTangents] = field(default_factory=dict)
    tied: list[ParameterJacobian] = field(default_factory=list)

    @property
    def owners(self) -> list[ParameterJacobian]:
        """The Jacobians whose columns of H its own Jacobians add to."""
        return self.tied or self.jacobians

    @property
    def entries(self) -> int:
        """Number of its coordinates."""
        return self.shape.numel() if self.axes else self.width

    def columns(self, level: int) -> int:
        """Number of columns S of its tangents at a level."""
        return self.shape.numel() // self.rows(level) if self.axes else self.width

    def rows(self, level: int) -> int:
        """Number of groups of rows R at a level."""
        return self.shape[:level].numel()


@dataclass
class TangentGroup:
    """Vertices that move the same inputs of an application at one level, and the tangents of these inputs; None: at rest."""

    level: int
    vertices: tuple[int, ...]
    widths: tuple[int, ...]
    stacks: list[StackedTangents | None]

    @cached_property
    def tangents(self) -> list[Tensor | None]:
        """Tangents of each input."""
        return [None if stack is None else stack.part(self.vertices) for stack in self.stacks]

    @cached_property
    def moving(self) -> tuple[bool, ...]:
        """Which inputs move."""
        return tuple(stack is not None for stack in self.stacks)

    @cached_property
    def identities(self) -> frozenset[int]:
        """The vertices of which the one moving input is a copy."""
        moved = [stack for stack in self.stacks if stack is not None]
        return moved[0].identities.intersection(self.vertices) if len(moved) == 1 else frozenset()

    @cached_property
    def entrywise(self) -> EntrywiseTangents | None:
        """The tangents of the one moving input, if they are entrywise by one vertex."""
        moved = [stack for stack in self.stacks if stack is not None]
        return moved[0] if len(moved) == 1 and isinstance(moved[0], EntrywiseTangents) else None


def tangent_group(
    level: int, vertices: tuple[int, ...], widths: tuple[int, ...], tangents: Sequence[Tensor | None]
) -> TangentGroup:
    """Return a group with the given tangents."""
    return TangentGroup(level, vertices, widths, [None if t is None else StackedTangents(t, vertices, widths) for t in tangents])


def by_row(t: Tensor, level: int) -> Tensor:
    """Return tangents (S, *rows, *rest) as (R, S, f)."""
    return t.reshape(t.shape[0], t.shape[1 : 1 + level].numel(), -1).transpose(0, 1)


def coarsen(t: Tensor, fine: int, level: int) -> Tensor:
    """Return tangents (S, *shape) at level ``fine`` as ones (m S, *shape) at a lower level, for m rows of a group."""
    groups, m = t.shape[1 : 1 + level].numel(), t.shape[1 + level : 1 + fine].numel()
    flat = t.reshape(t.shape[0], groups, m, -1)
    out = flat.new_zeros(m, *flat.shape)  # (m, S, groups, m, f)
    out.diagonal(dim1=0, dim2=3).copy_(flat.permute(0, 1, 3, 2))
    return out.reshape(m * t.shape[0], *t.shape[1:])


def compose(before: Tensor, lower: int, after: Tensor, level: int) -> Tensor:
    """Return the product of tangents of a vertex (S0, *its shape), at ``lower``, with tangents by that vertex (S, *shape)."""
    assert lower <= level
    inner = by_row(after, level)  # (R, S, f)
    outer = before.reshape(before.shape[0], inner.shape[0], inner.shape[1]).transpose(0, 1)  # (R, S0, S)
    return multiply(outer, inner).transpose(0, 1).reshape(before.shape[0], *after.shape[1:])


def chain(J: Tensor, lower: int, K: Tensor, level: int) -> Tensor:
    """Return J K for J (R_lower, S, w) and K (R_level, w', c), at the lower of the two levels.

    Columns of a lower level are numbered (rows of a group, columns), so that K or J of the finer level is block diagonal there.
    """
    if lower == level:
        return multiply(J, K)
    if lower > level:  # rows of K split into those of J
        groups, _, c = K.shape
        rows, s, w = J.shape
        return multiply(J, K.reshape(rows, w, c)).reshape(groups, -1, c)
    groups, s, _ = J.shape
    rows, w, c = K.shape
    split = J.reshape(groups, s, rows // groups, w).transpose(1, 2).reshape(rows, s, w)
    return multiply(split, K).reshape(groups, rows // groups, s, c).transpose(1, 2).reshape(groups, s, -1)


def merged(K: Tensor, groups: int) -> Tensor:
    """Return curvature (R, w, c) as (groups, m w, m c): block diagonal, columns numbered (rows of a group, columns)."""
    rows, w, c = K.shape
    if rows == groups:
        return K
    m = rows // groups
    out = K.new_zeros(groups, m, w, m, c)
    out.diagonal(dim1=1, dim2=3).copy_(K.reshape(groups, m, w, c).permute(0, 2, 3, 1))
    return out.reshape(groups, m * w, m * c)


def starts(widths: Sequence[int]) -> list[slice]:
    """Return the slices of consecutive columns.

    >>> starts([2, 3])
    [slice(0, 2, None), slice(2, 5, None)]
    """
    cuts, start = [], 0
    for w in widths:
        cuts.append(slice(start, start + w))
        start += w
    return cuts


def memory_of(t: Tensor) -> int:
    """Return the bytes of a tensor, axes along which it is repeated counted once."""
    return t.element_size() * math.prod(n if step else 1 for n, step in zip(t.shape, t.stride(), strict=True))


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
            d = point.linearised.push([alone.derivative.unsqueeze(0)])[0]
            if d.shape == alone.derivative.shape:
                return EntrywiseTangents(d, g.vertices[0], g.level)
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
        bent = point.linearised.pull(None, [alone.derivative.unsqueeze(0), *still])[0]
        return alone.rows.new_zeros(0) if bent is None else alone.rows * bent.reshape(alone.rows.shape)
    if isinstance(primitive, (LayerNorm, RMSNorm)) and primitive.dims == 1 and alone.identities:
        assert isinstance(point.linearised, LinearisedNorm)
        return point.linearised.curvature_rows()
    return None
