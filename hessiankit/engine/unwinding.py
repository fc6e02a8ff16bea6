"""From curvature between sources back to parameters: the last source first, each one into its parents and its lifts.

With dt = J ds, curvature K_tr between a source t and any other r becomes J^T K_tr between t's parent s and r, and
J^T K_tt J' between two parents. What is left at a source that parameters enter goes through its lifts into the matrix:
in pairs of sources while rows stay apart, and by :mod:`hessiankit.engine.panels` where they meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from hessiankit.engine.columns import Selected, Source, Stack, chain, starts
from hessiankit.engine.lifts import Kronecker, Lift
from hessiankit.engine.meeting import columns_pay, rows_meet
from hessiankit.engine.pairing import add_across_rows, add_diagonal_pair, add_pair
from hessiankit.engine.pairs import Blocks
from hessiankit.engine.panels import Panels
from hessiankit.engine.storage import Matrix
from hessiankit.engine.sweep import Sweep


def unwind(sweep: Sweep, matrix: Matrix) -> None:
    """Take all curvature of a sweep back to the parameters, and add it to the matrix."""
    sources, blocks, panels = sweep.sources, sweep.blocks, Panels(sweep.sources)
    reached: set[int] = set()  # by panels
    for t in sorted(sources, reverse=True):
        source = sources[t]
        own = False
        if source.parents and (t in reached or rows_meet(t, sources, {r: blocks.levels(t, r) for r in blocks.near[t]})):
            own = _to_panels(t, sources, blocks, panels)
            reached.update(s for stack in source.parents.values() for s in stack.sources)
        for r in sorted(r for r in blocks.near[t] if r >= t):
            if source.lifts and sources[r].lifts and not (own and r == t):
                for level, K in blocks.full(t, r).items():
                    _lift(source, sources[r], level, K, matrix, same=r == t)
                if (diagonal := blocks.diagonal(t, r)) is not None:
                    _lift_diagonal(source, sources[r], diagonal, matrix)
        for level, stack in source.parents.items():
            for r in [r for r in blocks.near[t] if r != t]:
                for at, K in blocks.between(t, r).items():
                    for s, part in _pull(source, level, stack, at, K):
                        blocks.add_half(s, r, min(level, at), part)
        if t in blocks.near[t]:
            _pull_square(source, t, blocks, crossing=bool(source.lifts) and not own)
        for r in [r for r in blocks.near[t] if r >= t or not source.lifts]:
            blocks.forget(t, r)
    panels.unwind(matrix)


def _to_panels(t: int, sources: Mapping[int, Source], blocks: Blocks, panels: Panels) -> bool:
    """Take blocks between a source and those after it for panels; tell whether its own block is among them."""
    for r in [r for r in blocks.near[t] if r >= t]:
        if columns_pay(sources[t], sources[r], blocks.levels(t, r)):
            for K in blocks.between(t, r).values():
                panels.seed(t, r, K)
            if r != t:
                blocks.forget(t, r)
    return bool(sources[t].lifts) and t in blocks.near[t]


def _pull(source: Source, level: int, stack: Stack, at: int, K: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield J K, source by source of a stack of parents."""
    if isinstance(stack, Selected):
        yield stack.sources[0], stack.pull(K, at)
        return
    for s in stack.units:
        yield s, K
    rest = [s for s in stack.sources if s not in stack.units]
    if not rest:
        return
    data, rows = stack.part(rest), source.rows(level)
    block = chain(data.reshape(data.shape[0], rows, -1).transpose(0, 1).to(K.dtype), level, K, at)
    if len(rest) == 1:
        yield rest[0], block
        return
    groups, _, c = block.shape  # the columns of the stack are numbered (rows / groups, S)
    split = block.reshape(groups, rows // groups, -1, c)
    widths = [w for s, w in zip(stack.sources, stack.widths, strict=True) if s not in stack.units]
    for s, cut in zip(rest, starts(widths), strict=True):
        yield s, split[:, :, cut].reshape(groups, -1, c)


def _pull_square(source: Source, t: int, blocks: Blocks, *, crossing: bool) -> None:
    """Take the curvature of a source with itself to its parents, and where it is ``crossing`` between it and them."""
    for at, K in list(blocks.between(t, t).items()):
        parents = list(source.parents.items())
        for n, (level, stack) in enumerate(parents):
            for s, X in _pull(source, level, stack, at, K):
                if crossing:
                    blocks.add(t, s, min(level, at), X.mT)
                for other, (level_b, stack_b) in enumerate(parents[: n + 1]):
                    for r, Y in _pull(source, level_b, stack_b, min(level, at), X.mT):
                        if other < n:
                            blocks.add_half(r, s, min(level, level_b, at), Y)
                        elif r <= s:
                            blocks.add(r, s, min(level, at), Y)


def _lift(t: Source, r: Source, level: int, K: Tensor, matrix: Matrix, *, same: bool) -> None:
    """Add curvature K (R, columns of t, columns of r) between two sources, lifted to their parameters."""
    for n, u in enumerate(t.lifts):
        for m, v in enumerate(r.lifts):
            if not same or n == m:
                _lift_pair(t, r, level, K, u, v, matrix, same=same)
            elif m > n:
                _lift_pair(t, r, level, K, u, v, matrix, same=False)


def _lift_diagonal(t: Source, r: Source, diagonal: Tensor, matrix: Matrix) -> None:
    """Add curvature between equal columns (R, p) of two sources, lifted to their parameters."""
    for u in t.lifts:
        for v in r.lifts:
            if not matrix.wants(u.parameter, v.parameter):
                continue
            add = matrix.add_both if u.parameter == v.parameter else matrix.add
            add(u, v, partial(add_diagonal_pair, u, v, diagonal))


def _lift_pair(t: Source, r: Source, level: int, K: Tensor, u: Lift, v: Lift, matrix: Matrix, *, same: bool) -> None:
    if not matrix.wants(u.parameter, v.parameter):
        return

    def write(block: Tensor) -> None:
        if level == t.axes == r.axes and level > 0:
            add_pair(u, v, K, block, same=same)
        elif isinstance(u, Kronecker) and isinstance(v, Kronecker):
            add_across_rows(u, v, K, block)
        else:
            block += _two_steps(t, r, K, u, v)

    if u.parameter == v.parameter and not same:  # a tied parameter: its block takes K and its transpose
        matrix.add_both(u, v, write)
    else:
        matrix.add(u, v, write)


def _two_steps(t: Source, r: Source, K: Tensor, u: Lift, v: Lift) -> Tensor:
    """Sum over the rows of r group by group, then over all rows of t: (size_u, size_v)."""
    groups, wide_t, wide_r = K.shape
    if wide_t * v.size > wide_r * u.size:
        return _two_steps(r, t, K.mT, v, u).T
    m_t, m_r = (wide // source.width for wide, source in ((wide_t, t), (wide_r, r)))
    by_v = v.reduce(K.mT.reshape(groups, m_r, r.width, wide_t))  # (groups, size_v, columns of t)
    rows = by_v.mT.reshape(groups * m_t, t.width, v.size)
    return u.sum(rows)
