"""Reverse accumulation: vertices are eliminated from the last to the first, and curvature moves to parents and parameters.

With J_ts the tangents of vertex t by its parent s, and E_t its parameter Jacobian,

    K_sr += J_ts^T K_tr                for every other vertex r,
    K_sr += J_ts^T K_tt J_tr           for two parents s, r,
    H[parameters of t, parameters of r] += E_t^T K_tr E_r.

The last sum goes pair by pair of vertices while rows stay apart, and by :mod:`hessiankit.engine.column_blocks` where they meet.

No product is taken where J or K is an identity or a diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.engine.column_blocks import ColumnBlocks
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.jacobians import ParameterJacobian, WeightJacobian
from hessiankit.engine.kernel_calls import KernelSum
from hessiankit.engine.parameter_blocks import add_across_rows, add_diagonal_pair, add_pair
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.engine.tangents import EntrywiseTangents, SelectedTangents, StackedTangents, Vertex, by_row, chain, starts
from hessiankit.engine.vertex_blocks import VertexBlocks, columns_are_cheaper, rows_coupled

Pulled: TypeAlias = Iterator[tuple[int, Tensor]]


class Everything:
    """The curvature between vertices that a result reads: all of it.

    Attributes:
        leaves: The vertices of which equal columns are enough.
    """

    leaves: Container[int] = ()

    def meet(self, t: int, r: int) -> bool:
        """Tell whether K_tr is read."""
        return True

    def add_columns(self, s: int, level: int, columns: Tensor) -> None:
        """Add equal columns (R, m, m', width) of the curvature of a leaf with itself, in groups of m rows."""


def by_column(K: Tensor, width: int) -> Tensor:
    """Return D (G, m, m', width) of curvature K (G, m width, m' width).

    >>> by_column(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 2).tolist()
    [[[[1.0, 4.0]]]]
    """
    return K.unflatten(2, (-1, width)).unflatten(1, (-1, width)).diagonal(dim1=2, dim2=4)


def product_by_column(J: Tensor, X: Tensor, width: int) -> Tensor:
    """Return ``by_column(J @ X, width)`` for J (G, m width, c) and X (G, c, m' width) without the product."""
    if J.shape[1] == X.shape[2] == width:
        return (J * X.mT).sum(2).reshape(-1, 1, 1, width)
    left = J.unflatten(1, (-1, width)).transpose(1, 2)  # (G, width, m, c)
    right = X.unflatten(2, (-1, width)).permute(0, 3, 1, 2)  # (G, width, c, m')
    return (left @ right).permute(0, 2, 3, 1)


class Pullback:
    """Tangents of one vertex by its parents, and the curvature that moves along them.

    Args:
        vertices: By number.
        t: The number of the vertex.
        blocks: Curvature between vertices.
        wanted: Which of it is read.
    """

    def __init__(self, vertices: Mapping[int, Vertex], t: int, blocks: VertexBlocks, wanted: Everything) -> None:
        self.vertices, self.vertex, self.t, self.blocks, self.wanted = vertices, vertices[t], t, blocks, wanted
        self.parents = list(self.vertex.parents.items())

    def pair(self, r: int) -> None:
        """Add J_ts^T K_tr for every parent s."""
        blocks, t = self.blocks, self.t
        for at, K in blocks.full(t, r).items():
            for level, stack in self.parents:
                for s, part in pull_back(self.vertex, level, stack, at, K, self._met(stack, r)):
                    blocks.add_half(s, r, min(level, at), part)
                self._add_columns(r, level, stack, at, K, 2.0)
        for at, diagonal in blocks.diagonal(t, r).items():
            for level, stack in self.parents:
                self._pull_diagonal(level, stack, at, diagonal, r)

    def _pull_diagonal(self, level: int, stack: StackedTangents, at: int, diagonal: Tensor, r: int) -> None:
        """Add J^T K between parents and r, for the diagonal (R, columns) of a K_tr that couples equal columns only."""
        met = [s for s in stack.vertices if self.wanted.meet(s, r)]
        kept = [s for s in met if level == at and (isinstance(stack, EntrywiseTangents) or s in stack.identities)]
        for s in kept:
            part = stack.rows * diagonal if isinstance(stack, EntrywiseTangents) and not stack.identities else diagonal
            self.blocks.add_diagonal(s, r, at, 2 * part if s == r else part)
        for s, part in _pull_back_diagonal(self.vertex, level, stack, at, diagonal, [s for s in met if s not in kept]):
            self.blocks.add_half(s, r, min(level, at), part)

    def square(self, with_parents: Callable[[int], bool]) -> None:
        """Add J_ts^T K_tt J_tr for every two parents; also K_tt J_ts between t and s, where that is kept."""
        for at, K in self.blocks.plain(self.t, self.t).items():
            self._square(at, K, with_parents)

    def _met(self, stack: StackedTangents, r: int) -> list[int]:
        """Return the parents s whose K_sr is read, a leaf r itself apart."""
        leaf = r if r in self.wanted.leaves else None
        return [s for s in stack.vertices if s != leaf and self.wanted.meet(s, r)]

    def _add_columns(self, s: int, level: int, stack: StackedTangents, at: int, X: Tensor, times: float) -> None:
        """Add the equal columns of J^T X, curvature of a parent s with itself, if it is a leaf."""
        if s not in self.wanted.leaves or s not in stack.vertices:
            return
        width = self.vertices[s].width
        if level == at and s not in stack.identities and not isinstance(stack, (EntrywiseTangents, SelectedTangents)):
            columns = product_by_column(by_row(stack.part([s]), level), X, width)
        else:
            ((_, product),) = pull_back(self.vertex, level, stack, at, X, [s])
            columns = by_column(product, width)
        self.wanted.add_columns(s, min(level, at), times * columns)

    def _square(self, at: int, K: Tensor, with_parents: Callable[[int], bool]) -> None:
        blocks, t = self.blocks, self.t
        for n, (level, stack) in enumerate(self.parents):
            here = min(level, at)
            left = dict((pull_back if K.ndim == 3 else _pull_back_diagonal)(self.vertex, level, stack, at, K, stack.vertices))
            for s, X in left.items():
                if with_parents(s):
                    blocks.add(t, s, here, X.mT)
                for below, older in self.parents[:n]:
                    for r, Y in pull_back(self.vertex, below, older, here, X.mT, self._met(older, s)):
                        blocks.add_half(r, s, min(below, here), Y)
                    self._add_columns(s, below, older, here, X.mT, 2.0)
                before = [r for r in self._met(stack, s) if r <= s]
                pairs = left.items() if s in stack.identities else pull_back(self.vertex, level, stack, here, X.mT, before)
                for r, Y in pairs:
                    if r in before:
                        blocks.add(r, s, here, Y)
                self._add_columns(s, level, stack, here, X.mT, 1.0)


def pull_back(vertex: Vertex, level: int, stack: StackedTangents, at: int, K: Tensor, wanted: Sequence[int]) -> Pulled:
    """Yield J^T K, vertex by vertex of some parents.

    Args:
        vertex: The vertex t.
        level: Of the tangents.
        stack: Its tangents by some parents.
        at: Level of K.
        K: (R, columns of t, c).
        wanted: Parents.
    """
    if isinstance(stack, SelectedTangents) and wanted:
        yield stack.vertices[0], stack.pull(K, at)
        return
    if isinstance(stack, EntrywiseTangents) and wanted and not stack.identities and level == at:
        yield stack.vertices[0], K * stack.rows.unsqueeze(2)
        return
    for s in wanted:
        if s in stack.identities:
            yield s, K
    rest = [s for s in wanted if s not in stack.identities]
    if not rest:
        return
    block = chain(by_row(stack.part(rest), level), level, K, at)
    if len(rest) == 1:
        yield rest[0], block
        return
    groups, _, c = block.shape  # the columns of the stack are numbered (rows / groups, S)
    split = block.reshape(groups, vertex.rows(level) // groups, -1, c)
    widths = [w for s, w in zip(stack.vertices, stack.widths, strict=True) if s in rest]
    for s, cut in zip(rest, starts(widths), strict=True):
        yield s, split[:, :, cut].reshape(groups, -1, c)


def _pull_back_diagonal(
    vertex: Vertex, level: int, stack: StackedTangents, at: int, diagonal: Tensor, wanted: Sequence[int]
) -> Pulled:
    """Yield what :func:`pull_back` does, for the diagonal (R, columns) of K."""
    if level != at or isinstance(stack, (EntrywiseTangents, SelectedTangents)):
        yield from pull_back(vertex, level, stack, at, torch.diag_embed(diagonal), wanted)
        return
    for s in wanted:
        yield (
            s,
            torch.diag_embed(diagonal) if s in stack.identities else by_row(stack.part([s]), level) * diagonal.unsqueeze(1),
        )


def _add_blocks(vertex: Vertex, other: Vertex, level: int, K: Tensor, matrix: SymmetricStorage) -> None:
    """Add the blocks E_t^T K_tr E_r of the parameters of two vertices, a diagonal K by its diagonal."""
    by_row = level == vertex.axes == other.axes and level > 0
    if K.ndim == 2 and not by_row:
        K = torch.diag_embed(K)
    for n, u in enumerate(vertex.jacobians):
        for m, v in enumerate(other.jacobians):
            if (vertex is other and m < n) or not matrix.wants(u.parameter, v.parameter):
                continue
            same = vertex is other and n == m
            write = partial(_write, (vertex, other), K, u, v, by_row, same)
            if u.parameter == v.parameter and not same:  # tied: E_u^T K E_v and its transpose
                matrix.add_both(u, v, write)
            else:
                matrix.add(u, v, write)


def _write(
    pair: tuple[Vertex, Vertex], K: Tensor, u: ParameterJacobian, v: ParameterJacobian, by_row: bool, same: bool, block: Tensor
) -> KernelSum | None:
    if K.ndim == 2:
        add_diagonal_pair(u, v, K, block)
    elif by_row:
        return add_pair(u, v, K, block, same=same)
    elif isinstance(u, WeightJacobian) and isinstance(v, WeightJacobian):
        add_across_rows(u, v, K, block)
    else:
        block += _two_steps(*pair, K, u, v)
    return None


def _two_steps(t: Vertex, r: Vertex, K: Tensor, u: ParameterJacobian, v: ParameterJacobian) -> Tensor:
    """Return E_t^T K E_r, (size_u, size_v): over the rows of r in each group, then over all rows of t."""
    groups, wide_t, wide_r = K.shape
    if wide_t * v.size > wide_r * u.size:
        return _two_steps(r, t, K.mT, v, u).T
    m_t, m_r = (wide // vertex.width for wide, vertex in ((wide_t, t), (wide_r, r)))
    by_v = v.vjp_by_group(K.mT.reshape(groups, m_r, r.width, wide_t))  # (groups, size_v, columns of t)
    rows = by_v.mT.reshape(groups * m_t, t.width, v.size)
    return u.vjp(rows)


def accumulate(sweep: ForwardSweep, matrix: SymmetricStorage) -> None:
    """Eliminate all vertices of a sweep, and add the Hessian of the parameters to a matrix."""
    matrix.computed = sweep.dtype or matrix.computed
    vertices, blocks, columns = sweep.vertices, sweep.blocks, ColumnBlocks(sweep.vertices)
    reached: set[int] = set()  # by column blocks
    for t in sorted(vertices, reverse=True):
        vertex = vertices[t]
        own = False
        if vertex.parents and (t in reached or rows_coupled(t, vertices, {r: blocks.levels(t, r) for r in blocks.neighbours[t]})):
            own = _seed_columns(t, vertices, blocks, columns)
            reached.update(s for stack in vertex.parents.values() for s in stack.vertices)
        others = [r for r in sorted(blocks.neighbours[t]) if r > t or (r == t and not own)] if vertex.jacobians else []
        curvature = [(r, level, K) for r in others if vertices[r].jacobians for level, K in blocks.plain(t, r).items()]
        for ndim in (3, 2):  # diagonals last: what is the first to reach a block of a plan covers it
            for r, level, K in curvature:
                if K.ndim == ndim:
                    _add_blocks(vertex, vertices[r], level, K, matrix)
            matrix.finish()
        if vertex.parents:
            back = Pullback(vertices, t, blocks, Everything())
            for r in [r for r in blocks.neighbours[t] if r != t]:
                back.pair(r)
            if t in blocks.neighbours[t]:
                back.square(lambda _, kept=bool(vertex.jacobians) and not own: kept)  # type: ignore[misc]
        for r in [r for r in blocks.neighbours[t] if r >= t or not vertex.jacobians]:
            blocks.drop(t, r)
    columns.accumulate(matrix)


def _seed_columns(t: int, vertices: Mapping[int, Vertex], blocks: VertexBlocks, columns: ColumnBlocks) -> bool:
    """Seed column blocks with K_tr of vertex t and later ones, where that takes less work; tell whether K_tt is among them."""
    for r in [r for r in blocks.neighbours[t] if r >= t]:
        if columns_are_cheaper(vertices[t], vertices[r], blocks.levels(t, r)):
            for K in blocks.between(t, r).values():
                columns.seed(t, r, K)
            if r != t:
                blocks.drop(t, r)
    return t in blocks.neighbours[t]
