"""Curvature between pairs of sources, on its way back to the parameters."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Blocks:
    """Curvature between sources: for a pair (t, r), t not before r, and a level, a tensor (R, columns of t, columns of r)."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], dict[int, Tensor]] = {}
        self.slopes: dict[tuple[int, int], tuple[int, Tensor]] = {}  # diagonals (R, columns) of blocks that are nothing else
        self.near: dict[int, set[int]] = defaultdict(set)

    def add(self, t: int, r: int, level: int, block: Tensor) -> None:
        """Add a block; of a source with itself, a symmetric one."""
        if t < r:
            t, r, block = r, t, block.mT
        levels = self.of.setdefault((t, r), {})
        levels[level] = levels[level] + block if level in levels else block
        self.near[t].add(r)
        self.near[r].add(t)

    def add_diagonal(self, t: int, r: int, level: int, diagonal: Tensor) -> None:
        """Add a block that couples equal columns only: their curvature (R, columns). Once for a pair, which differ."""
        self.slopes[max(t, r), min(t, r)] = (level, diagonal)
        self.near[t].add(r)
        self.near[r].add(t)

    def add_half(self, t: int, r: int, level: int, block: Tensor) -> None:
        """Add a block that stands for itself and its transpose."""
        self.add(t, r, level, block + block.mT if t == r else block)

    def between(self, t: int, r: int) -> dict[int, Tensor]:
        """Return the blocks of a pair, by level, as (R, columns of t, columns of r)."""
        found = self.full(t, r)
        if (max(t, r), min(t, r)) in self.slopes:
            level, diagonal = self.slopes[max(t, r), min(t, r)]
            dense = torch.diag_embed(diagonal)
            found = {**found, level: dense + found[level] if level in found else dense}
        return found

    def full(self, t: int, r: int) -> dict[int, Tensor]:
        """Return what :meth:`between` does, without the block that is diagonal."""
        found = self.of.get((max(t, r), min(t, r)), {})
        return found if t >= r else {level: K.mT for level, K in found.items()}

    def diagonal(self, t: int, r: int) -> Tensor | None:
        """Return the diagonal (R, columns) of a block of a pair that is nothing else, if there is one."""
        found = self.slopes.get((max(t, r), min(t, r)))
        return None if found is None else found[1]

    def levels(self, t: int, r: int) -> set[int]:
        """Return the levels at which a pair has blocks."""
        pair = (max(t, r), min(t, r))
        return {*self.of.get(pair, ()), *([self.slopes[pair][0]] if pair in self.slopes else [])}

    def forget(self, t: int, r: int) -> None:
        """Drop the blocks of a pair."""
        self.of.pop((max(t, r), min(t, r)), None)
        self.slopes.pop((max(t, r), min(t, r)), None)
        self.near[t].discard(r)
        self.near[r].discard(t)
