"""Curvature of one source with those after it, lifted to the parameters of both and added to the matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from hessiankit.engine.columns import Source
from hessiankit.engine.lifts import Kronecker, Lift
from hessiankit.engine.pairing import add_across_rows, add_diagonal_pair, add_pair, add_pairs
from hessiankit.engine.pairs import Blocks
from hessiankit.engine.storage import Matrix


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

    def __init__(self, t: int, sources: Mapping[int, Source], blocks: Blocks, matrix: Matrix) -> None:
        self.t, self.sources, self.blocks, self.matrix = t, sources, blocks, matrix
        self._ways: dict[tuple[Kronecker, str, int], list[tuple[Kronecker, Tensor]]] = defaultdict(list)

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
        if by_row and u.parameter != v.parameter and isinstance(u, Kronecker) and isinstance(v, Kronecker):
            self._ways[u, v.parameter, id(v.at)].append((v, K))
            return

        def write(block: Tensor) -> float | None:
            if by_row:
                return add_pair(u, v, K, block, same=same)
            if isinstance(u, Kronecker) and isinstance(v, Kronecker):
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
