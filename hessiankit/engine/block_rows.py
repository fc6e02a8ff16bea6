"""Block rows: the Hessian from one sweep for each place (compressed differentiation by structural orthogonality).

With E_t the Jacobian of place t with respect to its parameters, and K_tr the curvature of the loss between places t and r,

    H[parameters of t, parameters of r] = E_t^T K_tr E_r      (+ <adjoint_r, dW_r dx_r>, where x_r moves with t).

The operations that a place reaches keep rows separate at some level, so the unit directions of one row can be pushed through
all groups of rows at once. Pushed to the loss and pulled back, they give K_tr at each later place r. Multiplied by E_r^T and
E_t^T it is a block of A, where H = A + A^T: A has each pair of places once, and half of each place's block with itself.
Shared parameters and the order of the places need no special cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.jacobians import ParameterJacobian, key
from hessiankit.engine.matrix_rows import Columns, MatrixRows
from hessiankit.engine.paths import Paths, Place
from hessiankit.engine.sweep import TAIL_SIZE, InputTangents, Tangents, UnitColumns, dense, pull, push, reads, work_space
from hessiankit.engine.sweep_plans import Directions, Section, SweepPlan

TILE = 2**18
"""Numbers of rows that are made and added to the matrix at a time: they stay in a cache of the second level."""


class PairSums:
    """Curvature between places that keep all rows apart: collected over outputs, then summed over rows for pairs of parameters.

    Args:
        matrix: Matrix that the sums are added to.
    """

    def __init__(self, matrix: MatrixRows) -> None:
        self.matrix = matrix
        self._parts: dict[tuple[int, int], list[tuple[Directions, int, int, ParameterJacobian, Tensor]]] = {}
        self._numbers = 0

    def add(self, d: Directions, start: int, stop: int, v: ParameterJacobian, K: Tensor) -> None:
        """Add curvature K (p, R, q) between outputs ``start`` to ``stop`` of a place and a later one, or itself."""
        parts = self._parts.setdefault((id(d), id(v)), [])
        if parts and self._numbers + K.numel() > TAIL_SIZE:
            self.close()
            parts = self._parts.setdefault((id(d), id(v)), [])
        parts.append((d, start, stop, v, K))
        self._numbers += K.numel()

    def close(self) -> None:
        """Add the collected sums to the matrix."""
        for parts in self._parts.values():
            d, start, _, v, K = parts[0]
            K = (K if len(parts) == 1 else torch.cat([part[4] for part in parts])).transpose(0, 1)  # (R, p, q)
            self._close(d, (start, parts[-1][2]), v, K)
        self._parts, self._numbers = {}, 0

    def _close(self, d: Directions, outputs: tuple[int, int], v: ParameterJacobian, K: Tensor) -> None:
        (start, stop), width, add = outputs, K.shape[2], self.matrix.add_pair
        if not any(u is v for u in d.place.jacobians):
            for u in d.jacobians:
                add(u, outputs, v, (0, width), K, is_same_place=False)
            return
        for u in d.jacobians:  # of a place with itself half: of two Jacobians one order, of one the upper half
            if u is v:
                add(u, outputs, u, outputs, K[:, :, start:stop], is_same_place=True)
                if stop < width:
                    add(u, outputs, u, (stop, width), K[:, :, stop:], is_same_place=False)
                break
            add(u, outputs, v, (0, width), K, is_same_place=False)


@dataclass
class Tail:
    """The second derivatives of what follows a value x through which everything before it passes.

    Attributes:
        at: Id of x.
        level: Number of axes of x that index rows that stay apart behind it: G groups of S numbers.
        K: (G, S, S), the second derivative of the loss with respect to x.
        Z: (G, S, columns), the derivative with respect to x of the gradient of the parameters behind x.
        columns: Columns of Z.
    """

    at: int
    level: int
    K: Tensor
    Z: Tensor
    columns: Columns


class BlockRows:
    """The rows of A, where the Hessian of a trace is A + A^T.

    Args:
        paths: The trace.
        sections: Sections of the trace, from :func:`hessiankit.engine.sections.sections`.
    """

    def __init__(self, paths: Paths, sections: Sequence[Section]) -> None:
        self.paths, self.sections = paths, sections

    def read(self, matrix: MatrixRows) -> None:
        """Add all rows to a matrix, those of the last place first, as summands: entries are complete when all are added."""
        tail: Tail | None = None
        for section, earlier in zip(self.sections, [*(s.places for s in self.sections[1:]), []], strict=True):
            keys = {key(u) for place in section.places for u in place.jacobians}
            copies = [] if tail is None else [(k, tail.Z[:, :, tail.columns.slices[k]].clone()) for k in keys]
            entry_tail, tail = self.tails(section, tail, earlier)
            for k, Z in copies:  # of two places in this section each pair comes twice
                assert tail is not None
                half = tail.Z[:, :, tail.columns.slices[k]]
                half.add_(Z.reshape(half.shape)).mul_(0.5)
            for plan in section.plans:
                first = plan.directions[0].place.order
                names = {u.parameter for d in plan.directions for u in d.place.jacobians}
                column_names = {name for name, _ in (tail.columns.slices if tail else ())}
                column_names |= {u.parameter for place in section.places if place.order >= first for u in place.jacobians}
                if not any(matrix.wants(i, j) for i in names for j in column_names):
                    continue
                columns = tail.columns if tail else self._columns([p for p in section.places if p.order >= first])
                numbers = 3 * plan.numbers + (0 if plan.by_pairs else plan.directions[0].groups * _last_column(section, columns))
                pairs = PairSums(matrix)
                for chunk in plan.chunks(numbers, work_space(self.paths.device)):
                    self._read_directions(section, plan, chunk, columns, tail, matrix, pairs)
                pairs.close()
                matrix.finish()
            tail = entry_tail

    def _columns(self, places: Sequence[Place], base: Columns | None = None) -> Columns:
        return Columns([u for place in places for u in place.jacobians], base)

    def tails(
        self, section: Section, tail: Tail | None, earlier: Sequence[Place], *, is_diagonal: bool = False
    ) -> tuple[Tail | None, Tail | None]:
        """Return the tail of a section's input, with room for the columns of places earlier than it, and that of its end."""
        to_entry = None
        if tail is not None:
            tail, to_entry = self._through(section, tail, is_diagonal=is_diagonal)
        return None if section.entry is None else self._enter(section, tail, to_entry, earlier, is_diagonal=is_diagonal), tail

    def sweep(
        self,
        section: Section,
        path: list[Step],
        arrive: Callable[[Place, Tangents, bool], None],
        *,
        seeds: Mapping[int, Tangents] | None = None,
        bars: dict[int, Tensor] | None = None,
        read_end: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Push directions to the end of a section and pull them back; ``arrive(place, covector, is_mixed)``."""
        places, entry = self.paths.by_value, section.entry
        input_tangents: InputTangents = {}
        if seeds:
            mixed = [(places[step.output], at) for step in path if step.output in places and (at := step.inputs[0]) is not None]
            mixed = [(place, at) for place, at in mixed if place.mixed is not None]
            end = () if read_end is None or section.end == self.paths.output else (section.end,)
            tangents = dict(seeds)
            input_tangents = push(path, tangents, *reads(path, {*end, *(at for _, at in mixed)}))
            if read_end is not None and end:
                read_end(dense(tangents[section.end]))
            for place, at in reversed(mixed):
                if at in tangents:
                    arrive(place, tangents[at] if place.plain is None else place.plain.push([dense(tangents[at])]), True)
        stops = places.keys() if entry is None else places.keys() | {entry.at}

        def arrived(at: int, bar: Tensor) -> None:
            arrive(entry if entry is not None and at == entry.at else places[at], bar, False)

        pull(path, dict(bars or {}), input_tangents, {}, stops, arrived)

    def _chunks(self, count: int, path: list[Step]) -> Iterator[slice]:
        """Yield directions of a path that are swept at once, of ``count`` in all."""
        step = max(1, work_space(self.paths.device) // max(1, 3 * self.paths.work(path).numbers))
        yield from (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _through(self, section: Section, tail: Tail, *, is_diagonal: bool) -> tuple[Tail, Tensor | None]:
        """Pull what follows a section back through it, to the columns of its own parameters.

        Returns:
            The tail, and K from x to the entry (G, S, .).
        """
        x, entry, level = self.paths.value(tail.at), section.entry, section.level
        groups, inner = x.shape[:level].numel(), x.shape[level : tail.level].numel()
        size = x.numel() // groups
        K, Z = tail.K, tail.Z.reshape(groups, size, -1)
        if inner > 1:  # rows of a group that were apart behind x
            row = size // inner
            K = K.new_zeros(groups, inner, row, inner, row)
            K.diagonal(dim1=1, dim2=3).copy_(tail.K.reshape(groups, inner, row, row).permute(0, 2, 3, 1))
            K = K.reshape(groups, size, size)
        to_entry: list[Tensor] = []
        bars = K.transpose(0, 1).reshape(size, *x.shape)
        for chunk in self._chunks(size, section.path):

            def arrive(place: Place, bar: Tangents, mixed: bool, chunk: slice = chunk) -> None:
                assert isinstance(bar, Tensor)
                if place is entry:
                    to_entry.append(bar.reshape(len(bar), groups, -1).transpose(0, 1))
                elif not is_diagonal:
                    for v, covectors in place.arriving(bar, groups, mixed=False):
                        v.add_vjp(covectors, Z.transpose(0, 1)[chunk, :, tail.columns.slices[key(v)]])

            self.sweep(section, section.path, arrive, bars={tail.at: bars[chunk]})
        return Tail(tail.at, level, K, Z, tail.columns), torch.cat(to_entry, 1) if to_entry else None

    def _enter(
        self, section: Section, tail: Tail | None, to_entry: Tensor | None, earlier: Sequence[Place], *, is_diagonal: bool
    ) -> Tail:
        """Return the tail of the value that enters a section."""
        entry, path = section.entry, section.path
        assert entry is not None
        y = self.paths.value(entry.at)
        entry_level = self.paths.level(entry.at, path)
        level = min(entry_level, tail.level) if tail else entry_level
        columns = tail.columns if tail else self._columns([] if is_diagonal else section.places)
        wider = self._columns([] if is_diagonal else earlier, columns)
        groups, count, inner = y.shape[:entry_level].numel(), y.shape[entry_level:].numel(), y.shape[level:entry_level].numel()
        first = wider.size - columns.size  # of the columns that are known; those of earlier places precede them
        Z, K = y.new_zeros(groups, count, wider.size), y.new_zeros(groups, count, inner * count)
        units = torch.eye(count, dtype=y.dtype, device=y.device).reshape(count, *(1,) * entry_level, *y.shape[entry_level:])
        for chunk in self._chunks(count, path):
            T: list[Tensor] = []

            def arrive(place: Place, bar: Tangents, mixed: bool, chunk: slice = chunk) -> None:
                assert isinstance(bar, Tensor)
                if place is entry:
                    rows = bar.reshape(len(bar), -1, inner, count).permute(1, 0, 3, 2)
                    into = K[:, chunk].unflatten(0, (-1, inner)).unflatten(3, (inner, -1))
                    into.diagonal(dim1=1, dim2=3).copy_(rows)
                elif not is_diagonal:
                    for v, covectors in place.arriving(bar, groups, mixed=mixed):
                        v.add_vjp(covectors, Z.transpose(0, 1)[chunk, :, wider.slices[key(v)]])

            self.sweep(section, path, arrive, seeds={entry.at: units[chunk].expand(-1, *y.shape)}, read_end=T.append)
            if tail is not None:
                combine(T[0], entry_level, tail.Z, Z[:, chunk, first:])
            if to_entry is not None:
                combine(T[0], entry_level, to_entry, K[:, chunk])
        G = y.shape[:level].numel()
        return Tail(entry.at, level, K.reshape(G, y.numel() // G, -1), Z.reshape(G, y.numel() // G, -1), wider)

    def _read_directions(
        self,
        section: Section,
        plan: SweepPlan,
        chunk: list[tuple[Directions, int, int]],
        columns: Columns,
        tail: Tail | None,
        matrix: MatrixRows,
        pairs: PairSums,
    ) -> None:
        """Add the rows of some directions to a matrix."""
        seeds: dict[int, Tangents] = {}
        spans: list[tuple[Directions, int, int, slice]] = []
        count, groups = sum(d.rows * (stop - start) for d, start, stop in chunk), plan.directions[0].groups
        for d, start, stop in chunk:
            value = self.paths.value(d.place.at)
            span = slice(first := spans[-1][3].stop if spans else 0, first + d.rows * (stop - start))
            spans.append((d, start, stop, span))
            if len(chunk) == 1:
                seeds[d.place.at] = d.columns(start, stop, value) if plan.by_pairs else d.tangents(start, stop, value)
            else:
                seeds[d.place.at] = among = value.new_zeros(count, *value.shape)
                among[span] = d.tangents(start, stop, value)
        Z = value.new_zeros(groups, count, 0 if plan.by_pairs else _last_column(section, columns))
        ends: list[Tensor] = []

        def arrive(place: Place, bar: Tangents, mixed: bool) -> None:
            earlier = [one for one in spans if one[0].place.order < place.order or (one[0].place is place and not mixed)]
            if not earlier or place is section.entry:
                return
            span_of_place = earlier[-1] if earlier[-1][0].place is place else None
            last = earlier[-1][3].stop
            if isinstance(bar, UnitColumns):
                if place.mixed is not None and chunk[0][0].place.order < place.order:
                    for u in chunk[0][0].jacobians:
                        matrix.add_columns(u, (bar.start, bar.stop), place.mixed, bar.diagonal.reshape(-1, len(bar)))
                return
            if plan.by_pairs:
                for v, K in place.arriving(bar[:last], groups, mixed=mixed):
                    for d, start, stop, span in earlier:
                        pairs.add(d, start, stop, v, K[span, :, 0])
                return
            if span_of_place is not None:  # half of a place with itself
                bar = bar[:last].clone()
                bar[span_of_place[3]] *= 0.5
            for v, K in place.arriving(bar[:last], groups, mixed=mixed):
                v.add_vjp(K, Z.transpose(0, 1)[:last, :, columns.slices[key(v)]])

        self.sweep(section, plan.path, arrive, seeds=seeds, read_end=ends.append)
        width = Z.shape[2] if tail is None else columns.size
        step = max(1, width if tail is None else TILE // (groups * count))
        for first in range(0, width, step):  # the columns of a tile stay in a cache
            last = min(first + step, width)
            part = Z[:, :, first:last]
            if tail is not None:
                part, summand = combine(ends[0], plan.level, tail.Z[:, :, first:last]), part
                part[:, :, : summand.shape[2]] += summand
            pieces = columns.pieces_between(first, last)
            for d, start, stop, span in spans:
                for u in d.jacobians:
                    matrix.add_rows(u, start, stop, part[:, span].reshape(-1, stop - start, last - first), pieces)


def _last_column(section: Section, columns: Columns) -> int:
    """Return the end of the columns of a section's own places, 0 where there are none."""
    return max((columns.slices[key(u)].stop for p in section.places for u in p.jacobians if key(u) in columns.slices), default=0)


def combine(T: Tensor, level: int, Z: Tensor, into: Tensor | None = None) -> Tensor:
    """Return T^T Z (groups, S, columns) for directions T (S, *shape) that do not mix the first ``level`` axes.

    With ``into``, add it there.
    """
    count, groups = len(T), T.shape[1 : 1 + level].numel()
    left, right = T.reshape(count, groups, -1).transpose(0, 1), Z.reshape(groups, T[0].numel() // groups, -1)
    return torch.bmm(left, right) if into is None else into.baddbmm_(left, right)
