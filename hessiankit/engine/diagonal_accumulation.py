"""Reverse accumulation of the diagonal of the Hessian alone.

An entry (e, e) needs curvature between two vertices only if one parameter entry reaches both. At a vertex that only parameters
move, curvature between equal columns is enough. For X (x) I,

    H[(i, p), (i, p)] = sum_nn' X[n, i] X[n', i] K[(n, p), (n', p)],

kept as ``D`` (groups, m, m', p) of groups of m rows; where rows stay apart, m = 1 and D is the diagonal of K. Two Jacobians that
reach an entry from different columns (tied weights, the mixed term of a weight) need K at those pairs of columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.jacobians import SCRATCH, GainJacobian, IdentityJacobian, IndexJacobian, ParameterJacobian, WeightJacobian
from hessiankit.engine.reverse_accumulation import Everything, Pullback, by_column
from hessiankit.engine.tangents import EntrywiseTangents, SelectedTangents, Vertex


def is_by_column(u: ParameterJacobian, v: ParameterJacobian) -> bool:
    """Tell whether two Jacobians of a parameter reach every shared entry from the same column alone."""
    if isinstance(u, WeightJacobian) and isinstance(v, WeightJacobian):
        return u.transposed == v.transposed and u.width == v.width and u.size == v.size and _same(u.at, v.at)
    if isinstance(u, (GainJacobian, IdentityJacobian)) and type(u) is type(v):
        return u is v or (isinstance(u, GainJacobian) and _same(u.at, v.at))
    if isinstance(u, IndexJacobian) and u is v:
        column = torch.arange(u.which.shape[1], device=u.which.device).expand_as(u.which)
        home = column.new_zeros(u.size)
        home[u.which.reshape(-1)] = column.reshape(-1)
        return bool((home[u.which] == column).all())
    return False


def diagonal_by_column(u: ParameterJacobian, v: ParameterJacobian, D: Tensor) -> Tensor:
    """Return the diagonal (size,) of U^T K V from D (G, m, m', p), for Jacobians with :func:`is_by_column`."""
    groups, m, m_v, p = D.shape
    if isinstance(u, IdentityJacobian):
        return D[0, 0, 0, u.start : u.start + u.count]
    if isinstance(u, IndexJacobian):
        which = u.which.reshape(groups, m, p)
        rows = D.sum(2) if m == 1 else (D * (which.unsqueeze(2) == which.unsqueeze(1))).sum(2)
        return D.new_zeros(u.size).index_add_(0, which.reshape(-1), rows.reshape(-1))
    if isinstance(u, GainJacobian):
        assert isinstance(v, GainJacobian)
        if not v.is_ones:
            D = D * v.X.reshape(groups, 1, m_v, p)
        D = D.sum(2)
        return (D if u.is_ones else D * u.X.reshape(groups, m, p)).sum((0, 1))
    assert isinstance(u, WeightJacobian)
    assert isinstance(v, WeightJacobian)
    if m == m_v == 1:
        found = (u.X * v.X).T @ D.reshape(groups, p)  # (i, p)
    else:
        found = _over_pairs(u, v, D)
    return (found.T if u.transposed else found).reshape(-1)


def _over_pairs(u: WeightJacobian, v: WeightJacobian, D: Tensor) -> Tensor:
    """Return the sum over pairs of rows of a group, some columns at a time: (i, p)."""
    groups, m, m_v, _ = D.shape
    a = u.X.reshape(groups, 1, m, -1)
    b = v.X.reshape(groups, 1, m_v, -1)
    step = max(1, SCRATCH // (groups * m * a.shape[3]))
    parts = [(((some @ b) * a).sum((0, 2))) for some in D.permute(0, 3, 1, 2).split(step, 1)]
    return torch.cat(parts).T


def diagonal_of_entries(u: ParameterJacobian, v: ParameterJacobian, K: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions in vec_r of the parameter and the diagonal of U^T K V there, for any two Jacobians of it.

    Args:
        u: Jacobian of the rows of the block.
        v: Jacobian of its columns.
        K: Curvature (G, m, p, m', q) of G groups of m rows of p columns, and m' rows of q columns.
    """
    if isinstance(u, WeightJacobian) and isinstance(v, WeightJacobian):
        return _two_weights(u, v, K)
    if isinstance(v, WeightJacobian):
        return diagonal_of_entries(v, u, K.permute(0, 3, 4, 1, 2))
    if isinstance(u, WeightJacobian):
        return _weight_and_entries(u, v, K)
    return _two_entries(u, v, K)


def _two_weights(u: WeightJacobian, v: WeightJacobian, K: Tensor) -> tuple[Tensor, Tensor]:
    mine, other = _meeting(u, _positions(v, K.device))
    other = torch.arange(v.size, device=K.device)[other]
    (i, p), (j, q) = _cell(u, mine), _cell(v, other)
    groups, m, _, m_v, _ = K.shape
    a, b = (w.X.reshape(groups, -1, w.X.shape[1]) for w in (u, v))
    out, step = K.new_empty(mine.numel()), max(1, SCRATCH // (groups * m * m_v))
    for start in range(0, mine.numel(), step):
        cut = slice(start, start + step)
        between = K[:, :, p[cut], :, q[cut]]  # (entries, G, m, m')
        out[cut] = torch.einsum("gme,egmn,gne->e", a[:, :, i[cut]], between, b[:, :, j[cut]])
    return _positions(u, K.device)[mine], out


def _weight_and_entries(u: WeightJacobian, v: ParameterJacobian, K: Tensor) -> tuple[Tensor, Tensor]:
    groups, m, p, m_v, q = K.shape
    positions, weights = _entries(v, groups, m_v, q, K.device)
    positions = positions.reshape(groups, m_v * q)
    mine, here = _meeting(u, positions.reshape(-1))
    at = torch.zeros_like(positions).reshape(-1)
    at[here] = mine
    i, o = (x.reshape(groups, 1, -1).expand(-1, m, -1) for x in _cell(u, at))
    a = u.X.reshape(groups, m, -1).gather(2, i)  # (G, m, m' q)
    between = K.reshape(groups, m, p, m_v * q).gather(2, o.unsqueeze(2)).squeeze(2)
    found = (a * between).sum(1)
    found = found if weights is None else found * weights.reshape(groups, -1)
    return _positions(u, K.device)[mine], found.reshape(-1)[here]


def _two_entries(u: ParameterJacobian, v: ParameterJacobian, K: Tensor) -> tuple[Tensor, Tensor]:
    groups, m, p, m_v, q = K.shape
    (x, a), (y, b) = _entries(u, groups, m, p, K.device), _entries(v, groups, m_v, q, K.device)
    same = (x.reshape(groups, -1, 1) == y.reshape(groups, 1, -1)) & (x >= 0).reshape(groups, -1, 1)
    found = K.reshape(groups, m * p, m_v * q) * same
    found = found if b is None else found * b.reshape(groups, 1, -1)
    total = found.sum(2).reshape(x.shape)
    total = total if a is None else total * a
    return x[x >= 0], total[x >= 0]


def _entries(u: ParameterJacobian, groups: int, m: int, width: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the parameter entry of each coordinate (groups, m, width), -1 for none, and its factor."""
    if isinstance(u, IndexJacobian):
        assert u.at is not None
        return u.at[u.which].reshape(groups, m, width), None
    if isinstance(u, GainJacobian):
        positions = _positions(u, device).expand(groups, m, width)
        return positions, None if u.is_ones else u.X.reshape(groups, m, width)
    assert isinstance(u, IdentityJacobian)
    mine = _positions(u, device)
    positions = mine.new_full((width,), -1)
    positions[u.start : u.start + u.count] = mine
    return positions.expand(groups, m, width), None


def _positions(u: ParameterJacobian, device: torch.device) -> Tensor:
    if u.at is not None:
        return u.at.reshape(-1)
    return torch.arange(u.size, device=device)


def _meeting(u: WeightJacobian, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return pairs (k, l) with the k-th entry of a weight at the l-th of some positions."""
    mine = _positions(u, positions.device)
    top = 1 + max(int(mine.max()), int(positions.max()))
    order = mine.new_full((top + 1,), -1)  # the last place is for -1
    order[mine] = torch.arange(mine.numel(), device=mine.device)
    found = order[positions]
    here = (found >= 0).nonzero().squeeze(1)
    return found[here], here


def _cell(u: WeightJacobian, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return row i and column p of the k-th entries of a weight."""
    rows = u.X.shape[1]
    return (k % rows, k // rows) if u.transposed else (k // u.width, k % u.width)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a.reshape(-1), b.reshape(-1)))


WHOLE = 2**24  # entries that curvature between parameters taken whole may have


class Entries:
    """The diagonal, a vector with one entry for each entry of the parameters.

    Args:
        slices: Entries of each parameter, one after the other.
        dtype: Of the entries.
        device: Where they are kept.
    """

    def __init__(self, slices: Mapping[str, slice], dtype: torch.dtype, device: torch.device) -> None:
        self.slices = dict(slices)
        self.data = torch.zeros(max((s.stop for s in self.slices.values()), default=0), dtype=dtype, device=device)

    def add(self, parameter: str, at: Tensor | None, values: Tensor) -> None:
        """Add values at positions in vec_r of a parameter; None for all of them."""
        into, values = self.data[self.slices[parameter]], values.to(self.data.dtype)
        if at is None:
            into += values
        else:
            into.index_add_(0, at.reshape(-1), values)


class TooLarge(Exception):
    """Parameters taken whole together are too many for curvature between all of their entries."""


class BoundedForwardSweep(ForwardSweep):
    """A sweep that raises :class:`TooLarge` where rows and samples mix and parameters would have to be taken whole."""

    def _add_parameter_vertices(self) -> None:
        trace = self.trace
        self._check(sum(trace.values[at].numel() for at in trace.parameters.values() if at in self.needed))
        super()._add_parameter_vertices()

    def _parameter_jacobians(self, s: int) -> dict[int, Tensor]:
        self._check(sum(self._parameter_sizes(s).values()))
        return super()._parameter_jacobians(s)

    def _check(self, size: int) -> None:
        if size**2 > WHOLE:
            raise TooLarge


class Reach(Everything):
    """The parameter entries that reach each vertex, by colours: one for all Jacobians that share entries.

    Args:
        vertices: By number; a vertex's parents have smaller numbers.

    Attributes:
        own: The colours of a vertex's own Jacobians.
        all: The colours that reach a vertex.
        leaves: The vertices that parameters alone move, by Jacobians that read curvature of equal columns only.
        columns: Of the leaves: curvature of equal columns, by level.
    """

    def __init__(self, vertices: Mapping[int, Vertex]) -> None:
        self._colours: dict[int, int] = {}
        by_parameter: dict[str, list[ParameterJacobian]] = defaultdict(list)
        for vertex in vertices.values():
            for jacobian in vertex.jacobians:
                by_parameter[jacobian.parameter].append(jacobian)
        for jacobians in by_parameter.values():
            self._colour(jacobians)
        self.own = {t: frozenset(self._colours[id(u)] for u in vertex.jacobians) for t, vertex in vertices.items()}
        self.all: dict[int, frozenset[int]] = {}
        for t in sorted(vertices):
            parents = {s for stack in vertices[t].parents.values() for s in stack.vertices}
            self.all[t] = self.own[t].union(*(self.all[s] for s in parents))
        self.leaves = {t for t, vertex in vertices.items() if not vertex.parents and self._is_plain(vertex.jacobians)}
        self.columns: dict[int, dict[int, Tensor]] = defaultdict(dict)

    def keeps(self, t: int, s: int) -> bool:
        """Tell whether a parameter that enters t reaches s: K_ts is read when s is eliminated."""
        return not self.own[t].isdisjoint(self.all[s])

    def add_columns(self, s: int, level: int, columns: Tensor) -> None:
        """Add equal columns (R, m, m', width) of the curvature of a leaf with itself, in groups of m rows."""
        self.columns[s][level] = self.columns[s].get(level, 0) + columns

    def _is_plain(self, jacobians: Sequence[ParameterJacobian]) -> bool:
        apart = not any(self.share(u, v) for n, u in enumerate(jacobians) for v in jacobians[:n])
        return apart and all(is_by_column(u, u) for u in jacobians)

    def meet(self, t: int, r: int) -> bool:
        """Tell whether some entry reaches both vertices."""
        return not self.all[t].isdisjoint(self.all[r])

    def share(self, u: ParameterJacobian, v: ParameterJacobian) -> bool:
        """Tell whether two jacobians may have an entry in common."""
        return self._colours[id(u)] == self._colours[id(v)]

    def _colour(self, jacobians: list[ParameterJacobian]) -> None:
        for jacobian in jacobians:
            self._colours[id(jacobian)] = id(jacobian)
        for n, u in enumerate(jacobians):
            for v in jacobians[:n]:
                if not self.share(u, v) and overlap(u.at, v.at):
                    old, new = self._colours[id(u)], self._colours[id(v)]
                    for jacobian in jacobians:
                        if self._colours[id(jacobian)] == old:
                            self._colours[id(jacobian)] = new


def accumulate_diagonal(sweep: ForwardSweep, into: Entries) -> None:
    """Eliminate all vertices of a sweep, the last first, and add the diagonal of the Hessian of the parameters."""
    vertices, blocks, reach = sweep.vertices, sweep.blocks, Reach(sweep.vertices)
    for t in sorted(vertices, reverse=True):
        for r in [r for r in blocks.neighbours[t] if r >= t and not reach.own[t].isdisjoint(reach.own[r])]:
            for K in blocks.between(t, r).values():
                _add_entries(reach, into, vertices[t], vertices[r], K)
        for D in reach.columns.pop(t, {}).values():
            for u in vertices[t].jacobians:
                into.add(u.parameter, u.at, diagonal_by_column(u, u, D))
        back = Pullback(vertices, t, blocks, reach)
        for r in [r for r in blocks.neighbours[t] if r != t]:
            back.pair(r)
        if t in blocks.neighbours[t]:
            back.square(partial(reach.keeps, t))
        for r in [r for r in blocks.neighbours[t] if r >= t or not reach.keeps(t, r)]:
            blocks.drop(t, r)


def _add_entries(reach: Reach, into: Entries, t: Vertex, r: Vertex, K: Tensor) -> None:
    """Add the diagonal of E_t^T K_tr E_r."""
    for n, u in enumerate(t.jacobians):
        for m, v in enumerate(r.jacobians):
            if (t is r and m > n) or not reach.share(u, v):
                continue
            times = 1.0 if t is r and m == n else 2.0  # K and its transpose
            if t.width == r.width and is_by_column(u, v):
                at, values = u.at, diagonal_by_column(u, v, by_column(K, t.width))
            else:
                at, values = diagonal_of_entries(u, v, K.unflatten(2, (-1, r.width)).unflatten(1, (-1, t.width)))
            into.add(u.parameter, at, times * values)


def accumulation_work(sweep: ForwardSweep) -> float:
    """Return the multiply-adds of :func:`accumulate_diagonal` for a sweep that has run, from shapes."""
    vertices, blocks = sweep.vertices, sweep.blocks
    reach, total = Reach(vertices), 0.0
    neighbours: dict[int, dict[int, set[int]]] = {t: {} for t in vertices}
    for t, others in blocks.neighbours.items():
        neighbours[t].update({r: neighbours[r].get(t) or blocks.levels(t, r) for r in others})  # one set for both orders

    def chain_of(t: int, s: int, level: int, r: int, at: int, *, leaf: bool) -> None:
        """Count J K, for the tangents of t by a parent s and curvature of t and r; of a leaf, equal columns only."""
        nonlocal total
        x, fine = vertices[t], max(level, at)
        stack = x.parents[level]
        entrywise = isinstance(stack, EntrywiseTangents) and level == at
        if s not in stack.identities and not entrywise and not isinstance(stack, SelectedTangents):
            columns = vertices[s].columns(level) // (vertices[s].width if leaf else 1)
            total += float(x.rows(fine) * columns) * x.columns(fine) * vertices[r].columns(at)

    def keep(s: int, r: int, level: int) -> None:
        neighbours[r][s] = neighbours[s].setdefault(r, set())
        neighbours[s][r].add(level)

    def to_parent(t: int, s: int, level: int, r: int, at: int) -> None:
        leaf = s == r and s in reach.leaves
        chain_of(t, s, level, r, at, leaf=leaf)
        if not leaf:
            keep(s, r, min(level, at))

    for t in sorted(vertices, reverse=True):
        parents = [(level, s) for level, stack in vertices[t].parents.items() for s in stack.vertices]
        for r in [r for r in neighbours[t] if r != t]:
            for at in list(neighbours[t][r]):
                for level, s in parents:
                    if reach.meet(s, r):
                        to_parent(t, s, level, r, at)
        for at in list(neighbours[t].get(t, ())):
            for n, (level, s) in enumerate(parents):
                here = min(level, at)
                chain_of(t, s, level, t, at, leaf=False)
                if reach.keeps(t, s):
                    keep(t, s, here)
                for below, r in [one for one in parents[:n] if reach.meet(one[1], s)]:
                    to_parent(t, r, below, s, here)
                to_parent(t, s, level, s, here)
        for r in [r for r in neighbours[t] if r >= t or not reach.keeps(t, r)]:
            neighbours[t].pop(r)
            neighbours[r].pop(t, None)
    return total


def overlap(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two sets of positions of a parameter meet; None: all positions."""
    if a is None or b is None or a is b:
        return True
    if int(a.max()) < int(b.min()) or int(b.max()) < int(a.min()):
        return False
    return bool(torch.isin(a, b).any())
