"""Which places are swept together, over which part of the path, in which directions: decided from shapes.

Where every path to the loss passes through one value x (the residual stream), the curvature of the loss with respect to x,
and the mixed derivatives with respect to x and the parameters behind it, can be kept: places before x are then swept only to
x. Such a *cut* pays where x is small; :func:`sections` compares multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.jacobians import IdentityJacobian, ParameterJacobian, WeightJacobian, key
from hessiankit.engine.paths import PASS, Paths, Place, Reach
from hessiankit.engine.sweep import UnitColumns

WORK_SPACE, ON_AN_ACCELERATOR = 2**23, 2**26
"""Numbers that the values of one sweep may take, all directions together."""
JOINED = 2**20
"""Numbers of two sweeps below which they are made one: then it is calls that take the time."""
FEW = 2**21
"""Multiply-adds of a sum over rows that take less time than the calls of a sweep."""
KEPT = 2**25
"""Numbers that may be kept of what follows a cut."""


@dataclass(frozen=True)
class Directions:
    """Unit directions of one place: of one row in every group at once, or of the place's own parameter entries.

    Attributes:
        place: Where they begin.
        level: How many axes index the groups.
        outputs: Columns of the place, or entries of its parameters.
        jacobians: By which curvature along these directions goes back to the parameters.
        by_entry: Whether they are the directions of parameter entries.
    """

    place: Place
    level: int
    outputs: int
    jacobians: list[ParameterJacobian]
    by_entry: bool

    @property
    def groups(self) -> int:
        """How many groups of rows move at once."""
        return self.place.shape[: self.level].numel()

    @property
    def rows(self) -> int:
        """Rows of a group."""
        return 1 if self.by_entry else self.place.rows // self.groups

    def columns(self, start: int, stop: int, like: Tensor) -> UnitColumns:
        """Return :meth:`tangents` where all rows stay apart, as columns."""
        return UnitColumns(like.new_ones(()).expand(like.shape), start, stop)

    def tangents(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Return directions of outputs ``start`` to ``stop``: ((stop - start) rows, *shape of the place), rows first."""
        place, m, count = self.place, self.rows, stop - start
        if place.is_whole:
            return IdentityJacobian("", None, 0, like.numel()).columns(start, stop, like)
        if not self.by_entry:
            units = like.new_zeros(m, count, m, place.width)
            k = torch.arange(count, device=like.device)
            units[:, k, :, start + k] = torch.eye(m, dtype=like.dtype, device=like.device)
            one_group = units.reshape(m * count, *(1,) * self.level, *like.shape[self.level :])
            return one_group.expand(-1, *like.shape)
        parts = []
        for entries, u in zip(self.jacobians, place.jacobians, strict=True):
            assert isinstance(entries, IdentityJacobian)
            first, last = max(start, entries.start), min(stop, entries.start + entries.count)
            if first < last:
                parts.append(u.columns(first - entries.start, last - entries.start, like))
        return torch.cat(parts)


