"""Reverse accumulation: vertices are eliminated from the last to the first, and curvature moves to parents and parameters.

With J_ts the tangents of vertex t by its parent s, and E_t its parameter Jacobian,

    K_sr += J_ts^T K_tr                for every other vertex r,
    K_sr += J_ts^T K_tt J_tr           for two parents s, r,
    H[parameters of t, parameters of r] += E_t^T K_tr E_r.

The last sum goes pair by pair of vertices while rows stay apart, and by :mod:`hessiankit.engine.column_blocks` where they meet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from hessiankit.engine.column_blocks import ColumnBlocks
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.jacobians import ParameterJacobian, WeightJacobian
from hessiankit.engine.parameter_blocks import add_across_rows, add_diagonal_pair, add_pair, add_pairs
from hessiankit.engine.peak_memory import columns_are_cheaper, rows_coupled
from hessiankit.engine.pullback import Pullback
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.engine.tangents import Vertex
from hessiankit.engine.vertex_blocks import VertexBlocks


class ParameterBlocks:
    """Blocks E_t^T K_tr E_r of the parameters of one vertex t with those of all later vertices r.

    The same later weight may have several E_r. Where rows stay apart, such pairs are collected, and added in one pass.

    Args:
        t: The number of the vertex.
        vertices: By number.
        blocks: Curvature between vertices.
        matrix: What is added to.
    """

    def __init__(self, t: int, vertices: Mapping[int, Vertex], blocks: VertexBlocks, matrix: SymmetricStorage) -> None:
        self.t, self.vertices, self.blocks, self.matrix = t, vertices, blocks, matrix
        self._ways: dict[tuple[WeightJacobian, str, int], list[tuple[WeightJacobian, Tensor]]] = defaultdict(list)

    def take(self, r: int) -> None:
        """Add E_t^T K_tr E_r for one vertex r; of two different vertices, diagonal curvature by its diagonal."""
        t, vertex, other = self.t, self.vertices[self.t], self.vertices[r]
        diagonals = self.blocks.diagonal(t, r)
        apart = t != r and all(level == vertex.axes == other.axes for level in diagonals)
        for level, K in (self.blocks.full if apart else self.blocks.between)(t, r).items():
            for n, u in enumerate(vertex.jacobians):
                for m, v in enumerate(other.jacobians):
                    if (r != t or m >= n) and self.matrix.wants(u.parameter, v.parameter):
                        self._pair(other, level, K, u, v, same=r == t and n == m)
        for diagonal in diagonals.values() if apart else ():
            for u in vertex.jacobians:
                for v in other.jacobians:
                    if self.matrix.wants(u.parameter, v.parameter):
                        add = self.matrix.add_both if u.parameter == v.parameter else self.matrix.add
                        add(u, v, partial(add_diagonal_pair, u, v, diagonal))

    def finish(self) -> None:
        """Add the collected pairs."""
        for (u, _, _), pairs in self._ways.items():
            self.matrix.add(u, pairs[0][0], partial(add_pairs, u, pairs))

    def _pair(self, r: Vertex, level: int, K: Tensor, u: ParameterJacobian, v: ParameterJacobian, *, same: bool) -> None:
        t = self.vertices[self.t]
        by_row = level == t.axes == r.axes and level > 0
        if by_row and u.parameter != v.parameter and isinstance(u, WeightJacobian) and isinstance(v, WeightJacobian):
            self._ways[u, v.parameter, id(v.at)].append((v, K))
            return

        def write(block: Tensor) -> float | None:
            if by_row:
                return add_pair(u, v, K, block, same=same)
            if isinstance(u, WeightJacobian) and isinstance(v, WeightJacobian):
                add_across_rows(u, v, K, block)
            else:
                block += _two_steps(t, r, K, u, v)
            return None

        if u.parameter == v.parameter and not same:  # tied: E_u^T K E_v and its transpose
            self.matrix.add_both(u, v, write)
        else:
            self.matrix.add(u, v, write)


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
        lifting = ParameterBlocks(t, vertices, blocks, matrix)
        for r in sorted(r for r in blocks.neighbours[t] if r >= t):
            if vertex.jacobians and vertices[r].jacobians and not (own and r == t):
                lifting.take(r)
        lifting.finish()
        if vertex.parents:
            back = Pullback(vertices, t, blocks)
            for r in [r for r in blocks.neighbours[t] if r != t]:
                back.pair(r)
            if t in blocks.neighbours[t]:
                back.square(with_parents=bool(vertex.jacobians) and not own)
        for r in [r for r in blocks.neighbours[t] if r >= t or not vertex.jacobians]:
            blocks.drop(t, r)
        for r in blocks.neighbours[t]:
            blocks.expand_products(t, r)
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
