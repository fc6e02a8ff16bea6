"""Entries of curvature alive during reverse accumulation, counted from shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hessiankit.engine.tangents import Vertex
from hessiankit.engine.vertex_blocks import VertexBlocks


def rows_coupled(t: int, vertices: Mapping[int, Vertex], levels: Mapping[int, Collection[int]]) -> bool:
    """Tell whether tangents by the parents of a vertex, or curvature (its levels, by other vertex), couple its rows."""
    vertex = vertices[t]
    return any(level < vertex.axes for level in vertex.parents) or any(
        level < min(vertex.axes, vertices[r].axes) for r, found in levels.items() if r >= t for level in found
    )


def columns_are_cheaper(t: Vertex, r: Vertex, levels: Collection[int]) -> bool:
    """Tell whether column blocks K E_r take no more work than curvature K itself on the way back from t.

    With l rows of t and m of r in a sample, a column of r's weights takes about l i multiplications for each of t's
    parameters, and m (2 l + i) the other way: for a head after pooling, with m = 1, K is cheaper.
    """
    level = min(1, *levels)
    rows_t, rows_r = (vertex.columns(level) // vertex.width for vertex in (t, r))
    size = sum(jacobian.size for jacobian in r.jacobians) // r.width
    return bool(r.jacobians) and rows_r * (2 * rows_t + size) >= rows_t * size


def peak_entries(blocks: VertexBlocks, vertices: Mapping[int, Vertex]) -> int:
    """Return the largest number of entries of curvature alive at once in :mod:`hessiankit.engine.reverse_accumulation`."""
    neighbours = {t: {r: blocks.levels(t, r) for r in others} for t, others in blocks.neighbours.items()}
    alive = sum(
        _entries(vertices, t, r, level) for t, by in neighbours.items() for r, found in by.items() if r <= t for level in found
    )
    peak = alive
    reached: set[int] = set()

    def add(t: int, r: int, level: int) -> None:
        nonlocal alive
        found = neighbours.setdefault(t, {}).setdefault(r, set())
        neighbours.setdefault(r, {})[t] = found
        if level not in found:
            found.add(level)
            alive += _entries(vertices, max(t, r), min(t, r), level)

    for t in sorted(vertices, reverse=True):
        vertex, by = vertices[t], neighbours.setdefault(t, {})
        parents = [(level, s) for level, stack in vertex.parents.items() for s in stack.vertices]
        kept: set[int] = set()
        if parents and (t in reached or rows_coupled(t, vertices, by)):
            reached.update(s for _, s in parents)
            kept = {r for r, found in by.items() if r >= t and columns_are_cheaper(vertex, vertices[r], found)}
        for r, found in list(by.items()):
            for at in list(found):
                for level, s in parents:
                    if r not in kept and (r != t or vertex.jacobians):
                        add(s, r, min(level, at))
                    for other, q in parents if r == t else ():
                        add(s, q, min(level, other, at))
        peak = max(peak, alive)
        for r in [r for r in by if r >= t or not vertex.jacobians]:
            found = by.pop(r)
            neighbours[r].pop(t, None)
            if r not in kept:
                alive -= sum(_entries(vertices, max(t, r), min(t, r), level) for level in found)
    return peak


def _entries(vertices: Mapping[int, Vertex], t: int, r: int, level: int) -> int:
    return vertices[t].entries * vertices[r].columns(level)  # of t, rows times columns are all entries at any level
