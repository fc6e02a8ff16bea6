"""The exact Hessian of a traced scalar as one sum over its primitives.

    H = sum over primitives v of   J_v^T  [ lambda_v . D^2 phi_v ]  J_v

``adjoints`` sweeps back for lambda_v; :class:`Accumulator` sweeps forward, carrying J for every value that is still
needed and adding each primitive's term as it passes. No array of size (outputs x parameters x parameters) exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.sites import Lift, Site, find_site, pair
from hessiankit.trace import Application, Trace

Names: TypeAlias = "tuple[str, ...]"
WEIGHT = 1  # a site's weight or gain is its primitive's second input; the third, a bias, is additive


def adjoints(trace: Trace) -> dict[int, Tensor]:
    """Return the derivative of the trace's scalar output with respect to every moving value, by id."""
    out = trace.values[trace.output]
    found: dict[int, Tensor] = {trace.output: torch.ones_like(out)}
    for application in reversed(trace.applications):
        adjoint = found.get(application.output)
        if adjoint is None:
            continue
        inputs = trace.gather(application)
        pulled = application.primitive.vjp(inputs, adjoint.unsqueeze(0))  # type: ignore[arg-type]
        for at, covector in zip(application.inputs, pulled, strict=True):
            if at is not None and at in trace.moving and covector is not None:
                found[at] = found[at] + covector[0] if at in found else covector[0]
    return found


@dataclass
class Tangent:
    """J of one value: (S, *shape), by a site's perturbation row by row, or (site None) by parameter columns."""

    data: Tensor
    site: Site | None


@dataclass(frozen=True)
class Source:
    """A set of Hessian columns that move together: the parameters of one site, or one whole parameter."""

    site: Site | None
    names: Names


