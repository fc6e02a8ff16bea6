"""Directions in which values move, and at which level of detail they are kept.

A :class:`Vertex` is a value that perturbations enter: ``width`` numbers for each of its rows, the rows being its leading
``axes``. The derivative of a later value by a vertex is a :class:`StackedTangents` of tangents (S, *shape), kept at a level k:

    k = axes of the vertex    S = width: row r of the vertex moves row r of the value alone;
    k = 1                     S = width x rows of a sample: a sample moves that sample alone;
    k = 0                     S = all numbers of the vertex: anything may move anything.

At level k the coordinates of a vertex are numbered (R_k, S): R_k is the product of the first k axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from hessiankit.engine.jacobians import ParameterJacobian


@dataclass
class StackedTangents:
    """Tangents of one value by several vertices, next to each other.

    Attributes:
        data: (S, *shape).
        vertices: Their numbers.
        widths: How many columns each has.
        units: Those vertices of which the value is a copy: an identity.
    """

    data: Tensor
    vertices: tuple[int, ...]
    widths: tuple[int, ...]
    units: frozenset[int] = frozenset()

    @property
    def bytes(self) -> int:
        """The memory that it keeps."""
        return memory_of(self.data)

    def by_rows(self, level: int) -> StackedTangents:
        """Return the same tangents, each row's next to each other in memory: how curvature multiplies them."""
        rows = by_row(self.data, level)  # (R, S, f)
        if rows.stride(0) == 0 or rows.is_contiguous():  # one matrix for all rows stays one
            return self
        shape = self.data.shape
        return replace(self, data=rows.contiguous().transpose(0, 1).reshape(shape))

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
    """Tangents of a value that one vertex moves entry by entry: diagonals, made into columns when they are asked for.

    Args:
        slopes: The derivative of each entry, of the value's shape.
        vertex: The number of the vertex.
        axes: How many leading axes index its rows.
        unit: Whether the value is a copy of the vertex, and the slopes are ones.
    """

    def __init__(self, slopes: Tensor, vertex: int, axes: int, *, unit: bool = False) -> None:
        self.slopes, self.axes = slopes, axes
        self.vertices, self.widths = (vertex,), (slopes.shape[axes:].numel(),)
        self.units = frozenset(self.vertices if unit else ())

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tangents (S, *shape)."""
        shape, width = self.slopes.shape, self.widths[0]
        eye = torch.eye(width, dtype=self.slopes.dtype, device=self.slopes.device)
        eye = eye.reshape(width, *(1,) * self.axes, *shape[self.axes :])
        return eye.expand(width, *shape) if self.units else eye * self.slopes

    @property
    def bytes(self) -> int:
        """The memory that it keeps."""
        return memory_of(self.slopes)

    def by_rows(self, level: int) -> StackedTangents:
        """Return itself."""
        return self

    @property
    def rows(self) -> Tensor:
        """The slopes (R, S)."""
        return self.slopes.reshape(-1, self.widths[0])


class SelectedTangents(StackedTangents):
    """Tangents of a value whose entries are entries of one vertex: zeros and ones, made when they are asked for.

    Args:
        value: Of the value's shape.
        vertex: The number of the vertex.
        entries: How many numbers of the vertex a sample has.
        positions: Where each entry of the value lies among all numbers of the vertex, of the value's shape.
    """

    def __init__(self, value: Tensor, vertex: int, entries: int, positions: Tensor) -> None:
        self.value, self.entries, self.positions = value, entries, positions.reshape(-1)
        self.vertices, self.widths, self.units = (vertex,), (entries,), frozenset()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tangents at level 1."""
        out = self.value.new_zeros(self.entries, self.value.shape[1:].numel())
        out.scatter_(0, self.in_sample.unsqueeze(0), 1.0)
        return out.reshape(self.entries, 1, *self.value.shape[1:]).expand(-1, *self.value.shape)

    @property
    def bytes(self) -> int:
        """The memory that it keeps."""
        return memory_of(self.positions)

    def by_rows(self, level: int) -> StackedTangents:
        """Return itself."""
        return self

    @property
    def in_sample(self) -> Tensor:
        """Positions in the first sample."""
        return self.positions[: self.value.shape[1:].numel()]

    def pull(self, K: Tensor, at: int) -> Tensor:
        """Return J K for curvature K at a level, at level 1 or below."""
        samples = self.value.shape[0]
        wide = K.reshape(samples, -1, K.shape[2]) if at == 0 else merged(K, samples)
        out = wide.new_zeros(samples, self.entries, wide.shape[2])
        out[:, self.in_sample] = wide
        return out.reshape(1, -1, K.shape[2]) if at == 0 else out


