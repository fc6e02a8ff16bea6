"""Reverse accumulation: vertices are eliminated from the last to the first, and curvature moves to parents and parameters.

With J_ts the tangents of vertex t by its parent s, and E_t its parameter Jacobian,

    K_sr += J_ts^T K_tr                for every other vertex r,
    K_sr += J_ts^T K_tt J_tr           for two parents s, r,
    H[parameters of t, parameters of r] += E_t^T K_tr E_r.

The last sum goes pair by pair of vertices while rows stay apart, and by :mod:`hessiankit.engine.column_blocks` where they meet.

No product is taken where J or K is an identity or a diagonal. Where a parent is much wider than t, curvature stays a product with
the tangents F of t, and further back only J F is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.engine.column_blocks import ColumnBlocks
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.jacobians import ParameterJacobian, WeightJacobian
from hessiankit.engine.kernel_products import multiply
from hessiankit.engine.parameter_blocks import add_across_rows, add_diagonal_pair, add_pair, add_pairs
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.engine.tangents import EntrywiseTangents, SelectedTangents, StackedTangents, Vertex, by_row, chain, starts
from hessiankit.engine.vertex_blocks import VertexBlocks, columns_are_cheaper, rows_coupled

WIDE = 2  # a parent with so many times as many columns keeps its curvature as products
Pulled: TypeAlias = Iterator[tuple[int, Tensor]]


class Everything:
    """The curvature between vertices that a result reads: all of it.

    Attributes:
        leaves: The vertices of which equal columns are enough.
        products: Whether curvature of wide vertices stays a product.
    """

    leaves: Container[int] = ()
    products = True

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
        self.wide = self._wide(vertices) if wanted.products else {}
        self._through: dict[int, list[tuple[int, Tensor]]] = {}

    def _wide(self, vertices: Mapping[int, Vertex]) -> dict[int, Tensor]:
        """Return the tangents F (R, columns, few) by the parents at which curvature stays a product."""
        found: dict[int, Tensor] = {}
        seen = [s for _, stack in self.parents for s in stack.vertices]
        for level, stack in self.parents:
            if level != self.vertex.axes or isinstance(stack, (EntrywiseTangents, SelectedTangents)):
                continue
            for s in stack.vertices:
                further = vertices[s].parents
                if s in stack.identities or not further or any(at != level for at in further) or seen.count(s) > 1:
                    continue
                if vertices[s].columns(level) >= WIDE * self.vertex.columns(level):
                    found[s] = by_row(stack.part([s]), level)
        return found

    def pair(self, r: int) -> None:
        """Add J_ts^T K_tr for every parent s."""
        blocks, t = self.blocks, self.t
        for at, K in blocks.rest(t, r).items():
            for level, stack in self.parents:
                wide = [s for s in stack.vertices if s in self.wide and at == level and s != r]
                for s in wide:
                    blocks.add_product(s, r, at, self.wide[s], K)
                for s, part in pull_back(self.vertex, level, stack, at, K, self._met(stack, r, wide)):
                    blocks.add_half(s, r, min(level, at), part)
                self._add_columns(r, level, stack, at, K, 2.0)
        for at, products in blocks.products.get((t, r), {}).items():
            for F, M in list(products.values()):
                for s, J in self.through(F, at):
                    blocks.add_half(s, r, at, multiply(J, M))
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
        blocks, t = self.blocks, self.t
        for at, K in blocks.plain(t).items():
            self._dense_square(at, K, with_parents)
        for at, squares in list(blocks.squares.get(t, {}).items()):
            for F, C in squares.values():
                found = self.through(F, at)
                for s, J in found:
                    left = multiply(J, C)
                    if with_parents(s):
                        blocks.add_product(t, s, at, F, left.mT)
                    for r, other in found:
                        if r <= s:
                            blocks.add(r, s, at, multiply(other, left.mT))

    def _met(self, stack: StackedTangents, r: int, without: Container[int] = ()) -> list[int]:
        """Return the parents s whose K_sr is read, a leaf r itself apart."""
        leaf = r if r in self.wanted.leaves else None
        return [s for s in stack.vertices if s != leaf and s not in without and self.wanted.meet(s, r)]

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

    def through(self, F: Tensor, at: int) -> list[tuple[int, Tensor]]:
        """Return J F by parent, computed once for each F."""
        if id(F) not in self._through:
            self._through[id(F)] = [one for _, stack in self.parents for one in pull_back(self.vertex, at, stack, at, F)]
        return self._through[id(F)]

    def _dense_square(self, at: int, K: Tensor, with_parents: Callable[[int], bool]) -> None:
        blocks, t = self.blocks, self.t
        done: list[tuple[int, int, Tensor]] = []  # parents so far, with J^T K and its level
        wide = {s: F for s, F in self.wide.items() if at == self.vertex.axes and K.ndim == 3}
        for n, (level, stack) in enumerate(self.parents):
            here = min(level, at)
            some = [s for s in stack.vertices if s not in wide]
            left = dict((pull_back if K.ndim == 3 else _pull_back_diagonal)(self.vertex, level, stack, at, K, some))
            for s, X in left.items():
                if with_parents(s):
                    blocks.add(t, s, here, X.mT)
                for below, older in self.parents[:n]:
                    for r, Y in pull_back(self.vertex, below, older, here, X.mT, self._met(older, s, wide)):
                        blocks.add_half(r, s, min(below, here), Y)
                    self._add_columns(s, below, older, here, X.mT, 2.0)
                before = [r for r in self._met(stack, s, wide) if r <= s]
                pairs = left.items() if s in stack.identities else pull_back(self.vertex, level, stack, here, X.mT, before)
                for r, Y in pairs:
                    if r in before:
                        blocks.add(r, s, here, Y)
                self._add_columns(s, level, stack, here, X.mT, 1.0)
                done.append((s, here, X))
        for n, (s, F) in enumerate(wide.items()):
            if with_parents(s):
                blocks.add_product(s, t, at, F, K)
            blocks.add_square(s, at, F, K)
            for r, here, X in done:
                if here == at:
                    blocks.add_product(s, r, at, F, X.mT)
                else:
                    blocks.add(s, r, here, chain(F, at, X.mT, here))
            for r, G in list(wide.items())[:n]:
                blocks.add_product(s, r, at, F, multiply(K, G.mT))


def pull_back(
    vertex: Vertex, level: int, stack: StackedTangents, at: int, K: Tensor, wanted: Sequence[int] | None = None
) -> Pulled:
    """Yield J^T K, vertex by vertex of some parents.

    Args:
        vertex: The vertex t.
        level: Of the tangents.
        stack: Its tangents by some parents.
        at: Level of K.
        K: (R, columns of t, c).
        wanted: Parents; None: all.
    """
    wanted = stack.vertices if wanted is None else wanted
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
    vertex: Vertex, level: int, stack: StackedTangents, at: int, diagonal: Tensor, wanted: Sequence[int] | None = None
) -> Pulled:
    """Yield what :func:`pull_back` does, for the diagonal (R, columns) of K."""
    if level != at or isinstance(stack, (EntrywiseTangents, SelectedTangents)):
        yield from pull_back(vertex, level, stack, at, torch.diag_embed(diagonal), wanted)
        return
    for s in stack.vertices if wanted is None else wanted:
        yield (
            s,
            torch.diag_embed(diagonal) if s in stack.identities else by_row(stack.part([s]), level) * diagonal.unsqueeze(1),
        )


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
            back = Pullback(vertices, t, blocks, Everything())
            for r in [r for r in blocks.neighbours[t] if r != t]:
                back.pair(r)
            if t in blocks.neighbours[t]:
                back.square(lambda _, kept=bool(vertex.jacobians) and not own: kept)  # type: ignore[misc]
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
