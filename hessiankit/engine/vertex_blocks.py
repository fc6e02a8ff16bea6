"""Curvature between pairs of vertices, K_tr = J_t^T [lambda . D^2 phi] J_r summed over the primitives between t, r and the loss.

Blocks that couple equal columns only are kept by their diagonals. What is alive of all during the reverse accumulation, and
whether it is worth its entries, is counted from shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from hessiankit.engine.tangents import Vertex


class VertexBlocks:
    """Curvature K_tr between vertices t, r with t >= r, by level: (R, columns of t, columns of r)."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], dict[int, Tensor]] = {}
        self.diagonals: dict[tuple[int, int], dict[int, Tensor]] = {}  # (R, columns), of what couples equal columns only
        self.neighbours: dict[int, set[int]] = defaultdict(set)

    def add(self, t: int, r: int, level: int, block: Tensor) -> None:
        """Add K_tr; of a vertex with itself, a symmetric one."""
        if t < r:
            t, r, block = r, t, block.mT
        levels = self.of.setdefault((t, r), {})
        levels[level] = levels[level] + block if level in levels else block
        self.neighbours[t].add(r)
        self.neighbours[r].add(t)

    def add_diagonal(self, t: int, r: int, level: int, diagonal: Tensor) -> None:
        """Add a K_tr that couples equal columns only: its diagonal (R, columns)."""
        levels = self.diagonals.setdefault((max(t, r), min(t, r)), {})
        levels[level] = levels[level] + diagonal if level in levels else diagonal
        self.neighbours[t].add(r)
        self.neighbours[r].add(t)

    def add_half(self, t: int, r: int, level: int, block: Tensor) -> None:
        """Add a block and, if t = r, its transpose."""
        self.add(t, r, level, block + block.mT if t == r else block)

    def between(self, t: int, r: int) -> dict[int, Tensor]:
        """Return K_tr by level, dense (R, columns of t, columns of r)."""
        found = self.plain(t, r)
        return {level: torch.diag_embed(K) if K.ndim == 2 else K for level, K in found.items()}

    def full(self, t: int, r: int) -> dict[int, Tensor]:
        """Return K_tr by level without its diagonals."""
        found = self.of.get((max(t, r), min(t, r)), {})
        return dict(found) if t >= r else {level: K.mT for level, K in found.items()}

    def plain(self, t: int, r: int) -> dict[int, Tensor]:
        """Return K_tr by level; where it is diagonal, its diagonal."""
        found = self.full(t, r)
        for level, diagonal in self.diagonal(t, r).items():
            found[level] = _with_diagonal(found[level], diagonal) if level in found else diagonal
        return found

    def diagonal(self, t: int, r: int) -> dict[int, Tensor]:
        """Return the diagonals (R, columns) of a pair, by level."""
        return self.diagonals.get((max(t, r), min(t, r)), {})

    def levels(self, t: int, r: int) -> set[int]:
        """Return the levels at which a pair has blocks."""
        pair = (max(t, r), min(t, r))
        return {*self.of.get(pair, ()), *self.diagonals.get(pair, ())}

    def drop(self, t: int, r: int) -> None:
        """Drop all curvature of a pair."""
        self.of.pop((max(t, r), min(t, r)), None)
        self.diagonals.pop((max(t, r), min(t, r)), None)
        self.neighbours[t].discard(r)
        self.neighbours[r].discard(t)


def _with_diagonal(K: Tensor, diagonal: Tensor) -> Tensor:
    out = K.clone()
    out.diagonal(dim1=1, dim2=2).add_(diagonal)
    return out


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
