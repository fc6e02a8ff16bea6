"""How much memory curvature takes on its way back, without computing any."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hessiankit.engine.columns import Source
from hessiankit.engine.pairs import VertexBlocks


def rows_meet(t: int, sources: Mapping[int, Source], levels: Mapping[int, Collection[int]]) -> bool:
    """Tell whether rows of a source meet other rows, on the way to its parents or in curvature (its levels, by other source)."""
    source = sources[t]
    return any(level < source.axes for level in source.parents) or any(
        level < min(source.axes, sources[r].axes) for r, found in levels.items() if r >= t for level in found
    )


def columns_pay(t: Source, r: Source, levels: Collection[int]) -> bool:
    """Tell whether columns of r's parameters take no more work than columns of r.

    With l rows of t and m of r in a sample, a column of r's weights takes about l i multiplications for each of t's
    parameters, and m (2 l + i) the other way: a head after pooling, with m = 1, is better left as it is.
    """
    level = min(1, *levels)
    rows_t, rows_r = (source.columns(level) // source.width for source in (t, r))
    size = sum(lift.size for lift in r.lifts) // r.width
    return bool(r.lifts) and rows_r * (2 * rows_t + size) >= rows_t * size


def footprint(blocks: VertexBlocks, sources: Mapping[int, Source]) -> int:
    """Return how many entries of blocks are alive at once while :mod:`hessiankit.engine.unwinding` takes them to the parents."""
    near = {t: {r: blocks.levels(t, r) for r in others} for t, others in blocks.near.items()}
    alive = sum(_entries(sources, t, r, level) for t, by in near.items() for r, found in by.items() if r <= t for level in found)
    peak = alive
    reached: set[int] = set()

    def add(t: int, r: int, level: int) -> None:
        nonlocal alive
        found = near.setdefault(t, {}).setdefault(r, set())
        near.setdefault(r, {})[t] = found
        if level not in found:
            found.add(level)
            alive += _entries(sources, max(t, r), min(t, r), level)

    for t in sorted(sources, reverse=True):
        source, by = sources[t], near.setdefault(t, {})
        parents = [(level, s) for level, stack in source.parents.items() for s in stack.sources]
        kept: set[int] = set()
        if parents and (t in reached or rows_meet(t, sources, by)):
            reached.update(s for _, s in parents)
            kept = {r for r, found in by.items() if r >= t and columns_pay(source, sources[r], found)}
        for r, found in list(by.items()):
            for at in list(found):
                for level, s in parents:
                    if r not in kept and (r != t or source.lifts):
                        add(s, r, min(level, at))
                    for other, q in parents if r == t else ():
                        add(s, q, min(level, other, at))
        peak = max(peak, alive)
        for r in [r for r in by if r >= t or not source.lifts]:
            found = by.pop(r)
            near[r].pop(t, None)
            if r not in kept:
                alive -= sum(_entries(sources, max(t, r), min(t, r), level) for level in found)
    return peak


def _entries(sources: Mapping[int, Source], t: int, r: int, level: int) -> int:
    return sources[t].entries * sources[r].columns(level)  # of t, rows times columns are all entries at any level
