"""Where rows meet: which curvature is taken back as pairs of sources, and which as columns of parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hessiankit.engine.columns import Source


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
