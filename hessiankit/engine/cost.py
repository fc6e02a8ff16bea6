"""Cost of block rows, from shapes: the work of each path times its directions, plus the sums into the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.paths import Paths
from hessiankit.engine.sweep import KEPT, work_space
from hessiankit.engine.sweep_plans import Section, SweepPlan

CALL = 8_000
"""Passes over a number that take as long as one call of a small operation of torch, 3 to 4 microseconds.

This constant and those below are fitted to 140 sweeps of 18 models (``tests/engine/cut_models.py``), with cuts and without, on
one thread of an AMD EPYC in float64: :attr:`SweepCost.work` is 1.6e9 to 3.5e9 a second for nine sweeps of ten.
"""

MATMUL = 8
"""Multiply-adds of a product of matrices that take as long as a pass over a number."""

STEP = 8
"""Calls of torch that a step takes, pushed and pulled, half of them where it is only pushed."""

READ = 12
"""Calls of torch that read a result of a sweep: a covector at a place, a pair of Jacobians, rows of a parameter, a cut."""

TOUCHED = 8
"""Passes over a number of the path that a direction takes, pushed and pulled."""

WRITES = 6
"""Passes over an entry of a block for each sum that is added to it."""


@dataclass(frozen=True)
class SweepCost:
    """Cost of reading block rows.

    Attributes:
        multiplications: Multiply-adds of products and of sums over rows.
        passes: Numbers read or written.
        operations: Calls of torch.
        numbers: Numbers alive at once, beside the matrix.
        directions: Number of directions swept.
        coupled: Part of :attr:`work`, calls apart, of directions whose rows do not stay apart.
    """

    multiplications: float
    passes: float
    operations: int
    numbers: int
    directions: int
    coupled: float

    @property
    def work(self) -> float:
        """Total cost, in units of one pass over a number."""
        return self.operations * CALL + self.multiplications / MATMUL + self.passes


def sweep_cost(paths: Paths, sections: Sequence[Section], *, alone: bool = False) -> SweepCost:
    """Return the cost of all rows of a trace in sections; ``alone``: of places with themselves only."""
    count = _Count(paths, alone=alone)
    for section in sections:
        count.section(section)
    resting = 2 * sum(paths.value(step.output).numel() for step in paths.steps)  # values, their adjoints and derivatives
    count.passes, count.operations = count.passes + 4.0 * resting, count.operations + STEP * len(paths.steps)
    count.peak += resting
    return count.total()


def section_cost(paths: Paths, section: Section, *, alone: bool = False) -> SweepCost:
    """Return the cost of the rows of one section."""
    count = _Count(paths, alone=alone)
    count.section(section)
    return count.total()


def plan_cost(paths: Paths, plan: SweepPlan, section: Section, *, alone: bool = False) -> SweepCost:
    """Return the cost of one sweep of a section."""
    count = _Count(paths, alone=alone)
    count.plan(plan, section)
    return count.total()


class _Count:
    """Sums of what sweeps take."""

    def __init__(self, paths: Paths, *, alone: bool) -> None:
        self.paths, self.alone = paths, alone
        self.multiplications = self.passes = 0.0
        self.operations = self.directions = self.peak = 0
        self.coupled = 0.0

    def section(self, section: Section) -> None:
        """Count the cost of a section: its cuts and its sweeps."""
        paths, x = self.paths, self.paths.value(section.end)
        arriving = 0 if self.alone else sum(place.rows * place.size for place in section.places)
        onward, follows = 0, section.end != paths.output
        if follows:
            together = x.shape[section.level :].numel()  # numbers that meet
            onward = x.numel() * (section.columns + together)
            self.through(section.path, together, arriving, onward, apart=section.level == x.ndim - 1)
        for plan in section.plans:
            self.plan(plan, section)
        if section.entry is not None:
            y, fine = paths.value(section.entry.at), paths.level(section.entry.at, section.path)
            together = y.shape[min(section.level, fine) if follows else fine :].numel()
            kept = y.numel() * (section.columns + together)
            self.through(section.path, y.shape[fine:].numel(), arriving + onward, kept, apart=fine == y.ndim - 1)

    def through(self, path: list[Step], directions: int, sums: int, kept: int, *, apart: bool) -> None:
        """Count the cost of a cut: directions over a section, the sums that each ends in, and the numbers kept."""
        numbers = self.paths.numbers(path)
        multiplications = directions * (self.paths.multiplications(path) + sums)
        passes = TOUCHED * directions * numbers + WRITES * kept
        operations = READ + STEP * len(path) + directions * self.paths.calls(path)
        self._add(multiplications, passes, operations, apart=apart)
        self.peak = max(self.peak, min(work_space(self.paths.device), 3 * directions * numbers) + 2 * kept)

    def plan(self, plan: SweepPlan, section: Section) -> None:
        """Count what the directions of one sweep take."""
        kept, columns = section.kept, section.columns
        count, first = plan.count, plan.directions[0].place
        later = [r for r in section.places if (r is first if self.alone else r.order >= first.order)]
        size = sum(d.place.size for d in plan.directions)
        groups = plan.directions[0].groups
        ways = [(d.place, r) for d in plan.directions for r in later if d.place.order <= r.order]
        each = 3 * plan.numbers + (0 if plan.by_pairs else groups * columns)
        space = work_space(self.paths.device)
        operations = plan.chunk_count(each, space) * (STEP * len(plan.path) // (1 + self.alone) + READ * len(later))
        operations += count * self.paths.calls(plan.path)
        if plan.by_pairs:
            sums = sum(t.rows * t.size * r.size for t, r in ways)
            written = sum(t.size * r.size for t, r in ways)
            between = sum(t.rows * t.width * r.width for t, r in ways)
            operations += 0 if self.alone else READ * sum(len(t.jacobians) * len(r.jacobians) for t, r in ways)
        else:
            sums, written, between = count * sum(r.rows * r.size for r in later), 0, 0
        if kept or not plan.by_pairs:  # rows of all columns at once
            sums += sum(d.place.rows * d.place.size for d in plan.directions if not d.by_entry) * columns
            written, between = written + size * columns, between + count * groups * columns
            operations += 0 if self.alone else READ * sum(len(d.jacobians) for d in plan.directions)
        if self.alone:
            m = plan.directions[0].rows
            bending = [at for step in plan.path if step.bends for at in step.inputs if at is not None]
            sums = size * first.rows * m + (m > 1) * count * m * sum(self.paths.value(at).numel() for at in bending)
            written = size
        sums += count * kept
        self.directions += count
        columns_of = first.at if plan.by_pairs and len(plan.directions) == 1 else None
        multiplications = count * self.paths.multiplications(plan.path, alone=self.alone, columns_of=columns_of) + sums
        passes = TOUCHED * count * plan.numbers + 2 * between + WRITES * written
        self._add(multiplications, passes, operations, apart=plan.apart)
        self.peak = max(self.peak, min(max(space, each), count * each) + min(KEPT, between) + kept)

    def _add(self, multiplications: float, passes: float, operations: int, *, apart: bool) -> None:
        if not apart:
            self.coupled += multiplications / MATMUL + passes
        self.multiplications, self.passes = self.multiplications + multiplications, self.passes + passes
        self.operations += operations

    def total(self) -> SweepCost:
        """Return what was counted."""
        return SweepCost(self.multiplications, self.passes, self.operations, self.peak, self.directions, self.coupled)