def joined(stacks: Sequence[StackedTangents]) -> StackedTangents:
    """Put stacks of one value side by side; what several of them say of one vertex is added up."""
    if len(stacks) == 1:
        return stacks[0]
    where = [dict(zip(stack.vertices, zip(starts(stack.widths), stack.widths, strict=True), strict=True)) for stack in stacks]
    vertices = tuple(sorted({s for stack in stacks for s in stack.vertices}))
    if len(vertices) == sum(len(stack.vertices) for stack in stacks):  # nothing to add up
        return StackedTangents(
            torch.cat([stack.data for stack in stacks]),
            tuple(s for stack in stacks for s in stack.vertices),
            tuple(w for stack in stacks for w in stack.widths),
            frozenset().union(*(stack.units for stack in stacks)),
        )
    parts, widths = [], []
    for s in vertices:
        found = [stack.data[by[s][0]] for stack, by in zip(stacks, where, strict=True) if s in by]
        parts.append(found[0] if len(found) == 1 else torch.stack(found).sum(0))
        widths.append(parts[-1].shape[0])
    return StackedTangents(torch.cat(parts), vertices, tuple(widths))


@dataclass
class Vertex:
    """A value that perturbations enter.

    Attributes:
        shape: Of the value; () for parameters taken whole.
        axes: How many of its leading axes index rows; 0 for parameters taken whole.
        width: Numbers a row.
        jacobians: How its perturbations come from parameters.
        parents: How they come from older vertices, by level.
        tied: Other jacobians of the same parameters, whose columns its jacobians share.
    """

    shape: torch.Size
    axes: int
    width: int
    jacobians: list[ParameterJacobian] = field(default_factory=list)
    parents: dict[int, StackedTangents] = field(default_factory=dict)
    tied: list[ParameterJacobian] = field(default_factory=list)

    @property
    def owners(self) -> list[ParameterJacobian]:
        """Jacobians in whose columns those of its own are counted."""
        return self.tied or self.jacobians

    @property
    def entries(self) -> int:
        """Number of its coordinates."""
        return self.shape.numel() if self.axes else self.width

    def columns(self, level: int) -> int:
        """Number of columns of its tangents at a level."""
        return self.shape.numel() // self.rows(level) if self.axes else self.width

    def rows(self, level: int) -> int:
        """Number of groups of its coordinates at a level."""
        return self.shape[:level].numel()


@dataclass
class TangentGroup:
    """Vertices that move the same inputs of an application at one level: the stacks they are in, None for an input at rest."""

    level: int
    vertices: tuple[int, ...]
    widths: tuple[int, ...]
    stacks: list[StackedTangents | None]

    @cached_property
    def tangents(self) -> list[Tensor | None]:
        """Their tangents, input by input."""
        return [None if stack is None else stack.part(self.vertices) for stack in self.stacks]

    @cached_property
    def moving(self) -> tuple[bool, ...]:
        """Which inputs move."""
        return tuple(stack is not None for stack in self.stacks)

    @cached_property
    def units(self) -> frozenset[int]:
        """Those of which the one input that moves is a copy."""
        moved = [stack for stack in self.stacks if stack is not None]
        return moved[0].units.intersection(self.vertices) if len(moved) == 1 else frozenset()

    @cached_property
    def entrywise(self) -> EntrywiseTangents | None:
        """The tangents of the one input that moves, if its one vertex moves it entry by entry."""
        moved = [stack for stack in self.stacks if stack is not None]
        return moved[0] if len(moved) == 1 and isinstance(moved[0], EntrywiseTangents) else None


