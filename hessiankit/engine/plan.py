"""A computation recorded once as a list of operations, and run again on other values: the plan of a Hessian.

Reverse Hessian accumulation decides by structure alone: which values are vertices, in which order they are eliminated, how each
product is bracketed. What it runs, ``aten`` operations and compiled sums, is recorded (:mod:`hessiankit.engine.recorder`); a plan
keeps of that what computes the result: views are made once, what depends on no input is computed once, and all other
intermediates lie in one work space, where memory is used again as soon as its last reader has run.

A number that Python reads on the way (how many labels count, say) is a *guard*: the plan is for that answer, and raises
:class:`GuardError` where another comes out.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hessiankit.engine.block_terms import BlockTerms
from hessiankit.engine.kernel_calls import BoundProduct, BoundSum, KernelSum
from hessiankit.engine.problem.task import gib
from hessiankit.engine.recorder import Note, PlanError, PlannedStep, Recorder, TensorSpec, storage_key
from hessiankit.engine.repeats import UNINITIALISED, without_repeats
from hessiankit.engine.replay import GuardError, Step, TorchCall, calls, into
from hessiankit.support.errors import InputError
from hessiankit.support.tables import Piece, Printed, table

ALIGNMENT = 64  # bytes, at a multiple of which every intermediate starts


@dataclass
class _Memory:
    """One storage: what is known of it while a plan is made."""

    bytes: int
    varies: bool  # whether it depends on inputs, or is written more than once
    writes: int = 0
    first: int = -1
    last: int = -1
    place: int = 0


@dataclass(repr=False)
class ExecutionPlan(Printed):
    """Operations in order, on memory of their own.

    Attributes:
        steps: What is run.
        workspace_bytes: Of all intermediates together, memory used again.
        constant_bytes: Of what depends on no input, computed once.
        recorded: How many operations were recorded.
    """

    steps: tuple[PlannedStep, ...]
    workspace_bytes: int
    constant_bytes: int
    recorded: int
    _calls: list[Callable[[], Any]] = field(default_factory=list, repr=False)
    _outputs: list[tuple[Tensor, TensorSpec]] = field(default_factory=list, repr=False)
    _zeroed: list[Tensor] = field(default_factory=list, repr=False)
    _sums: list[Any] = field(default_factory=list, repr=False)
    _values: list[Tensor] = field(default_factory=list, repr=False)
    _terms: Callable[[str, str], BlockTerms] | None = field(default=None, repr=False)

    def run(self, output: Tensor) -> list[float]:
        """Run all operations on the present values of the inputs, and write the result over ``output``.

        Args:
            output: Of the shape, strides and dtype of the output that was recorded.

        Returns:
            The numbers that were asked for when the plan was made.

        Raises:
            GuardError: A decision comes out otherwise.
        """
        storage, start = output.untyped_storage(), output.storage_offset()
        for view, recorded in self._outputs:
            view.set_(storage, start + recorded.offset, recorded.shape, recorded.strides)
        for part in self._zeroed:
            part.zero_()
        for call in self._calls:
            call()
        return [float(x) for x in self._values]

    @property
    def skew(self) -> float:
        """The largest of what the compiled sums have found: how far from symmetric curvature was before it was averaged."""
        return max((bound.skew for bound in self._sums), default=0.0)

    def explain(self, i: str, j: str) -> BlockTerms:
        """Return the terms of the block (i, j) of the Hessian: whose second derivative, between which Jacobians.

        Args:
            i: A parameter, or the end of its name if no other parameter's ends so.
            j: The same, for the columns.

        Raises:
            InputError: A name is not known, or the plan is not that of a Hessian.
        """
        if self._terms is None:
            raise InputError("explain: this plan is not that of a Hessian; make one with hessiankit.hessian_function")
        return self._terms(i, j)

    def counts(self) -> Counter[str]:
        """Return how often each operation is run."""
        return Counter(step.name for step in self.steps)

    def _headline(self) -> str:
        return (
            f"{len(self.steps)} operations of {self.recorded} recorded, work space {gib(self.workspace_bytes)}, "
            f"constants {gib(self.constant_bytes)}"
        )

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        rows = []
        for name, count in self.counts().most_common():
            steps = [step for step in self.steps if step.name == name]
            products = sum(step.multiplications for step in steps)
            rows.append((name, str(count), gib(sum(step.bytes for step in steps)), f"{products:.3g}" if products else ""))
        yield table(("operation", "times", "bytes read and written", "multiplications"), rows, left=1)


def make_plan(
    record: Recorder,
    inputs: Iterable[Tensor],
    output: Tensor,
    values: Sequence[Tensor],
    bytes_allowed: int = 2**63,
    rows: Sequence[slice] = (),
) -> ExecutionPlan:
    """Make a plan of what was recorded.

    Args:
        record: Of the inputs and the output.
        inputs: The tensors that may have other entries when the plan is run.
        output: What results are added to, zero at first; when the plan is run another tensor takes its place.
        values: Scalars among the results that are returned as numbers.
        bytes_allowed: Of intermediates.
        rows: Of each parameter, where the output is P x P and only its blocks (i, j) with i not after j are wanted.

    Raises:
        PlanError: An operation writes into an input, Python reads a number that is no integer, or memory is short.

    >>> from hessiankit.engine.recorder import recording
    >>> x, total = torch.tensor([1.0, 2.0]), torch.zeros(2)
    >>> with recording([x, total]) as record:
    ...     _ = total.add_(x * x)
    >>> plan, x[0], result = make_plan(record, [x], total, []), 3.0, torch.empty(2)
    >>> _ = plan.run(result)
    >>> result.tolist(), [step.name for step in plan.steps]
    ([9.0, 4.0], ['mul', 'add_'])
    """
    return _Maker(record, inputs, output, values, rows).plan(bytes_allowed)


class _Maker:
    def __init__(
        self, record: Recorder, inputs: Iterable[Tensor], output: Tensor, values: Sequence[Tensor], rows: Sequence[slice]
    ) -> None:
        self.recorded, self.kept, self.output, self.rows = len(record.notes), record.kept, output, rows
        self.whole = record.spec(output)
        self.given = {storage_key(x) for x in inputs}
        self.result = storage_key(output)
        self.notes, same = without_repeats(record.notes, [self.result])
        self.values = [replace(x, storage=same.get(x.storage, x.storage)) for x in map(record.spec, values)]
        self.memory: dict[int, _Memory] = {}
        self.made: set[int] = set()  # storages that an operation has made
        self.moved: dict[TensorSpec, Tensor] = {}

    def plan(self, bytes_allowed: int) -> ExecutionPlan:
        reads, writes = self._flow()
        kept = self._needed(reads, writes)
        workspace = self._place(kept, reads, writes)
        if workspace > bytes_allowed:
            raise PlanError(f"intermediates take {workspace / 2**30:.1f} GiB, more memory than a plan is worth")
        self.arena = torch.empty(workspace, dtype=torch.uint8, device=self.output.device)
        constants = sum(m.bytes for key, m in self.memory.items() if key in self.made and not m.varies)
        plan = ExecutionPlan((), workspace, constants, self.recorded)
        plan._zeroed = [self._tensor(part) for part in self._zeroed(kept)]
        notes = [self.notes[n] for n in kept if self.notes[n].name not in UNINITIALISED]
        plan.steps = tuple(note.planned(self.result) for note in notes)
        steps = [self._step(note) for note in notes]
        plan._calls = calls(steps)
        plan._sums = [step for step in steps if isinstance(step, BoundSum)]
        plan._values = [self._tensor(x) for x in self.values]
        plan._outputs = [(moved, spec) for spec, moved in self.moved.items() if spec.storage == self.result]
        return plan

    # What is computed from what

    def _flow(self) -> tuple[list[set[int]], list[set[int]]]:
        """Return the storages that each operation reads and writes; find out which of them vary."""
        reads, writes = [], []
        for note in self.notes:
            read, mutated, after = note.read(), note.written(), note.returned()
            for x in (*read, *after):
                if x.storage not in self.memory:
                    varies = x.storage in self.given or x.storage == self.result
                    self.memory[x.storage] = _Memory(x.storage_bytes, varies)
            new = {x.storage for x in after} - {x.storage for x in read}
            self.made |= new
            changed = new | {x.storage for x in mutated}
            if changed & self.given:
                raise PlanError(f"{note.name} writes into an input")
            for key in changed:
                self.memory[key].writes += 1
            reads.append({x.storage for x in read})
            writes.append(changed)
        for key, memory in self.memory.items():
            memory.varies |= key in self.made and memory.writes > 1
        moving = True
        while moving:
            moving = False
            for before, changed in zip(reads, writes, strict=True):
                if any(self.memory[key].varies for key in before):
                    for key in changed:
                        moving |= not self.memory[key].varies
                        self.memory[key].varies = True
        return reads, writes

    def _needed(self, reads: list[set[int]], writes: list[set[int]]) -> list[int]:
        """Return the operations that the result, the values and the guards need, and that have to be run each time."""
        live, kept = {self.result, *(x.storage for x in self.values)}, []
        for n in reversed(range(len(self.notes))):
            varying = {key for key in reads[n] if self.memory[key].varies}
            is_guard = not self.notes[n].returned() and not writes[n] and bool(varying)
            if (is_guard and self._is_value(self.notes[n])) or _is_idle(self.notes[n]):
                continue
            if is_guard or any(key in live and self.memory[key].varies for key in writes[n]):
                kept.append(n)
                live |= varying
        return kept[::-1]

    def _is_value(self, note: Note) -> bool:
        return any(x in self.values for x in note.read())

    # Where it is kept

    def _place(self, kept: list[int], reads: list[set[int]], writes: list[set[int]]) -> int:
        """Give every intermediate a place in the work space, used again after its last reader; return the space needed."""
        for n in kept:
            for key in reads[n] | writes[n]:
                memory = self.memory[key]
                memory.first = n if memory.first < 0 else memory.first
                memory.last = n
        for x in self.values:
            self.memory[x.storage].last = len(self.notes)
        starting = sorted((m.first, -m.bytes, key) for key, m in self.memory.items() if m.first >= 0 and self._is_scratch(key))
        free: list[tuple[int, int]] = []  # (place, bytes), by place
        ending: list[tuple[int, int, int]] = []  # (last, place, bytes)
        top = 0
        for first, _, key in starting:
            memory = self.memory[key]
            size = -(-max(memory.bytes, 1) // ALIGNMENT) * ALIGNMENT
            for over in [e for e in ending if e[0] < first]:
                ending.remove(over)
                free = _merged([*free, over[1:]])
            fitting = min((hole for hole in free if hole[1] >= size), key=operator.itemgetter(1), default=None)
            if fitting is not None:
                free.remove(fitting)
                memory.place = fitting[0]
                if fitting[1] > size:
                    free.append((fitting[0] + size, fitting[1] - size))
            else:
                memory.place, top = top, top + size
            ending.append((memory.last, memory.place, size))
        return top

    def _is_scratch(self, key: int) -> bool:
        return key in self.made and self.memory[key].varies and key != self.result and key not in self.given

    def _tensor(self, x: Any) -> Any:
        """Return what takes the place of a recorded tensor: in the work space, in the output to come, or on its own memory."""
        if not isinstance(x, TensorSpec):
            return x
        if x not in self.moved:
            scratch = self._is_scratch(x.storage)
            storage = self.arena.untyped_storage() if scratch else self.kept[x.storage]
            self.moved[x] = x.on(storage, self.memory[x.storage].place if scratch else 0)
        return self.moved[x]

    # What of the result is zero at first

    def _zeroed(self, kept: Sequence[int]) -> list[TensorSpec]:
        """Let compiled sums that are the first to reach a block of the result write over it; return what else there is of it."""
        reached: set[tuple[int, int]] = set()
        covered: set[tuple[int, int]] = set()
        first: list[int] = []
        for n in kept if self.rows else ():
            note = self.notes[n]
            for x in dict.fromkeys(x for x in (*note.read(), *note.written()) if x.storage == self.result):
                found = self._blocks(x)
                if found is None:
                    return [self.whole]
                blocks, whole = found
                is_sum = bool(note.args) and isinstance(note.args[0], KernelSum) and note.args[0].covers
                if is_sum and whole and reached.isdisjoint(blocks):
                    first.append(n)
                    covered |= blocks
                reached |= blocks
        for n in first:
            note = self.notes[n]
            self.notes[n] = replace(note, args=(replace(note.args[0], over=True),))
        return self._uncovered(covered)

    def _blocks(self, x: TensorSpec) -> tuple[set[tuple[int, int]], bool] | None:
        """Return the blocks that a part of the result lies in, and whether it is all of them; None if it lies in several rows."""
        width = self.whole.strides[0]
        top, left = divmod(x.offset - self.whole.offset, width)
        steps = [divmod(stride, width) for stride in x.strides]
        bottom, right = (
            first + 1 + sum((size - 1) * step[k] for size, step in zip(x.shape, steps, strict=True))
            for k, first in enumerate((top, left))
        )
        starts = [rows.start for rows in self.rows]
        i, j, last = (bisect_right(starts, at) - 1 for at in (top, left, right - 1))
        if bottom > self.rows[i].stop or right > width:
            return None
        whole = (top, bottom, left, right) == (self.rows[i].start, self.rows[i].stop, self.rows[j].start, self.rows[last].stop)
        return {(i, k) for k in range(j, last + 1)}, whole and x.numel == (bottom - top) * (right - left)

    def _uncovered(self, covered: Collection[tuple[int, int]]) -> list[TensorSpec]:
        """Return parts of the result that hold all its blocks (i, j), i not after j, but some."""
        if not self.rows:
            return [self.whole]
        width, found = self.whole.strides[0], []
        for i, rows in enumerate(self.rows):
            for is_covered, group in groupby(range(i, len(self.rows)), lambda j, i=i: (i, j) in covered):  # type: ignore[misc]
                if not is_covered:
                    columns = [self.rows[j] for j in group]
                    shape = (rows.stop - rows.start, columns[-1].stop - columns[0].start)
                    offset = self.whole.offset + rows.start * width + columns[0].start
                    found.append(replace(self.whole, shape=shape, offset=offset))
        return found

    # How it is called

    def _step(self, note: Note) -> Step:
        """Return what a plan runs for an operation that was recorded."""
        if getattr(note.function, "_schema", None) is None:
            bound: BoundProduct | BoundSum = note.args[0].mapped(self._tensor).bound(note.function)
            return bound
        args, kwargs = tree_map(self._tensor, note.args), tree_map(self._tensor, note.kwargs)
        if not note.returned() and not note.written():
            if not isinstance(note.result, int):  # a truth value is one
                raise PlanError(f"{note.name} reads {note.result!r} on the way")
            return partial(_guard, note.function, args, kwargs, note.result)
        if note.written():
            if not {x.storage for x in note.returned()} <= {x.storage for x in note.written()}:
                raise PlanError(f"{note.name} writes into an argument and returns another tensor")
            return TorchCall(note.function, args, kwargs)
        return into(note.function, args, kwargs, tree_map(self._tensor, note.result))


def _is_idle(note: Note) -> bool:
    """Tell whether an operation copies a tensor to itself, as ``x[rows] += y`` does after it has added."""
    return note.name == "copy_" and note.args[0] == note.args[1]


def _merged(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join holes that touch.

    >>> _merged([(64, 64), (0, 64), (256, 64)])
    [(0, 128), (256, 64)]
    """
    found: list[tuple[int, int]] = []
    for place, size in sorted(holes):
        if found and found[-1][0] + found[-1][1] == place:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((place, size))
    return found


def _guard(function: Any, args: Any, kwargs: Any, expected: Any) -> None:
    if function(*args, **kwargs) != expected:
        raise GuardError(str(function))
