"""From curvature between sources to the diagonal of the Hessian, with what it needs and no more.

What :mod:`hessiankit.engine.unwinding` does for every entry.

Only entries (e, e) are wanted, so curvature between two sources counts only if some parameter reaches both. Of a source
that nothing but parameters moves, curvature between equal columns is enough (:mod:`hessiankit.engine.diagonal_lifts`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hessiankit.engine.columns import Source, chain, starts
from hessiankit.engine.diagonal_lifts import across, along, by_column, is_by_column, product_by_column
from hessiankit.engine.lifts import Lift
from hessiankit.engine.sweep import Sweep

WHOLE = 2**24  # entries that curvature between parameters taken whole may have


class Entries:
    """A vector with one entry for each entry of the parameters.

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
    """A sweep would take more parameters at once than curvature between all of their entries may have."""


class BoundedSweep(Sweep):
    """A sweep that stops where rows and samples meet, so that only parameters taken whole can go on, and these are many."""

    def _take_whole_parameters(self) -> None:
        trace = self.trace
        self._check(sum(trace.values[at].numel() for at in trace.parameters.values() if at in self.needed))
        super()._take_whole_parameters()

    def _by_roots(self, s: int) -> dict[int, Tensor]:
        self._check(sum(self._root_sizes(s).values()))
        return super()._by_roots(s)

    def _check(self, size: int) -> None:
        if size**2 > WHOLE:
            raise TooLarge


class Reach:
    """Which entries of parameters reach a source: by colours, one for lifts that share entries.

    Args:
        sources: By number; a source's parents have smaller numbers.
    """

    def __init__(self, sources: Mapping[int, Source]) -> None:
        self._colours: dict[int, int] = {}
        by_parameter: dict[str, list[Lift]] = defaultdict(list)
        for source in sources.values():
            for lift in source.lifts:
                by_parameter[lift.parameter].append(lift)
        for lifts in by_parameter.values():
            self._colour(lifts)
        self.own = {t: self._of(source.lifts) for t, source in sources.items()}
        self.all: dict[int, frozenset[int]] = {}
        for t in sorted(sources):
            parents = {s for stack in sources[t].parents.values() for s in stack.sources}
            self.all[t] = self.own[t].union(*(self.all[s] for s in parents))

    def meet(self, t: int, r: int) -> bool:
        """Tell whether some entry reaches both sources."""
        return not self.all[t].isdisjoint(self.all[r])

    def share(self, u: Lift, v: Lift) -> bool:
        """Tell whether two lifts may have an entry in common."""
        return self._colours[id(u)] == self._colours[id(v)]

    def _colour(self, lifts: list[Lift]) -> None:
        for lift in lifts:
            self._colours[id(lift)] = id(lift)
        for n, u in enumerate(lifts):
            for v in lifts[:n]:
                if not self.share(u, v) and overlap(u.at, v.at):
                    old, new = self._colours[id(u)], self._colours[id(v)]
                    for lift in lifts:
                        if self._colours[id(lift)] == old:
                            self._colours[id(lift)] = new

    def _of(self, lifts: Iterable[Lift]) -> frozenset[int]:
        return frozenset(self._colours[id(lift)] for lift in lifts)


def unwind_diagonal(sweep: Sweep, into: Entries) -> None:
    """Take the curvature of a sweep back to the parameters, and add the diagonal of their Hessian."""
    _Unwinding(sweep, into).run()


