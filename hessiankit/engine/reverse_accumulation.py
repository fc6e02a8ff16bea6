"""From curvature between vertices back to parameters: the last vertex first, each one into its parents and its jacobians.

With dt = J ds, curvature K_tr between a vertex t and any other r becomes J^T K_tr between t's parent s and r, and
J^T K_tt J' between two parents. What is left at a vertex that parameters enter goes through its jacobians into the matrix:
in pairs of vertices while rows stay apart, and by :mod:`hessiankit.engine.column_blocks` where they meet.
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
    """The jacobians of one vertex, ``t``.

    A weight after it may be reached in two ways, through what it makes and through what is behind it. Where rows stay apart,
    both are put aside until all vertices were seen, and added together.

    Args:
        t: Its number.
        vertices: By number.
        blocks: Curvature between them.
        matrix: What is added to.
    """

    def __init__(self, t: int, vertices: Mapping[int, Vertex], blocks: VertexBlocks, matrix: SymmetricStorage) -> None:
        self.t, self.vertices, self.blocks, self.matrix = t, vertices, blocks, matrix
        self._ways: dict[tuple[WeightJacobian, str, int], list[tuple[WeightJacobian, Tensor]]] = defaultdict(list)

    def take(self, r: int) -> None:
        """Pull back what is known of the vertex and another; of a pair, what couples equal columns only as it is."""
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
        """Add what was put aside."""
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

        if u.parameter == v.parameter and not same:  # a tied parameter: its block takes K and its transpose
            self.matrix.add_both(u, v, write)
        else:
            self.matrix.add(u, v, write)


def _two_steps(t: Vertex, r: Vertex, K: Tensor, u: ParameterJacobian, v: ParameterJacobian) -> Tensor:
    """Sum over the rows of r group by group, then over all rows of t: (size_u, size_v)."""
    groups, wide_t, wide_r = K.shape
    if wide_t * v.size > wide_r * u.size:
        return _two_steps(r, t, K.mT, v, u).T
    m_t, m_r = (wide // vertex.width for wide, vertex in ((wide_t, t), (wide_r, r)))
    by_v = v.reduce(K.mT.reshape(groups, m_r, r.width, wide_t))  # (groups, size_v, columns of t)
    rows = by_v.mT.reshape(groups * m_t, t.width, v.size)
    return u.sum(rows)


def accumulate(sweep: ForwardSweep, matrix: SymmetricStorage) -> None:
    """Take all curvature of a sweep back to the parameters, and add it to the matrix."""
    matrix.computed = sweep.dtype or matrix.computed
    vertices, blocks, panels = sweep.vertices, sweep.blocks, ColumnBlocks(sweep.vertices)
    reached: set[int] = set()  # by panels
    for t in sorted(vertices, reverse=True):
        vertex = vertices[t]
        own = False
        if vertex.parents and (t in reached or rows_coupled(t, vertices, {r: blocks.levels(t, r) for r in blocks.near[t]})):
            own = _to_panels(t, vertices, blocks, panels)
            reached.update(s for stack in vertex.parents.values() for s in stack.vertices)
        lifting = ParameterBlocks(t, vertices, blocks, matrix)
        for r in sorted(r for r in blocks.near[t] if r >= t):
            if vertex.jacobians and vertices[r].jacobians and not (own and r == t):
                lifting.take(r)
        lifting.finish()
        if vertex.parents:
            back = Pullback(vertices, t, blocks)
            for r in [r for r in blocks.near[t] if r != t]:
                back.pair(r)
            if t in blocks.near[t]:
                back.square(crossing=bool(vertex.jacobians) and not own)
        for r in [r for r in blocks.near[t] if r >= t or not vertex.jacobians]:
            blocks.forget(t, r)
        for r in blocks.near[t]:
            blocks.settle(t, r)
    panels.accumulate(matrix)


def _to_panels(t: int, vertices: Mapping[int, Vertex], blocks: VertexBlocks, panels: ColumnBlocks) -> bool:
    """Take blocks between a vertex and those after it for panels; tell whether its own block is among them."""
    for r in [r for r in blocks.near[t] if r >= t]:
        if columns_are_cheaper(vertices[t], vertices[r], blocks.levels(t, r)):
            for K in blocks.between(t, r).values():
                panels.seed(t, r, K)
            if r != t:
                blocks.forget(t, r)
    return t in blocks.near[t]
