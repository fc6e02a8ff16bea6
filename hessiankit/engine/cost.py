"""Cost of block rows, from shapes: the work of each path times its directions, plus the sums into the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.paths import Paths
from hessiankit.engine.sweep import TAIL_SIZE, work_space
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

PATH_PASSES = 8
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


def sweep_cost(paths: Paths, sections: Sequence[Section], *, is_diagonal: bool = False) -> SweepCost:
    """Return the cost of all rows of a trace in sections; ``is_diagonal``: of places with themselves only."""
    count = _Count(paths, is_diagonal=is_diagonal)
    for section in sections:
        count.section(section)
    resting = 2 * sum(paths.value(step.output).numel() for step in paths.steps)  # values, their adjoints and derivatives
    count.passes, count.operations = count.passes + 4.0 * resting, count.operations + STEP * len(paths.steps)
    count.peak += resting
    return count.total()


def section_cost(paths: Paths, section: Section, plan: SweepPlan | None = None, *, is_diagonal: bool = False) -> SweepCost:
    """Return the cost of the rows of one section, or of one sweep of it."""
    count = _Count(paths, is_diagonal=is_diagonal)
    count.section(section) if plan is None else count.plan(plan, section)
    return count.total()


class _Count:
    """Sums of the operations, calls and numbers of sweeps."""

    def __init__(self, paths: Paths, *, is_diagonal: bool) -> None:
        self.paths, self.is_diagonal = paths, is_diagonal
        self.multiplications = self.passes = 0.0
        self.operations = self.directions = self.peak = 0
        self.coupled = 0.0

    def section(self, section: Section) -> None:
        """Count the cost of a section: its cuts and its sweeps."""
        paths, x = self.paths, self.paths.value(section.end)
        arriving = 0 if self.is_diagonal else sum(place.rows * place.size for place in section.places)
        onward, follows = 0, section.end != paths.output
        if follows:
            group_size = x.shape[section.level :].numel()  # numbers that meet
            onward = x.numel() * (section.columns + group_size)
            self.through(section.path, group_size, arriving, onward, is_rowwise=section.level == x.ndim - 1)
        for plan in section.plans:
            self.plan(plan, section)
        if section.entry is not None:
            y, entry_level = paths.value(section.entry.at), paths.level(section.entry.at, section.path)
            group_size = y.shape[min(section.level, entry_level) if follows else entry_level :].numel()
            tail_numbers = y.numel() * (section.columns + group_size)
            self.through(
                section.path, y.shape[entry_level:].numel(), arriving + onward, tail_numbers, is_rowwise=entry_level == y.ndim - 1
            )

    def through(self, path: list[Step], directions: int, sums: int, tail_numbers: int, *, is_rowwise: bool) -> None:
        """Count the cost of a cut: directions over a section, the sums that each ends in, and the numbers kept."""
        work = self.paths.work(path)
        multiplications = directions * (work.multiplications + sums)
        passes = PATH_PASSES * directions * work.numbers + WRITES * tail_numbers
        operations = READ + STEP * len(path) + directions * work.calls
        self._add(multiplications, passes, operations, is_rowwise=is_rowwise)
        self.peak = max(self.peak, min(work_space(self.paths.device), 3 * directions * work.numbers) + 2 * tail_numbers)

    def plan(self, plan: SweepPlan, section: Section) -> None:
        """Count the cost of the directions of one sweep."""
        tail_numbers, columns = section.tail_numbers, section.columns
        count, first = plan.count, plan.directions[0].place
        targets = [r for r in section.places if (r is first if self.is_diagonal else r.order >= first.order)]
        size = sum(d.place.size for d in plan.directions)
        groups = plan.directions[0].groups
        ways = [(d.place, r) for d in plan.directions for r in targets if d.place.order <= r.order]
        numbers = 3 * plan.numbers + (0 if plan.by_pairs else groups * sum(place.size for place in section.places))
        space = work_space(self.paths.device)
        operations = plan.chunk_count(numbers, space) * (STEP * len(plan.path) // (1 + self.is_diagonal) + READ * len(targets))
        work = self.paths.work(plan.path, first.at if plan.by_pairs and len(plan.directions) == 1 else None)
        operations += count * work.calls
        if plan.by_pairs:
            sums = sum(t.rows * t.size * r.size for t, r in ways)
            entries = sum(t.size * r.size for t, r in ways)
            pair_numbers = sum(t.rows * t.width * r.width for t, r in ways)
            operations += 0 if self.is_diagonal else READ * sum(len(t.jacobians) * len(r.jacobians) for t, r in ways)
        else:
            sums, entries, pair_numbers = count * sum(r.rows * r.size for r in targets), 0, 0
        if tail_numbers or not plan.by_pairs:  # rows of all columns at once
            sums += sum(d.place.rows * d.place.size for d in plan.directions if not d.by_entry) * columns
            entries, pair_numbers = entries + size * columns, pair_numbers + count * groups * columns
            operations += 0 if self.is_diagonal else READ * sum(len(d.jacobians) for d in plan.directions)
        if self.is_diagonal:
            m = plan.directions[0].rows
            bend_inputs = [at for step in plan.path if step.bends for at in step.inputs if at is not None]
            sums = size * first.rows * m + (m > 1) * count * m * sum(self.paths.value(at).numel() for at in bend_inputs)
            entries = size
        sums += count * tail_numbers
        self.directions += count
        multiplications = count * (work.diagonal if self.is_diagonal else work.multiplications) + sums
        passes = PATH_PASSES * count * plan.numbers + 2 * pair_numbers + WRITES * entries
        self._add(multiplications, passes, operations, is_rowwise=plan.is_rowwise)
        self.peak = max(self.peak, min(max(space, numbers), count * numbers) + min(TAIL_SIZE, pair_numbers) + tail_numbers)

    def _add(self, multiplications: float, passes: float, operations: int, *, is_rowwise: bool) -> None:
        if not is_rowwise:
            self.coupled += multiplications / MATMUL + passes
        self.multiplications, self.passes = self.multiplications + multiplications, self.passes + passes
        self.operations += operations

    def total(self) -> SweepCost:
        """Return the sums."""
        return SweepCost(self.multiplications, self.passes, self.operations, self.peak, self.directions, self.coupled)
