"""From curvature between sources back to parameters: the last source first, each one into its parents and its lifts.

With dt = J ds, curvature K_tr between a source t and any other r becomes J^T K_tr between t's parent s and r, and
J^T K_tt J' between two parents. What is left at a source that parameters enter goes through its lifts into the matrix:
in pairs of sources while rows stay apart, and by :mod:`hessiankit.engine.panels` where they meet.
"""

from __future__ import annotations

from collections.abc import Mapping

from hessiankit.engine.columns import Source
from hessiankit.engine.lifting import Lifting
from hessiankit.engine.meeting import columns_pay, rows_meet
from hessiankit.engine.pairs import Blocks
from hessiankit.engine.panels import Panels
from hessiankit.engine.pulling import Pull
from hessiankit.engine.storage import Matrix
from hessiankit.engine.sweep import Sweep


def unwind(sweep: Sweep, matrix: Matrix) -> None:
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


def _to_panels(t: int, sources: Mapping[int, Source], blocks: Blocks, panels: Panels) -> bool:
    """Take blocks between a source and those after it for panels; tell whether its own block is among them."""
    for r in [r for r in blocks.near[t] if r >= t]:
        if columns_pay(sources[t], sources[r], blocks.levels(t, r)):
            for K in blocks.between(t, r).values():
                panels.seed(t, r, K)
            if r != t:
                blocks.forget(t, r)
    return t in blocks.near[t]
