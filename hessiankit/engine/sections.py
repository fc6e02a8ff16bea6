"""Choice of the places that are swept together, of its part of the path and its directions, from shapes alone.

Where every path to the loss passes through one value x (the residual stream), the curvature of the loss with respect to x,
and the mixed derivatives with respect to x and the parameters behind it, can be kept: places before x are then swept only to
x. Such a *cut* pays where x is small. :func:`sections` compares the costs of the sweeps (:mod:`hessiankit.engine.cost`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf

from hessiankit.engine.cost import CALL, MATMUL, STEP, section_cost
from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.jacobians import IdentityJacobian, WeightJacobian, key
from hessiankit.engine.paths import Paths, Place, Reach
from hessiankit.engine.sweep import TAIL_SIZE
from hessiankit.engine.sweep_plans import Directions, Section, SweepPlan

JOIN_SIZE = 2**20
"""Numbers of two sweeps below which they are made one: then it is calls that take the time."""
PATIENCE = 8
"""Cuts that are left out after the best division before the search ends.

The models of ``tests/engine/cut_models.py`` get the cuts of a search to the end. A loop of 20 steps is planned in 0.6 of the
time.
"""
CHOICE = 80
"""Calls of torch per step below which a trace is swept whole: the choice takes as long as 30 to 150 of them."""


def sections(paths: Paths, cuts: Collection[int] | None = None, *, is_diagonal: bool = False) -> list[Section]:
    """Return the sections of a path with their sweeps, from the last to the first.

    Args:
        paths: The trace.
        cuts: Ids of values of :func:`stream` at which to cut; None: those with which the sweeps take least.
        is_diagonal: Whether only curvature of places with themselves is computed.
    """
    plan = _Division(paths, is_diagonal=is_diagonal)
    first, last = -1, len(paths.steps) - 1
    bounds = (
        plan.cheapest(first, last) if cuts is None else [first, *(n for n in plan.stream if paths.steps[n].output in cuts), last]
    )
    return [plan.section(start, stop) for start, stop in pairwise(bounds)][::-1]


def stream(paths: Paths) -> list[int]:
    """Return the ids of the values through which, as the only one, every path to the loss passes."""
    return [paths.steps[n].output for n in _Division(paths, is_diagonal=False).stream]


class _Division:
    """All sections into which a trace can be divided, between numbers of the steps before and at their end.

    Attributes:
        stream: Numbers of the steps after which all paths pass through one value.
    """

    def __init__(self, paths: Paths, *, is_diagonal: bool) -> None:
        self.paths, self.is_diagonal = paths, is_diagonal
        reads: dict[int, list[int]] = {}
        for n, step in enumerate(paths.steps):
            for at in step.inputs:
                if at is not None:
                    reads.setdefault(at, []).append(n)
        born = {at: readers[0] for at, readers in reads.items()} | {step.output: n for n, step in enumerate(paths.steps)}
        crossing = [0] * (len(paths.steps) + 1)
        for at, readers in reads.items():
            crossing[born[at]] += 1
            crossing[readers[-1]] -= 1
        widths = list(accumulate(crossing))
        self.stream = [n for n, step in enumerate(paths.steps[:-1]) if widths[n] == 1 and step.output in reads]
        self._numbered_places = [(born[place.at], place) for place in paths.places]
        self._sections: dict[tuple[int, int], Section] = {}
        self._works: dict[tuple[int, int], float] = {}

    @cached_property
    def _levels(self) -> dict[int, int]:
        """Axes of the value after a step of the stream that index rows which stay apart up to the loss."""
        levels, end = dict[int, int](), len(self.paths.steps) - 1
        for n in reversed(self.stream):
            at = self.paths.steps[n].output
            places = [place.at for k, place in self._numbered_places if n < k <= end and not self.is_diagonal]
            level = self.paths.level(at, self.paths.reach([at, *places], self.paths.steps[n + 1 : end + 1]))
            levels[n], end = min(level, levels.get(end, level)), n
        return levels

    def cheapest(self, first: int, last: int) -> list[int]:
        """Return the bounds of sections whose sweeps take least: cuts are left out one by one, the costliest first."""
        best, lowest_work = [first, last], self.work(first, last)
        if lowest_work < CHOICE * CALL * len(self.paths.steps):
            return best
        bounds = [first, *self._narrow(lowest_work), last]
        total = sum(self.work(a, b) for a, b in pairwise(bounds))
        while len(bounds) > 2 and len(best) - len(bounds) < PATIENCE:
            if total < lowest_work:
                best, lowest_work = list(bounds), total
            triples = zip(bounds, bounds[1:], bounds[2:], strict=False)
            losses = [self.work(a, b) + self.work(b, c) - self.work(a, c) for a, b, c in triples]
            total -= max(losses)
            del bounds[1 + losses.index(max(losses))]
        return best

    def _narrow(self, work: float) -> list[int]:
        """Return the cuts at the narrowest values around, where sums of the cut alone take less than the trace without cuts."""
        values = [self.paths.value(self.paths.steps[n].output) for n in self.stream]
        widths, narrow = [inf, *(x.numel() for x in values), inf], list[int]()
        for k, (n, x) in enumerate(zip(self.stream, values, strict=True)):
            group, columns = x.shape[self._levels[n] :].numel(), self._columns(n)  # entries of a group of rows
            is_small = x.numel() * max(columns, group) < TAIL_SIZE and group * x.numel() * (columns + group) < MATMUL * work
            is_new = widths[k] != widths[k + 1] or any(self.stream[k - 1] < at <= n for at, _ in self._numbered_places)
            if widths[k + 1] == min(widths[k : k + 3]) and is_small and is_new:
                narrow.append(n)
        return narrow

    def work(self, start: int, stop: int) -> float:
        """Return the cost of a section, in passes over a number, counted once."""
        if (start, stop) not in self._works:
            cost = section_cost(self.paths, self.section(start, stop), is_diagonal=self.is_diagonal)
            self._works[start, stop] = cost.work
        return self._works[start, stop]

    def section(self, start: int, stop: int) -> Section:
        """Return the steps after one number up to another as a section, built once."""
        if (start, stop) not in self._sections:
            self._sections[start, stop] = self._section(start, stop)
        return self._sections[start, stop]

    def _section(self, start: int, stop: int) -> Section:
        paths, steps = self.paths, self.paths.steps[start + 1 : stop + 1]
        places = [place for n, place in self._numbered_places if start < n <= stop]
        entry, end = None if start < 0 else self._entry(start), steps[-1].output
        begin = [entry] if entry else []
        path = paths.reach([place.at for place in (begin if self.is_diagonal and begin else [*places, *begin])], steps)
        columns = self._columns(start)
        level = tail_numbers = 0
        if end != paths.output:
            x = paths.value(end)
            level = min(self._levels[stop], *(paths.level(place.at, path) for place in (self._entry(stop), *begin)))
            tail_numbers = x.numel() * (x.shape[level:].numel() if self.is_diagonal else columns)
        section = Section(steps, places, entry, end, columns, path, level, tail_numbers)
        return replace(section, plans=sweeps(paths, section, is_diagonal=self.is_diagonal))

    def _entry(self, n: int) -> Place:
        at = self.paths.steps[n].output
        return Place(-1, at, self.paths.value(at).shape)

    def _columns(self, start: int) -> int:
        """Return the number of entries of the parameters that enter after a step."""
        places = [place for n, place in self._numbered_places if n > start and not self.is_diagonal]
        return sum({key(u): u.size for place in places for u in place.jacobians}.values())


def sweeps(paths: Paths, section: Section, *, is_diagonal: bool = False) -> list[SweepPlan]:
    """Return the sweeps of the places of a section, those of the last first; ``is_diagonal``: of places with themselves only."""
    plans: list[SweepPlan] = []
    reach = Reach(paths, section.steps, is_diagonal=is_diagonal)
    sizes, by_itself = 0, False
    for place in reversed(section.places):
        if is_diagonal:
            reach.clear()
        reach.add(place.at)
        path, numbers = reach.path, reach.numbers
        level = reach.level(place.at) if place.axes else 0
        sizes += place.size
        alike = is_diagonal or all(r.rows == place.rows for r in section.places if r.order > place.order)
        by_pairs = alike and level == place.axes > 0
        d = Directions(place, level, place.width, place.jacobians, place.is_whole)
        new = SweepPlan(path, [d], numbers, by_pairs, level == place.axes > 0)
        if place.axes and place.size < new.count:
            pairs = zip(place.jacobians, accumulate(u.size for u in place.jacobians), strict=True)
            entries = [IdentityJacobian(u.parameter, u.at, stop - u.size, u.size) for u, stop in pairs]
            by_entry = SweepPlan(path, [Directions(place, 0, place.size, list(entries), True)], numbers, False)
            new = min(new, by_entry, key=lambda plan: section_cost(paths, section, plan, is_diagonal=is_diagonal).work)
            (d,), by_pairs = new.directions, new.by_pairs
        space = numbers + (0 if by_pairs else sizes * d.groups)
        last = plans[-1] if plans else None
        was_by_itself, by_itself = by_itself, by_pairs and _has_equal_columns(place, section, path)
        small = last is not None and not was_by_itself and not by_itself and (last.count + new.count) * space < JOIN_SIZE
        if last is not None and small and not is_diagonal and (last.level, last.by_pairs) == (d.level, by_pairs):
            plans[-1] = replace(new, directions=[d, *last.directions])
        else:
            plans.append(new)
    return plans


def _has_equal_columns(place: Place, section: Section, path: Sequence[Step]) -> bool:
    """Tell whether sums with a later weight are worth taking between equal columns alone, which a separate sweep can exploit."""
    weights = [r.mixed for r in section.places if r.order > place.order and isinstance(r.mixed, WeightJacobian)]
    calls = CALL * MATMUL * STEP * len(path)  # multiply-adds that take as long as the calls of a sweep
    return any(v.width == place.width and place.rows * place.size * v.size > calls for v in weights)