class _Unwinding:
    def __init__(self, sweep: Sweep, into: Entries) -> None:
        self.sources, self.blocks, self.into = sweep.sources, sweep.blocks, into
        self.reach = Reach(self.sources)
        self.leaves = {t for t, source in self.sources.items() if not source.parents and self._is_plain(source)}
        self.columns: dict[int, dict[int, Tensor]] = defaultdict(dict)  # of the leaves: curvature of equal columns, by level

    def _is_plain(self, source: Source) -> bool:
        """Tell whether curvature of equal columns is all that the lifts of a source read."""
        lifts = source.lifts
        apart = not any(self.reach.share(u, v) for n, u in enumerate(lifts) for v in lifts[:n])
        return apart and all(is_by_column(u, u) for u in lifts)

    def run(self) -> None:
        """Treat every source, the last first."""
        blocks, reach = self.blocks, self.reach
        for t in sorted(self.sources, reverse=True):
            source = self.sources[t]
            for r in [r for r in blocks.near[t] if r >= t and not reach.own[t].isdisjoint(reach.own[r])]:
                for level, K in blocks.between(t, r).items():
                    self._lift(t, r, level, K)
            for D in self.columns.pop(t, {}).values():
                for u in source.lifts:
                    self.into.add(u.parameter, u.at, along(u, u, D))
            for r in [r for r in blocks.near[t] if r != t]:
                for at, K in list(blocks.between(t, r).items()):
                    self._pull(t, r, at, K)
            if t in blocks.near[t]:
                for at, K in list(blocks.between(t, t).items()):
                    self._pull_square(t, at, K)
            for r in list(blocks.near[t]):
                if r >= t or reach.own[t].isdisjoint(reach.all[r]):
                    blocks.forget(t, r)

    def _pull(self, t: int, r: int, at: int, K: Tensor) -> None:
        """Take curvature between t and r to the parents of t."""
        for level, s, J in self._tangents(t, K):
            if not self.reach.meet(s, r):
                continue
            if s == r and s in self.leaves:
                self._add_columns(s, level, at, J, K, 2.0)
            else:
                self.blocks.add_half(s, r, min(level, at), _chain(J, level, K, at))

    def _pull_square(self, t: int, at: int, K: Tensor) -> None:
        """Take curvature of t with itself to its parents."""
        own, parts = self.reach.own[t], self._tangents(t, K)
        for n, (level, s, J) in enumerate(parts):
            X, here = _chain(J, level, K, at).mT, min(level, at)
            if not own.isdisjoint(self.reach.all[s]):
                self.blocks.add(t, s, here, X)
            for below, r, J_r in parts[:n]:
                if not self.reach.meet(r, s):
                    continue
                if r == s and s in self.leaves:
                    self._add_columns(s, below, here, J_r, X, 2.0)
                else:
                    self.blocks.add_half(r, s, min(below, here), _chain(J_r, below, X, here))
            if s in self.leaves:
                self._add_columns(s, level, here, J, X, 1.0)
            else:
                self.blocks.add(s, s, here, _chain(J, level, X, here))

    def _tangents(self, t: int, K: Tensor) -> list[tuple[int, int, Tensor | None]]:
        """Return (level, s, J^T) of each parent s of t, with J^T (R, columns of s, numbers of t a row), None for an identity."""
        source = self.sources[t]
        found: list[tuple[int, int, Tensor | None]] = []
        for level, stack in source.parents.items():
            for s, width, cut in zip(stack.sources, stack.widths, starts(stack.widths), strict=True):
                if s in stack.units:
                    found.append((level, s, None))
                    continue
                data = stack.data[cut].reshape(width, source.rows(level), -1)
                found.append((level, s, data.transpose(0, 1)))
        return found

    def _add_columns(self, s: int, level: int, at: int, J: Tensor | None, X: Tensor, times: float) -> None:
        """Add J X, curvature of a leaf with itself, of equal columns."""
        width, here = self.sources[s].width, min(level, at)
        if J is not None and level == at:
            D = product_by_column(J, X, width)
        else:
            D = by_column(_chain(J, level, X, at), width)
        found = self.columns[s]
        found[here] = found.get(here, 0) + times * D

    def _lift(self, t: int, r: int, level: int, K: Tensor) -> None:
        """Add what curvature between two sources gives the entries that reach both directly."""
        x, y = self.sources[t], self.sources[r]
        for n, u in enumerate(x.lifts):
            for m, v in enumerate(y.lifts):
                if (t == r and m > n) or not self.reach.share(u, v):
                    continue
                times = 1.0 if t == r and m == n else 2.0  # K and its transpose
                if x.width == y.width and is_by_column(u, v):
                    at, values = u.at, along(u, v, by_column(K, x.width))
                else:
                    split = K.unflatten(2, (-1, y.width)).unflatten(1, (-1, x.width))
                    at, values = across(u, v, split)
                self.into.add(u.parameter, at, times * values)


def unwinding_work(sweep: Sweep) -> float:
    """Return how many multiply-adds :func:`unwind_diagonal` will take for a sweep that has run, by shapes alone."""
    sources, blocks = sweep.sources, sweep.blocks
    plan = _Unwinding(sweep, Entries({}, torch.float32, torch.device("cpu")))
    reach, total = plan.reach, 0.0
    near: dict[int, dict[int, set[int]]] = {t: {} for t in sources}
    for t, others in blocks.near.items():
        near[t].update({r: near[r].get(t) or blocks.levels(t, r) for r in others})  # one set for both orders

    def chain_of(t: int, s: int, level: int, r: int, at: int, *, leaf: bool) -> None:
        """Count J K, for the tangents of t by a parent s and curvature of t and r; of a leaf, equal columns only."""
        nonlocal total
        x, fine = sources[t], max(level, at)
        if s not in x.parents[level].units:
            columns = sources[s].columns(level) // (sources[s].width if leaf else 1)
            total += float(x.rows(fine) * columns) * x.columns(fine) * sources[r].columns(at)

    def keep(s: int, r: int, level: int) -> None:
        near[r][s] = near[s].setdefault(r, set())
        near[s][r].add(level)

    def to_parent(t: int, s: int, level: int, r: int, at: int) -> None:
        leaf = s == r and s in plan.leaves
        chain_of(t, s, level, r, at, leaf=leaf)
        if not leaf:
            keep(s, r, min(level, at))

    for t in sorted(sources, reverse=True):
        parents = [(level, s) for level, stack in sources[t].parents.items() for s in stack.sources]
        for r in [r for r in near[t] if r != t]:
            for at in list(near[t][r]):
                for level, s in parents:
                    if reach.meet(s, r):
                        to_parent(t, s, level, r, at)
        for at in list(near[t].get(t, ())):
            for n, (level, s) in enumerate(parents):
                here = min(level, at)
                chain_of(t, s, level, t, at, leaf=False)
                if not reach.own[t].isdisjoint(reach.all[s]):
                    keep(t, s, here)
                for below, r in [one for one in parents[:n] if reach.meet(one[1], s)]:
                    to_parent(t, r, below, s, here)
                to_parent(t, s, level, s, here)
        for r in [r for r in near[t] if r >= t or reach.own[t].isdisjoint(reach.all[r])]:
            near[t].pop(r)
            near[r].pop(t, None)
    return total


def _chain(J: Tensor | None, level: int, K: Tensor, at: int) -> Tensor:
    return K if J is None else chain(J, level, K, at)


def overlap(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two sets of positions of a parameter meet; None stands for all of them."""
    if a is None or b is None or a is b:
        return True
    if int(a.max()) < int(b.min()) or int(b.max()) < int(a.min()):
        return False
    return bool(torch.isin(a, b).any())
