"""From curvature between sources back to parameters: the last source first, each one into its parents and its lifts.

With dt = J ds, curvature K_tr between a source t and any other r becomes J^T K_tr between t's parent s and r, and
J^T K_tt J' between two parents. What is left at a source that parameters enter goes through its lifts into the matrix:
in pairs of sources while rows stay apart, and by :mod:`hessiankit.engine.panels` where they meet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from hessiankit.engine.columns import Source
from hessiankit.engine.footprint import columns_pay, rows_meet
from hessiankit.engine.lifts import Lift, WeightLift
from hessiankit.engine.pairs import VertexBlocks, add_across_rows, add_diagonal_pair, add_pair, add_pairs
from hessiankit.engine.panels import Panels
from hessiankit.engine.pulling import Pull
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.engine.sweep import Sweep


class Lifting:
    """The lifts of one source, ``t``.

    A weight after it may be reached in two ways, through what it makes and through what is behind it. Where rows stay apart,
    both are put aside until all sources were seen, and added together.

    Args:
        t: Its number.
        sources: By number.
        blocks: Curvature between them.
        matrix: What is added to.
    """

    def __init__(self, t: int, sources: Mapping[int, Source], blocks: VertexBlocks, matrix: SymmetricStorage) -> None:
        self.t, self.sources, self.blocks, self.matrix = t, sources, blocks, matrix
        self._ways: dict[tuple[WeightLift, str, int], list[tuple[WeightLift, Tensor]]] = defaultdict(list)

    def take(self, r: int) -> None:
        """Lift what is known of the source and another; of a pair, what couples equal columns only as it is."""
        t, source, other = self.t, self.sources[self.t], self.sources[r]
        diagonals = self.blocks.diagonal(t, r)
        apart = t != r and all(level == source.axes == other.axes for level in diagonals)
        for level, K in (self.blocks.full if apart else self.blocks.between)(t, r).items():
            for n, u in enumerate(source.lifts):
                for m, v in enumerate(other.lifts):
                    if (r != t or m >= n) and self.matrix.wants(u.parameter, v.parameter):
                        self._pair(other, level, K, u, v, same=r == t and n == m)
        for diagonal in diagonals.values() if apart else ():
            for u in source.lifts:
                for v in other.lifts:
                    if self.matrix.wants(u.parameter, v.parameter):
                        add = self.matrix.add_both if u.parameter == v.parameter else self.matrix.add
                        add(u, v, partial(add_diagonal_pair, u, v, diagonal))

    def finish(self) -> None:
        """Add what was put aside."""
        for (u, _, _), pairs in self._ways.items():
            self.matrix.add(u, pairs[0][0], partial(add_pairs, u, pairs))

    def _pair(self, r: Source, level: int, K: Tensor, u: Lift, v: Lift, *, same: bool) -> None:
        t = self.sources[self.t]
        by_row = level == t.axes == r.axes and level > 0
        if by_row and u.parameter != v.parameter and isinstance(u, WeightLift) and isinstance(v, WeightLift):
            self._ways[u, v.parameter, id(v.at)].append((v, K))
            return

        def write(block: Tensor) -> float | None:
            if by_row:
                return add_pair(u, v, K, block, same=same)
            if isinstance(u, WeightLift) and isinstance(v, WeightLift):
                add_across_rows(u, v, K, block)
            else:
                block += _two_steps(t, r, K, u, v)
            return None

        if u.parameter == v.parameter and not same:  # a tied parameter: its block takes K and its transpose
            self.matrix.add_both(u, v, write)
        else:
            self.matrix.add(u, v, write)


def _two_steps(t: Source, r: Source, K: Tensor, u: Lift, v: Lift) -> Tensor:
    """Sum over the rows of r group by group, then over all rows of t: (size_u, size_v)."""
    groups, wide_t, wide_r = K.shape
    if wide_t * v.size > wide_r * u.size:
        return _two_steps(r, t, K.mT, v, u).T
    m_t, m_r = (wide // source.width for wide, source in ((wide_t, t), (wide_r, r)))
    by_v = v.reduce(K.mT.reshape(groups, m_r, r.width, wide_t))  # (groups, size_v, columns of t)
    rows = by_v.mT.reshape(groups * m_t, t.width, v.size)
    return u.sum(rows)


def unwind(sweep: Sweep, matrix: SymmetricStorage) -> None:
    """Take all curvature of a sweep back to the parameters, and add it to the matrix."""
    matrix.computed = sweep.dtype or matrix.computed
    sources, blocks, panels = sweep.sources, sweep.blocks, Panels(sweep.sources)
    reached: set[int] = set()  # by panels
    for t in sorted(sources, reverse=True):
        source = sources[t]
        own = False
        if source.parents and (t in reached or rows_meet(t, sources, {r: blocks.levels(t, r) for r in blocks.near[t]})):
            own = _to_panels(t, sources, blocks, panels)
            reached.update(s for stack in source.parents.values() for s in stack.sources)
        lifting = Lifting(t, sources, blocks, matrix)
        for r in sorted(r for r in blocks.near[t] if r >= t):
            if source.lifts and sources[r].lifts and not (own and r == t):
                lifting.take(r)
        lifting.finish()
        if source.parents:
            back = Pull(sources, t, blocks)
            for r in [r for r in blocks.near[t] if r != t]:
                back.pair(r)
            if t in blocks.near[t]:
                back.square(crossing=bool(source.lifts) and not own)
        for r in [r for r in blocks.near[t] if r >= t or not source.lifts]:
            blocks.forget(t, r)
        for r in blocks.near[t]:
            blocks.settle(t, r)
    panels.unwind(matrix)


def _to_panels(t: int, sources: Mapping[int, Source], blocks: VertexBlocks, panels: Panels) -> bool:
    """Take blocks between a source and those after it for panels; tell whether its own block is among them."""
    for r in [r for r in blocks.near[t] if r >= t]:
        if columns_pay(sources[t], sources[r], blocks.levels(t, r)):
            for K in blocks.between(t, r).values():
                panels.seed(t, r, K)
            if r != t:
                blocks.forget(t, r)
    return t in blocks.near[t]