def tangent_group(
    level: int, vertices: tuple[int, ...], widths: tuple[int, ...], tangents: Sequence[Tensor | None]
) -> TangentGroup:
    """Return a group of given tangents."""
    return TangentGroup(level, vertices, widths, [None if t is None else StackedTangents(t, vertices, widths) for t in tangents])


def by_row(t: Tensor, level: int) -> Tensor:
    """Turn (S, *rows, *rest) into (R, S, f)."""
    return t.reshape(t.shape[0], t.shape[1 : 1 + level].numel(), -1).transpose(0, 1)


def coarsen(t: Tensor, fine: int, level: int) -> Tensor:
    """Turn a tangent (S, *shape) at a level into one (m S, *shape) at a lower level; m rows, then S columns."""
    groups, m = t.shape[1 : 1 + level].numel(), t.shape[1 + level : 1 + fine].numel()
    flat = t.reshape(t.shape[0], groups, m, -1)
    out = flat.new_zeros(m, *flat.shape)  # (m, S, groups, m, f)
    out.diagonal(dim1=0, dim2=3).copy_(flat.permute(0, 1, 3, 2))
    return out.reshape(m * t.shape[0], *t.shape[1:])


def compose(before: Tensor, lower: int, after: Tensor, level: int) -> Tensor:
    """Chain the tangent of a vertex's value (S0, *its shape), at ``lower``, with tangents by that vertex (S, *shape)."""
    assert lower <= level
    inner = by_row(after, level)  # (R, S, f)
    gauss_newton = before.reshape(before.shape[0], inner.shape[0], inner.shape[1]).transpose(0, 1)  # (R, S0, S)
    return (gauss_newton @ inner).transpose(0, 1).reshape(before.shape[0], *after.shape[1:])


def chain(J: Tensor, lower: int, K: Tensor, level: int) -> Tensor:
    """Return J K for J (R_lower, S, w) and K (R_level, w', c), each at its level, at the coarser of the two.

    At the coarser level rows come first among the columns, so a finer array is a block-diagonal coarse one.
    """
    if lower == level:
        return J @ K
    if lower > level:  # K is coarse: its rows split into those of J
        groups, _, c = K.shape
        rows, s, w = J.shape
        return (J @ K.reshape(rows, w, c)).reshape(groups, -1, c)
    groups, s, _ = J.shape
    rows, w, c = K.shape
    split = J.reshape(groups, s, rows // groups, w).transpose(1, 2).reshape(rows, s, w)
    return (split @ K).reshape(groups, rows // groups, s, c).transpose(1, 2).reshape(groups, s, -1)


def merged(K: Tensor, groups: int) -> Tensor:
    """Turn curvature (R, w, c) into that of fewer groups of rows: block-diagonal, rows first among the columns."""
    rows, w, c = K.shape
    if rows == groups:
        return K
    m = rows // groups
    out = K.new_zeros(groups, m, w, m, c)
    out.diagonal(dim1=1, dim2=3).copy_(K.reshape(groups, m, w, c).permute(0, 2, 3, 1))
    return out.reshape(groups, m * w, m * c)


def starts(widths: Sequence[int]) -> list[slice]:
    """Return where consecutive columns lie.

    >>> starts([2, 3])
    [slice(0, 2, None), slice(2, 5, None)]
    """
    cuts, start = [], 0
    for w in widths:
        cuts.append(slice(start, start + w))
        start += w
    return cuts


def memory_of(t: Tensor) -> int:
    """Memory of a tensor, axes along which it is repeated counted once."""
    return t.element_size() * math.prod(n if step else 1 for n, step in zip(t.shape, t.stride(), strict=True))
