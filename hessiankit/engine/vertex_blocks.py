"""Curvature between pairs of vertices, K_tr = J_t^T [lambda . D^2 phi] J_r summed over the primitives between t, r and the loss.

Structure is kept beside entries: a diagonal block by its diagonal; a block that a narrow vertex leaves at a wide parent as the
product F M of the tangents F (R, columns of the parent, few) of the narrow one, and with the parent itself as F C F^T.

What is alive of it during the reverse accumulation, and whether it is worth its entries, is counted from shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.engine.kernel_products import multiply
from hessiankit.engine.tangents import Vertex

Factors: TypeAlias = "dict[int, tuple[Tensor, Tensor]]"  # F and M, or F and C, by the identity of F


class VertexBlocks:
    """Curvature K_tr between vertices t, r with t >= r, by level: (R, columns of t, columns of r)."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], dict[int, Tensor]] = {}
        self.diagonals: dict[tuple[int, int], dict[int, Tensor]] = {}  # (R, columns), of what couples equal columns only
        self.products: dict[tuple[int, int], dict[int, Factors]] = {}  # F M, by the wide vertex and the other, and level
        self.squares: dict[int, dict[int, Factors]] = {}  # F C F^T, by the wide vertex and level
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

    def add_product(self, t: int, r: int, level: int, F: Tensor, M: Tensor) -> None:
        """Add K_tr = F M for a wide vertex t, F (R, columns of t, few)."""
        _gather(self.products.setdefault((t, r), {}).setdefault(level, {}), F, M)
        self.neighbours[t].add(r)
        self.neighbours[r].add(t)

    def add_square(self, t: int, level: int, F: Tensor, C: Tensor) -> None:
        """Add K_tt = F C F^T of a wide vertex, for a symmetric C (R, few, few)."""
        _gather(self.squares.setdefault(t, {}).setdefault(level, {}), F, C)
        self.neighbours[t].add(t)

    def add_half(self, t: int, r: int, level: int, block: Tensor) -> None:
        """Add a block and, if t = r, its transpose."""
        self.add(t, r, level, block + block.mT if t == r else block)

    def between(self, t: int, r: int) -> dict[int, Tensor]:
        """Return K_tr by level, dense (R, columns of t, columns of r)."""
        found = self.full(t, r)
        for level, squares in self.squares.get(t, {}).items() if t == r else ():
            for F, C in squares.values():
                _add_product(found, level, multiply(F, C), F.mT)
        for level, diagonal in self.diagonal(t, r).items():
            found[level] = _with_diagonal(found[level], diagonal) if level in found else torch.diag_embed(diagonal)
        return found

    def full(self, t: int, r: int) -> dict[int, Tensor]:
        """Return K_tr by level without its diagonals and its F C F^T."""
        found = self.rest(t, r)
        for level, products in self.products.get((t, r), {}).items():
            for F, M in products.values():
                _add_product(found, level, F, M)
        return found

    def rest(self, t: int, r: int) -> dict[int, Tensor]:
        """Return :meth:`full` without the products F M of the wide vertex t."""
        found = self.of.get((max(t, r), min(t, r)), {})
        found = dict(found) if t >= r else {level: K.mT for level, K in found.items()}
        for level, products in self.products.get((r, t), {}).items() if t != r else ():
            for F, M in products.values():
                _add_product(found, level, M.mT, F.mT)
        return found

    def plain(self, t: int) -> dict[int, Tensor]:
        """Return K_tt by level without F C F^T; where it is diagonal, its diagonal."""
        found = self.full(t, t)
        for level, diagonal in self.diagonal(t, t).items():
            found[level] = _with_diagonal(found[level], diagonal) if level in found else diagonal
        return found

    def expand_products(self, t: int, r: int) -> None:
        """Replace the products F M of a pair by dense blocks."""
        if (t, r) in self.products:
            found = self.full(t, r)
            self.products.pop((t, r), None)
            self.products.pop((r, t), None)
            self.of[max(t, r), min(t, r)] = found if t >= r else {level: K.mT for level, K in found.items()}

    def diagonal(self, t: int, r: int) -> dict[int, Tensor]:
        """Return the diagonals (R, columns) of a pair, by level."""
        return self.diagonals.get((max(t, r), min(t, r)), {})

    def levels(self, t: int, r: int) -> set[int]:
        """Return the levels at which a pair has blocks."""
        pair = (max(t, r), min(t, r))
        squares = self.squares.get(t, ()) if t == r else ()
        products = (*self.products.get((t, r), ()), *self.products.get((r, t), ()))
        return {*self.of.get(pair, ()), *self.diagonals.get(pair, ()), *products, *squares}

    def drop(self, t: int, r: int) -> None:
        """Drop all curvature of a pair."""
        self.of.pop((max(t, r), min(t, r)), None)
        self.diagonals.pop((max(t, r), min(t, r)), None)
        self.products.pop((t, r), None)
        self.products.pop((r, t), None)
        if t == r:
            self.squares.pop(t, None)
        self.neighbours[t].discard(r)
        self.neighbours[r].discard(t)


def _with_diagonal(K: Tensor, diagonal: Tensor) -> Tensor:
    out = K.clone()
    out.diagonal(dim1=1, dim2=2).add_(diagonal)
    return out


def _gather(found: Factors, F: Tensor, M: Tensor) -> None:
    found[id(F)] = (F, found[id(F)][1] + M if id(F) in found else M)


def _add_product(found: dict[int, Tensor], level: int, a: Tensor, b: Tensor) -> None:
    found[level] = torch.baddbmm(found[level], a, b) if level in found else multiply(a, b)


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