class BlockSum:
    """A symmetric matrix as a running sum of blocks between groups of parameters; half of it is kept."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[Names, Names, bool], Tensor] = {}

    def add(self, rows: Names, columns: Names, block: Tensor, *, mirrored: bool) -> None:
        """Add a block; ``mirrored`` says that its transpose belongs to the sum as well."""
        key = (rows, columns, mirrored)
        if key in self.blocks:
            self.blocks[key] += block
        else:
            self.blocks[key] = block.clone() if block._base is not None else block

    def add_product(self, rows: Names, columns: Names, a: Tensor, b: Tensor, *, mirrored: bool) -> None:
        """Add a @ b."""
        key = (rows, columns, mirrored)
        if key in self.blocks:
            self.blocks[key].addmm_(a, b)
        else:
            self.blocks[key] = a @ b

    def write(self, matrix: Tensor, slices: Mapping[str, slice]) -> None:
        """Add everything into the P x P matrix, releasing each block as it goes."""
        while self.blocks:
            (rows, columns, mirrored), block = self.blocks.popitem()
            start_i = 0
            for i in rows:
                n_i, start_j = slices[i].stop - slices[i].start, 0
                for j in columns:
                    n_j = slices[j].stop - slices[j].start
                    part = block[start_i : start_i + n_i, start_j : start_j + n_j]
                    matrix[slices[i], slices[j]] += part
                    if mirrored:
                        matrix[slices[j], slices[i]] += part.T
                    start_j += n_j
                start_i += n_i


class Accumulator:
    """Adds the terms of one traced scalar to a sum of Hessian blocks.

    Args:
        trace: A trace whose output is a scalar.
        total: The sum to add to.
        downstream_of: If given, only primitives fed by this value count: the Gauss-Newton part when it is the
            module's output.
    """

    def __init__(self, trace: Trace, total: BlockSum, downstream_of: int | None = None) -> None:
        self.trace, self.total = trace, total
        self.dtype = next((trace.values[at].dtype for at in trace.parameters.values()), None)  # of the blocks; values may be cast
        self.lambdas = adjoints(trace)
        self.counted = None if downstream_of is None else self._descendants(downstream_of)
        self.sources: list[Source] = []
        self.tangents: dict[int, dict[int, Tangent]] = defaultdict(dict)
        self.per_row: dict[tuple[int, int], Tensor] = {}  # curvature between two sites, row by row
        self.peak_bytes = 0
        self._find_sources()

    def run(self) -> None:
        """Sweep forward over all primitives and write the result into the Hessian."""
        last_use = {at: i for i, a in enumerate(self.trace.applications) for at in a.inputs if at is not None}
        for i, application in enumerate(self.trace.applications):
            if application.output in self.lambdas:
                self._visit(application)
            live = sum(t.data.numel() * t.data.element_size() for ts in self.tangents.values() for t in ts.values())
            self.peak_bytes = max(self.peak_bytes, 2 * live + sum(b.numel() * b.element_size() for b in self.per_row.values()))
            for at in {at for at in application.inputs if at is not None and last_use[at] == i}:
                self.tangents.pop(at, None)
        for (u, v), block in self.per_row.items():
            left, right = self.sources[u].site, self.sources[v].site
            assert left is not None
            assert right is not None
            self._add(u, v, pair(left, right, block))

    # Where parameters enter

    def _find_sources(self) -> None:
        trace = self.trace
        names = {at: name for name, at in trace.parameters.items()}
        sites: dict[int, Site] = {}
        self.accounted: dict[int, tuple[int, ...]] = {}
        whole: set[str] = set()
        uses: dict[int, int] = defaultdict(int)
        for application in trace.applications:
            for at in application.inputs:
                if at is not None:
                    uses[at] += 1
        for application in trace.applications:
            covered = find_site(trace, application, names, sites, uses)
            self.accounted[application.output] = covered
            whole |= {names[at] for k, at in enumerate(application.inputs) if at in names and k not in covered}
        self.site_source: dict[int, int] = {}
        for at, site in sites.items():
            self.site_source[at] = len(self.sources)
            self.sources.append(Source(site, tuple(lift.parameter for lift in site.lifts)))
        for name in trace.parameters:
            if name in whole:
                at = trace.parameters[name]
                value = trace.values[at]
                eye = torch.eye(value.numel(), dtype=value.dtype, device=value.device)
                self.tangents[at][len(self.sources)] = Tangent(eye.reshape(-1, *value.shape), None)
                self.sources.append(Source(None, (name,)))

    def _descendants(self, value: int) -> set[int]:
        reached = {value}
        for application in self.trace.applications:
            if any(at in reached for at in application.inputs):
                reached.add(application.output)
        return reached - {value}

    # One primitive

    def _visit(self, application: Application) -> None:
        primitive = application.primitive
        inputs = self.trace.gather(application)
        covered = self.accounted[application.output]
        found = [{} if at is None or k in covered else self.tangents.get(at, {}) for k, at in enumerate(application.inputs)]
        tangents = {s: [by.get(s) for by in found] for s in sorted({s for by in found for s in by})}
        settled: dict[int, tuple[list[Tensor | None], Site | None]] = {}
        if not primitive.is_linear and (self.counted is None or application.output in self.counted):
            anyone = [bool(by) for by in found]
            for s, ts in tangents.items():
                site = _site(ts)
                settled[s] = _settle(ts, site if site and self._stay_apart(application, inputs, site.axes, anyone) else None)
            self._accumulate(application, inputs, covered, settled)
        if application.output != self.trace.output:
            out = self.tangents[application.output]
            for s, ts in tangents.items():
                site = _site(ts)
                if site and primitive.rowwise(inputs, site.axes, [t is not None for t in ts]):  # type: ignore[arg-type]
                    moved, site = _settle(ts, site)
                elif s in settled and settled[s][1] is None:  # expanded already
                    moved, site = settled[s]
                else:
                    moved, site = _settle(ts, None)
                out[s] = Tangent(primitive.jvp(inputs, moved), site)  # type: ignore[arg-type]
            if application.output in self.site_source:
                source = self.site_source[application.output]
                out[source] = self._seed(source)

    def _stay_apart(self, application: Application, inputs: tuple[Tensor | None, ...], axes: int, moving: Sequence[bool]) -> bool:
        """Tell whether covectors of an application keep the rows of a site with so many axes.

        They go to every input that any source moves, hence ``moving`` is about all sources together; and to a weight of
        the application's own site, whose rows have to be the same.
        """
        own = self.sources[self.site_source[application.output]].site if application.output in self.site_source else None
        same = own is None or own.axes == axes
        return same and application.primitive.separable(inputs, axes, moving)  # type: ignore[arg-type]

    def _seed(self, s: int) -> Tangent:
        site = self.sources[s].site
        assert site is not None
        value = self.trace.values[site.value]
        eye = torch.eye(site.width, dtype=value.dtype, device=value.device)
        return Tangent(eye.reshape(site.width, *(1,) * site.axes, site.width).expand(site.width, *value.shape), site)

    def _accumulate(
        self,
        application: Application,
        inputs: tuple[Tensor | None, ...],
        covered: tuple[int, ...],
        settled: dict[int, tuple[list[Tensor | None], Site | None]],
    ) -> None:
        adjoint = self.lambdas[application.output]
        for s, (moved, site) in settled.items():
            covectors = application.primitive.curvature(inputs, adjoint, moved)  # type: ignore[arg-type]
            for u, (other, other_site) in settled.items():
                if u > s:
                    continue
                for t, w in zip(other, covectors, strict=True):
                    if t is not None and w is not None:
                        self._add_pair(u, t, other_site, s, w, site)
            if WEIGHT in covered and (mixed := covectors[WEIGHT]) is not None:
                self._add_direct(application, adjoint, s, moved, mixed, site)

    def _add_pair(self, u: int, t: Tensor, left: Site | None, s: int, w: Tensor, right: Site | None) -> None:
        """Add <t_u, w_s> for a tangent and a covector of one value, each in its own coordinates."""
        t, w = t.to(self.dtype), w.to(self.dtype)
        if left is not None and right is not None and left.axes != right.axes:
            if left.axes > right.axes:
                t, left = left.expand(t), None
            else:
                w, right = right.expand(w), None
        if left is None and right is None:
            a, b = t.reshape(t.shape[0], -1), w.reshape(w.shape[0], -1).T
            self.total.add_product(self.sources[u].names, self.sources[s].names, a, b, mirrored=u != s)
        elif left is not None and right is not None:
            block = _by_row(t, left.axes) @ _by_row(w, right.axes).mT  # (rows, d_left, d_right)
            self.per_row[u, s] = self.per_row[u, s] + block if (u, s) in self.per_row else block
        elif left is not None:
            self._add(u, s, left.reduce(_by_row(t, left.axes) @ _by_row(w, left.axes).mT))
        else:
            assert right is not None
            self._add(u, s, right.reduce(_by_row(w, right.axes) @ _by_row(t, right.axes).mT).T)

    def _add_direct(
        self, application: Application, adjoint: Tensor, s: int, moved: list[Tensor | None], covector: Tensor, site: Site | None
    ) -> None:
        """Add the mixed term between a site's own weight or gain and a source that moves the site's input."""
        at = application.inputs[WEIGHT]
        own_site = self.sources[self.site_source[application.output]].site
        assert own_site is not None
        name = next(n for n, value in self.trace.parameters.items() if value == at)
        own = Source(None, (name,))
        if site is None:
            self._add(own, s, covector.reshape(covector.shape[0], -1).T)
            return
        lift = next(lift for lift in own_site.lifts if lift.parameter == name)
        t = moved[0]
        assert t is not None
        if lift.order == "o":
            x, *rest = self.trace.gather(application)
            absent = [None] * len(rest)
            plain = application.primitive.jvp((x, *absent), (t, *absent))  # type: ignore[arg-type]
            self._add(own, s, site.reduce(_by_row(plain * adjoint, site.axes)).T)
            return
        rows = adjoint.reshape(-1, adjoint.shape[-1])  # (rows, d_out)
        self._add(own, s, torch.cat([_mixed(lift, rows, _by_row(t, site.axes), other) for other in site.lifts], 1))

    def _add(self, u: int | Source, s: int, block: Tensor) -> None:
        left = self.sources[u] if isinstance(u, int) else u
        self.total.add(left.names, self.sources[s].names, block, mirrored=u != s)


def _site(tangents: list[Tangent | None]) -> Site | None:
    """Return the site by whose perturbation all of one source's tangents are kept, or None if there is none."""
    sites = [t.site for t in tangents if t is not None]
    return sites[0] if all(site is not None for site in sites) else None