@dataclass(frozen=True)
class SweepPlan:
    """Directions that are swept together.

    Attributes:
        path: The steps that they move.
        directions: Of places, from the first to the last.
        numbers: That one direction takes on the path.
        by_pairs: Whether H is a sum over rows for each pair of parameters: all rows stay apart, and one moves in each direction.
        apart: Whether all rows stay apart.
    """

    path: list[Step]
    directions: list[Directions]
    numbers: int
    by_pairs: bool
    apart: bool = False

    @property
    def level(self) -> int:
        """Of the directions."""
        return self.directions[0].level

    @property
    def count(self) -> int:
        """How many directions there are."""
        return sum(d.outputs * d.rows for d in self.directions)

    def chunks(self, each: int, space: int) -> Iterator[list[tuple[Directions, int, int]]]:
        """Yield (directions, first output, last output) in chunks that fit the work space; a direction takes ``each`` numbers."""
        if len(self.directions) > 1:
            yield [(d, 0, d.outputs) for d in self.directions]
            return
        (d,) = self.directions
        step = max(1, space // max(1, each * d.rows))
        step = -(-d.outputs // -(-d.outputs // step))  # chunks of one size
        for start in range(0, d.outputs, step):
            yield [(d, start, min(d.outputs, start + step))]


@dataclass(frozen=True)
class Section:
    """Steps between two cuts, the places among them, and how these are swept.

    Attributes:
        steps: In order.
        places: In order.
        entry: The value at which the section begins, as a place without parameters; None for the first.
        end: Id of the value at which it ends.
        path: The steps by which its entry and its places reach its end; for curvature of places with themselves, its entry alone.
        level: How many axes of the values at both ends index rows that stay apart from its entry to the loss.
        kept: Numbers kept of what follows its end, 0 if nothing does.
        plans: Its sweeps, those of the last places first.
    """

    steps: list[Step]
    places: list[Place]
    entry: Place | None
    end: int
    path: list[Step] = field(default_factory=list)
    level: int = 0
    kept: int = 0
    plans: list[SweepPlan] = field(default_factory=list)


def work_space(paths: Paths) -> int:
    """Return the numbers that the values of one sweep may take."""
    return WORK_SPACE if paths.value(paths.output).device.type == "cpu" else ON_AN_ACCELERATOR


def sections(paths: Paths, *, cut: bool | None = None, alone: bool = False) -> list[Section]:
    """Return the sections of a path with their sweeps, from the last to the first.

    Args:
        paths: The trace.
        cut: Whether to cut wherever a single value passes; None: where it pays.
        alone: Whether only curvature of places with themselves is computed.
    """
    producers = {step.output: n for n, step in enumerate(paths.steps)}
    reads: dict[int, list[int]] = {}
    for n, step in enumerate(paths.steps):
        for at in step.inputs:
            if at is not None:
                reads.setdefault(at, []).append(n)
    born = {at: producers.get(at, by[0]) for at, by in reads.items()}
    where = {place.at: producers[place.at] if place.at in producers else born[place.at] for place in paths.places}
    crossing = [0] * (len(paths.steps) + 1)
    for at, by in reads.items():
        crossing[born[at]] += 1
        crossing[by[-1]] -= 1
    alive, cuts = 0, []
    for n, step in enumerate(paths.steps[:-1]):
        alive += crossing[n]
        if alive == 1 and step.output in reads:
            cuts.append(n)
    if cut is None:
        cuts = _worthwhile(paths, cuts, where, alone=alone)
    unplanned, end = list[Section](), len(paths.steps) - 1
    for n in [*(reversed(cuts) if cut is not False else ()), -1]:
        entry = None if n < 0 else Place(-1, paths.steps[n].output, paths.value(paths.steps[n].output).shape)
        places = [place for place in paths.places if n < where[place.at] <= end]
        unplanned.append(Section(paths.steps[n + 1 : end + 1], places, entry, paths.steps[end].output))
        end = n
    return _planned(paths, unplanned, alone=alone)


def _planned(paths: Paths, unplanned: Sequence[Section], *, alone: bool) -> list[Section]:
    """Return sections, the last first, with what follows each and the sweeps of their places."""
    planned, columns, level = list[Section](), dict[tuple[str, int], int](), 0
    for section in unplanned:
        columns |= {key(u): u.size for place in section.places for u in place.jacobians}
        begin = [] if section.entry is None else [section.entry.at]
        own = [] if alone and begin else [place.at for place in section.places]
        path, kept = paths.reach([*own, *begin], section.steps), 0
        follows = section.end != paths.output
        if follows:
            x = paths.value(section.end)
            level = min(level, *(paths.level(at, path) for at in (section.end, *begin)))
            kept = x.numel() * (x.shape[level:].numel() if alone else sum(columns.values()))
        section = replace(section, path=path, level=level, kept=kept)
        planned.append(replace(section, plans=sweeps(paths, section, alone=alone)))
        if section.entry is not None:
            fine = paths.level(section.entry.at, path)
            level = min(level, fine) if follows else fine
    return planned


def _worthwhile(paths: Paths, cuts: Sequence[int], where: dict[int, int], *, alone: bool) -> list[int]:
    """Return the cuts after which places before them take fewer multiply-adds than the cut itself.

    Without a cut at x, every column of the places before pushes and pulls through all that follows x. With it, unit directions of
    one row of x do that, and each column is multiplied once with the curvature that they leave at x.
    """
    chosen, end = list[int](), len(paths.steps)
    tail_work = 0.0  # of a direction, in the cut after this one
    pull_work = 0.0  # of a direction, to the parameters between the two
    columns, seen = 0, set[tuple[str, int]]()  # of the parameters that enter after the cut
    places = sorted(paths.places, key=lambda place: -where[place.at])
    passed = 0  # places after the cut
    columns_before = sum(min(place.size, place.shape[1:].numel()) for place in paths.places)
    entries = sum(place.size for place in paths.places)
    level = finest = max((paths.value(step.output).ndim for step in paths.steps), default=0)
    levels_before = list[int]()  # of all steps up to one: where rows meet, curvature after them is between all of these
    for step in paths.steps:
        finest = paths.level_below(finest, [step])
        levels_before.append(finest)
    works = [0.0, *accumulate(paths.work([step], alone=alone)[1] for step in paths.steps)]
    last_step = len(paths.steps)
    for n in reversed(cuts):
        x = paths.value(paths.steps[n].output)
        level = paths.level_below(min(level, max(x.ndim - 1, 0)), paths.steps[n + 1 : last_step])
        last_step = n + 1
        while passed < len(places) and where[places[passed].at] > n:
            place = places[passed]
            passed += 1
            columns_before -= min(place.size, place.shape[1:].numel())
            if not alone:
                pull_work += place.rows * place.size
                columns += sum(u.size for u in place.jacobians if key(u) not in seen)
                seen |= {key(u) for u in place.jacobians}
        row_axis = min(level, levels_before[n]) if alone else min(1, x.ndim - 1)
        row_size = x.shape[row_axis:].numel()
        rows = x.numel() // row_size
        work_after = works[end] - works[n + 1] + pull_work + tail_work
        cut_work = (x.numel() + PASS * rows) * (columns + row_size)
        if not alone and level == levels_before[n] == x.ndim - 1:  # sums over rows of each pair of parameters, without the matrix
            cut_work += PASS * rows * entries
        if alone:  # directions of the places before, if their rows are apart where those of x are
            columns_before = sum(min(place.size, place.shape[min(level, place.axes) :].numel()) for place in places[passed:])
        work_with = 3 * row_size * work_after + (columns_before + row_size * alone) * cut_work
        if x.numel() * max(columns, row_size) < KEPT and work_with < columns_before * work_after:
            chosen.append(n)
            end, tail_work, pull_work = n, float(cut_work), 0.0
    return chosen[::-1]


def sweeps(paths: Paths, section: Section, *, alone: bool = False) -> list[SweepPlan]:
    """Return the sweeps of the places of a section, those of the last first; ``alone``: of places with themselves only."""
    kept = section.kept
    plans: list[SweepPlan] = []
    reach = Reach(paths, section.steps, alone=alone)
    back, sizes, by_itself = 0.0, 0, False
    for place in reversed(section.places):
        if alone:
            reach.clear()
        reach.add(place.at)
        path, (numbers, work) = reach.path, reach.work
        level = reach.level(place.at) if place.axes else 0
        back, sizes = back + place.rows * place.size, sizes + place.size
        d = Directions(place, level, place.width, place.jacobians, place.is_whole)
        if place.axes:
            on = work + (place.rows * place.size if alone else back)
            shared = d.groups if level >= section.level else 1
            by_row = d.rows * place.width * (on + kept / shared)
            by_row += place.size * place.rows * (d.rows if alone else sizes + PASS * (kept > 0))
            if place.size * (on + kept) < by_row:
                starts = [sum(u.size for u in place.jacobians[:n]) for n in range(len(place.jacobians))]
                entries = [
                    IdentityJacobian(u.parameter, u.at, start, u.size) for u, start in zip(place.jacobians, starts, strict=True)
                ]
                d = Directions(place, 0, place.size, list(entries), True)
        alike = alone or all(r.rows == place.rows for r in section.places if r.order > place.order)
        by_pairs = not d.by_entry and d.level == place.axes > 0 and alike
        new = SweepPlan(path, [d], numbers, by_pairs, level == place.axes > 0)
        each = numbers + (0 if by_pairs else sizes * d.groups)
        last = plans[-1] if plans else None
        before, by_itself = by_itself, by_pairs and _has_equal_columns(place, section)
        small = last is not None and not before and not by_itself and (last.count + new.count) * each < JOINED
        if last is not None and small and not alone and (last.level, last.by_pairs) == (d.level, by_pairs):
            plans[-1] = replace(new, directions=[d, *last.directions])
        else:
            plans.append(new)
    return plans


def _has_equal_columns(place: Place, section: Section) -> bool:
    """Tell whether sums with a later weight are worth taking between equal columns alone, which a sweep by itself can see."""
    later = [r.mixed for r in section.places if r.order > place.order and isinstance(r.mixed, WeightJacobian)]
    return any(v.width == place.width and place.rows * place.size * v.size > FEW for v in later)
