"""Column blocks: K_tr E_r, curvature between a vertex and parameters, which goes back where rows meet.

After attention over moving tokens every row of t depends on many rows of r, and K_tr has L p x L q numbers for each sample.
Multiplied by the Jacobian E_r of a parameter, it has that parameter's columns of the Hessian, B_t (entries of t, columns).
Column blocks are eliminated vertex by vertex in one pass, as matrices:

    B_s += sum over children t of J_ts^T B_t + seeds,        H[parameters of t, columns] += E_t^T B_t.

Seeds are K_tr E_r at the vertices where rows met. Columns are taken a few at a time, so that their blocks stay in the cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor

from hessiankit.engine.jacobians import ParameterJacobian, WeightJacobian
from hessiankit.engine.kernel_calls import multiply
from hessiankit.engine.parameter_blocks import add_rows
from hessiankit.engine.storage import EVERY, SymmetricStorage
from hessiankit.engine.tangents import SelectedTangents, StackedTangents, Vertex, by_row, starts

ENTRIES = 2**20  # of a block
_Part: TypeAlias = tuple[Tensor, Tensor | None]  # of a block: some rows, or None for all of them


@dataclass(frozen=True)
class _Seed:
    """Curvature K (R, columns of t, columns of r) and one parameter Jacobian of r."""

    t: int
    r: int
    K: Tensor
    jacobian: ParameterJacobian


@dataclass(frozen=True)
class _Columns:
    """Some columns of one parameter: all, or those of ``rows`` along its first axis, with their seeds."""

    owner: ParameterJacobian
    seeds: Sequence[_Seed]
    rows: slice | None

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.owner.size if self.rows is None else (self.rows.stop - self.rows.start) * _stride(self.owner)

    @property
    def within(self) -> slice:
        """Their slice among the columns of the parameter."""
        step = 1 if self.rows is None else _stride(self.owner)
        return EVERY if self.rows is None else slice(self.rows.start * step, self.rows.stop * step)


class ColumnBlocks:
    """Seeds of column blocks, and their accumulation.

    Args:
        vertices: By number.
    """

    def __init__(self, vertices: Mapping[int, Vertex]) -> None:
        self.vertices = vertices
        self._seeds: dict[ParameterJacobian, list[_Seed]] = defaultdict(list)

    def seed(self, t: int, r: int, K: Tensor) -> None:
        """Record curvature K (R, columns of t, columns of r), to be multiplied by the parameter Jacobians of r."""
        for v, owner in zip(self.vertices[r].jacobians, self.vertices[r].owners, strict=True):
            self._seeds[owner].append(_Seed(t, r, K, v))

    def accumulate(self, matrix: SymmetricStorage) -> None:
        """Eliminate all vertices, and add the columns to the matrix."""
        for columns in self._chunks():
            self._unwind(columns, matrix)

    def _chunks(self) -> Iterator[list[_Columns]]:
        """Yield columns that are treated together, those seeded latest first."""
        largest = max((vertex.entries for vertex in self.vertices.values()), default=1)
        limit = max(1, ENTRIES // largest)
        chunk: list[_Columns] = []
        for owner, seeds in sorted(self._seeds.items(), key=lambda one: -max(seed.t for seed in one[1])):
            for columns in _cut(owner, seeds, limit):
                if chunk and sum(c.width for c in chunk) + columns.width > limit:
                    yield chunk
                    chunk = []
                chunk.append(columns)
        if chunk:
            yield chunk

    def _unwind(self, chunk: Sequence[_Columns], matrix: SymmetricStorage) -> None:
        width = sum(c.width for c in chunk)
        cuts = starts([c.width for c in chunk])
        blocks: dict[int, list[_Part]] = defaultdict(list)
        first = max(seed.t for c in chunk for seed in c.seeds)
        for t in sorted((t for t in self.vertices if t <= first), reverse=True):
            vertex = self.vertices[t]
            parts = blocks.pop(t, [])
            seeds = [
                (cut, _seed_columns(seed.jacobian, self.vertices[seed.r].width, seed.K, c.rows))
                for cut, c in zip(cuts, chunk, strict=True)
                for seed in c.seeds
                if seed.t == t
            ]
            if not parts and not seeds:
                continue
            block = _total(parts, seeds, (vertex.entries, width))
            for c, cut in zip(chunk, cuts, strict=True):
                self._add_rows(t, c, block[:, cut], matrix)
            for level, stack in vertex.parents.items():
                for s, pulled in _pull(level, stack, block):
                    blocks[s].append(pulled)

    def _add_rows(self, t: int, c: _Columns, block: Tensor, matrix: SymmetricStorage) -> None:
        """Add E_t^T B_t; of two parameters that both enter t, for the later one only."""
        vertex, v = self.vertices[t], c.owner
        own = any(seed.r == t for seed in c.seeds)
        for n, u in enumerate(vertex.jacobians):
            m = next((m for m, mine in enumerate(vertex.owners) if own and mine is v), n)
            if m < n or not matrix.wants(u.parameter, v.parameter):
                continue
            once = u.parameter != v.parameter or (own and vertex.owners[n] is v)
            (matrix.add if once else matrix.add_both)(u, v, partial(add_rows, u, block, vertex.width), c.within)


def _total(parts: Sequence[_Part], seeds: Sequence[tuple[slice, Tensor]], shape: tuple[int, int]) -> Tensor:
    """Return the sum of blocks, of blocks at some rows, and of seeds at some columns, without changing any of them."""
    whole = [part for part, rows in parts if rows is None]
    some = [(part, rows) for part, rows in parts if rows is not None]
    if len(whole) == 1 and not seeds and not some:
        return whole[0]
    like = parts[0][0] if parts else seeds[0][1]
    total = like.new_zeros(shape) if not whole else whole[0].clone() if len(whole) == 1 else whole[0] + whole[1]
    for part in whole[2:]:
        total += part
    for part, rows in some:
        total.index_add_(0, rows, part)
    for cut, columns in seeds:
        total[:, cut].add_(columns)
    return total


def _pull(level: int, stack: StackedTangents, block: Tensor) -> Iterator[tuple[int, _Part]]:
    """Yield J_ts^T B for each parent s."""
    if isinstance(stack, SelectedTangents):
        yield stack.vertices[0], (block, stack.positions)
        return
    for s in stack.identities:
        yield s, (block, None)
    rest = [(s, w) for s, w in zip(stack.vertices, stack.widths, strict=True) if s not in stack.identities]
    if rest:
        J = by_row(stack.part([s for s, _ in rest]), level)  # (R, columns of the parents, columns of t)
        pulled = multiply(J, block.unflatten(0, (J.shape[0], -1)))
        for (s, _), cut in zip(rest, starts([w for _, w in rest]), strict=True):
            yield s, (pulled[:, cut].flatten(0, 1), None)


def _cut(owner: ParameterJacobian, seeds: Sequence[_Seed], limit: int) -> Iterator[_Columns]:
    """Yield the columns of a parameter, at most ``limit`` at a time where its first axis can be cut."""
    if not isinstance(owner, WeightJacobian) or owner.at is not None or owner.size <= limit:
        yield _Columns(owner, seeds, None)
        return
    rows, step = owner.size // _stride(owner), max(1, limit // _stride(owner))
    for start in range(0, rows, step):
        yield _Columns(owner, seeds, slice(start, min(start + step, rows)))


def _stride(owner: ParameterJacobian) -> int:
    """Return the entries of a weight for each index of its first axis."""
    assert isinstance(owner, WeightJacobian)
    return owner.X.shape[1] if owner.transposed else owner.width


def _seed_columns(v: ParameterJacobian, width: int, K: Tensor, rows: slice | None) -> Tensor:
    """Return K E_r: (entries of t, size of the parameter), or its columns of some rows of the parameter."""
    groups, wide, _ = K.shape
    split = K.unflatten(2, (-1, width))  # (R, columns of t, m, q)
    if not isinstance(v, WeightJacobian):
        return v.vjp_by_group(split.permute(0, 2, 3, 1)).mT.reshape(groups * wide, v.size)
    weights = v.X
    if rows is not None:
        split, weights = (split[..., rows], weights) if v.transposed else (split, weights[:, rows])
    w = weights.reshape(groups, 1, -1, weights.shape[1]).expand(-1, wide, -1, -1).flatten(0, 1)  # (R columns of t, m, i)
    split = split.flatten(0, 1)
    out = multiply(split.mT, w) if v.transposed else multiply(w.mT, split)
    return out.flatten(1)