def _settle(tangents: list[Tangent | None], site: Site | None) -> tuple[list[Tensor | None], Site | None]:
    """Return one source's tangents by their site, or, if ``site`` is None, all of them by parameter."""
    if site is not None:
        return [None if t is None else t.data for t in tangents], site
    return [None if t is None else t.data if t.site is None else t.site.expand(t.data) for t in tangents], None


def _by_row(t: Tensor, axes: int) -> Tensor:
    """Turn (S, *rows, *rest) into (rows, S, f)."""
    return t.reshape(t.shape[0], t.shape[1 : 1 + axes].numel(), -1).transpose(0, 1)


def _mixed(lift: Lift, adjoint: Tensor, t: Tensor, other: Lift) -> Tensor:
    """Return d^2<adjoint, X W>/dW dtheta for X moved row by row, t (rows, p, d_in), by another site with lift ``other``.

    H[(i, o), (j, p)] = sum_n adjoint[n, o] t[n, p, i] a[n, j].
    """
    rows, p, d_in = t.shape
    if other.order == "o":
        moved = (t * other.weights.unsqueeze(-1)).reshape(rows, p * d_in)
        block = (adjoint.T @ moved).reshape(-1, p, d_in)  # (o, p, i)
        return (block.permute(2, 0, 1) if lift.order == "io" else block.permute(0, 2, 1)).reshape(-1, p)
    o, j = adjoint.shape[1], other.weights.shape[1]
    outer = (adjoint.unsqueeze(2) * other.weights.unsqueeze(1)).reshape(rows, o * j)
    block = (outer.T @ t.reshape(rows, p * d_in)).reshape(o, j, p, d_in)
    mine = (3, 0) if lift.order == "io" else (0, 3)
    theirs = (1, 2) if other.order == "io" else (2, 1)
    return block.permute(*mine, *theirs).reshape(o * d_in, j * p)
