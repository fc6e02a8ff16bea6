"""Plans: samples in chunks, the matrix in panels, and the cost of each.

A sweep and its unwinding run on meta tensors, which have shapes and no entries; a :class:`Meter` beneath them counts
multiply-adds, bytes moved, operations, and the bytes alive at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hessiankit.engine.assembly import is_split, next_step
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.parameter_blocks import counting_chunks
from hessiankit.engine.problem.loss_trace import LossTrace, loss_trace, normalizer_of
from hessiankit.engine.problem.own_call import reached
from hessiankit.engine.problem.task import Task, available_memory, gib
from hessiankit.engine.product_rows import product_cost, products_are_cheaper
from hessiankit.engine.reverse_accumulation import accumulate
from hessiankit.engine.storage import RecordedBlocks, SymmetricStorage
from hessiankit.support.errors import OutOfMemoryError, TraceError
from hessiankit.tracing.trace import Trace

aten = torch.ops.aten
_NUMBER = {aten._local_scalar_dense.default: 0, aten.equal.default: False, aten.is_nonzero.default: False}


@dataclass(frozen=True)
class Cost:
    """Cost of one chunk of samples.

    Attributes:
        flops: Floating-point operations of matrix products, a multiply-add counted as two.
        moved: Bytes that operations read and write.
        operations: How many there are.
        peak_bytes: Bytes alive at once, the matrix not counted.
        sweep_bytes: Peak that the sweep itself reports; chunks are cut by it.
        cached_bytes: Bytes of the blocks between activations, which may be cached between panels.
        flops_again: The part of ``flops`` that each panel repeats where those blocks are not cached.
        moved_again: The same of ``moved``.
        operations_again: The same of ``operations``.
    """

    flops: float
    moved: float
    operations: int
    peak_bytes: int
    sweep_bytes: int
    cached_bytes: int = 0
    flops_again: float = 0.0
    moved_again: float = 0.0
    operations_again: int = 0


class Meter(TorchDispatchMode):
    """Counts the operations that run beneath it; with ``shapes``, on meta tensors.

    >>> with Meter() as meter:
    ...     x = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> meter.flops, meter.live
    (48.0, 32)
    """

    def __init__(self, *, shapes: bool = False) -> None:
        super().__init__()
        self.shapes = shapes
        self.flops = self.moved = 0.0
        self.operations = self.live = self.peak = 0
        self._times = 1
        self._uses: dict[int, int] = {}  # Python tensors by storage
        self._watched: dict[int, Any] = {}

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count the operations inside the context that many times."""
        before = self._times
        self._times *= times
        try:
            yield
        finally:
            self._times = before

    def shortened(self) -> AbstractContextManager[None]:
        """With shapes only, run long loops once for all pieces of one length."""
        return counting_chunks(self.repeated) if self.shapes else nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, tuple(kwargs.values())))
        if self.shapes:
            n_meta = sum(x.is_meta for x in given)
            if n_meta and func in _NUMBER:
                return _NUMBER[func]
            if 0 < n_meta < len(given):
                args, kwargs = torch.utils._pytree.tree_map_only(Tensor, as_shape, (args, kwargs))
                given = _tensors((args, tuple(kwargs.values())))
            if not given and func is aten.eye.default:
                kwargs = {**kwargs, "device": "meta"}
        out = func(*args, **kwargs)
        self.operations += self._times
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += self._times * count(*args, **kwargs, out_val=out)
        results = _tensors((out,))
        if not func.is_view:
            self.moved += self._times * sum(_touched(x) for x in (*given, *results))
        before = {x.untyped_storage()._cdata for x in given}
        for x in results:
            self._watch(x, before)
        return out

    def _watch(self, x: Tensor, before: set[int]) -> None:
        if x.is_meta and not self.shapes:  # another meter's
            return
        storage, at = x.untyped_storage(), id(x)
        key, size = storage._cdata, storage.nbytes()
        if at in self._watched or (key in before and key not in self._uses):  # a view of something older
            return
        if key not in self._uses:
            self._uses[key] = 0
            self.live += size
            self.peak = max(self.peak, self.live)
        self._uses[key] += 1

        def release(_: Any) -> None:
            self._watched.pop(at, None)
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.live -= size

        self._watched[at] = weakref.ref(x, release)


def _tensors(x: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for y in x:
        if isinstance(y, Tensor):
            found.append(y)
        elif isinstance(y, (list, tuple)):
            found += _tensors(y)
    return found


def as_shape(x: Tensor) -> Tensor:
    """Return a meta tensor with the shape, strides and dtype of another.

    >>> as_shape(torch.ones(()).expand(2, 3)).stride()
    (0, 0)
    """
    return x if x.is_meta else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def measure(
    traced: LossTrace, slices: Mapping[str, slice], dtype: torch.dtype, *, keep: int | None = None, shapes: bool = True
) -> Cost:
    """Return what the sweep of a traced chunk, and its unwinding into a matrix, will cost.

    Args:
        traced: The chunk.
        slices: Rows of each parameter.
        dtype: Of the matrix.
        keep: If given, also count the blocks between activations; they are cached up to so many bytes.
        shapes: False to run the sweep on values, where shapes of an operation depend on its entries.
    """
    one = traced.trace
    resting = 2 * sum(_touched(x) for x in one.values)  # values and their adjoints
    matrix = SymmetricStorage(slices, dtype, torch.device("meta"))
    with torch.no_grad():
        plain = Meter(shapes=True)
        if keep is None and shapes:
            with plain, plain.shortened():
                sweep = _swept(one, shapes)
                accumulate(sweep, matrix)
            return Cost(plain.flops, plain.moved, plain.operations, plain.peak + resting, sweep.peak_bytes)
        with Meter(shapes=shapes) as keeper, keeper.shortened():
            blocks, sweep = RecordedBlocks(), _swept(one, shapes)
            accumulate(sweep, blocks)  # type: ignore[arg-type]
            swept = sweep.peak_bytes
            del sweep
        with Meter(shapes=True) as lifter, lifter.shortened():
            blocks.replay(matrix)
        peak = max(keeper.peak, keeper.live + lifter.peak)
        if shapes and keep is not None and keeper.live > keep:  # too large for the cache
            with plain, plain.shortened():
                accumulate(_swept(one, shapes), matrix)
            peak = plain.peak
    return Cost(
        flops=keeper.flops + lifter.flops,
        moved=keeper.moved + lifter.moved,
        operations=keeper.operations + lifter.operations,
        peak_bytes=peak + resting,
        sweep_bytes=swept,
        cached_bytes=keeper.live,
        flops_again=keeper.flops,
        moved_again=keeper.moved,
        operations_again=keeper.operations,
    )


def _swept(one: Trace, shapes: bool) -> ForwardSweep:
    traced = Trace(list(one.values), list(one.applications), one.parameters, set(one.moving), one.output)
    sweep = ForwardSweep(traced)
    if shapes:
        traced.values[:] = [as_shape(x) for x in traced.values]
        sweep.adjoints = {at: as_shape(x) for at, x in sweep.adjoints.items()}
    sweep.run()
    return sweep


def _touched(x: Tensor) -> int:
    """Return the bytes of a tensor, counting axes of stride 0 once."""
    if not x.numel():
        return 0
    n = math.prod(length if step else 1 for length, step in zip(x.shape, x.stride(), strict=True))
    return n * x.element_size()


PANEL = 256 * 2**20  # bytes of the rows of the matrix that are computed before they are written
CACHE = 512 * 2**20  # bytes of blocks between activations that are cached from one panel to the next
MEASURED = 8  # batches of different lengths that are measured; the others count as the next larger one


@dataclass(frozen=True)
class Chunk:
    """Some samples of one batch, treated together; ``whole`` if they are all of it."""

    batch: int
    start: int
    stop: int
    whole: bool


@dataclass(frozen=True)
class PanelPlan:
    """Panels (rows, columns) of a symmetric matrix, as positions of parameters, and the bytes of the largest."""

    parts: tuple[tuple[range, range], ...]
    largest: int


@dataclass(frozen=True)
class Plan:
    """Chunks with their costs, and panels."""

    chunks: tuple[Chunk, ...]
    costs: tuple[Cost, ...]
    panels: PanelPlan
    fallbacks: tuple[str, ...]

    @property
    def cached_chunks(self) -> int:
        """Number of leading chunks whose blocks between activations are cached from panel to panel."""
        if len(self.panels.parts) == 1:
            return 0
        total = 0
        for n, cost in enumerate(self.costs):
            total += cost.cached_bytes
            if total > CACHE:
                return n
        return len(self.costs)

    @property
    def workspace(self) -> int:
        """Bytes needed besides the matrix, or one panel of it."""
        cached = sum(cost.cached_bytes for cost in self.costs[: self.cached_chunks])
        return cached + max((cost.peak_bytes for cost in self.costs), default=0)

    def total(self, what: str) -> float:
        """Return the sum over chunks, and over panels where nothing is cached, of "flops", "moved" or "operations"."""
        again = len(self.panels.parts) - 1
        total = float(sum(getattr(cost, what) for cost in self.costs))
        return total + again * sum(getattr(cost, f"{what}_again") for cost in self.costs[self.cached_chunks :])


def panels(sizes: Sequence[int], itemsize: int, limit: int) -> PanelPlan:
    """Cut the upper half of a symmetric matrix into panels of at most ``limit`` bytes, if no block is larger.

    Rows of whole parameters, and all columns not before them; of a parameter too large for that, some columns at a time.

    >>> panels([2, 3, 1], 1, 16).parts
    ((range(0, 1), range(0, 3)), (range(1, 3), range(1, 3)))
    >>> panels([2, 3], 1, 6).parts
    ((range(0, 1), range(0, 1)), (range(0, 1), range(1, 2)), (range(1, 2), range(1, 2)))
    """
    parts: list[tuple[range, range]] = []
    largest, start, n = 0, 0, len(sizes)
    while start < n:
        width = sum(sizes[start:])
        stop, height = start + 1, sizes[start]
        while stop < n and (height + sizes[stop]) * width * itemsize <= limit:
            height, stop = height + sizes[stop], stop + 1
        left = start
        while left < n:
            right, across = left + 1, sizes[left]
            while right < n and (stop > start + 1 or height * (across + sizes[right]) * itemsize <= limit):
                across, right = across + sizes[right], right + 1
            parts.append((range(start, stop), range(left, right)))
            largest = max(largest, height * across * itemsize)
            left = right
        start = stop
    return PanelPlan(tuple(parts), largest)


def make_plan(tasks: Sequence[Task], batch_size: int | None, limit: int | None) -> Plan:
    """Measure a few samples, by their shapes, and cut the work.

    Args:
        tasks: One request a batch.
        batch_size: Samples treated at once, or None.
        limit: Bytes of a panel, or None for the whole matrix at once.
    """
    first = tasks[0]
    sizes, slices = [p.numel() for p in tasks[0].parameters.values()], tasks[0].slices
    cut = (
        panels(sizes, first.dtype.itemsize, limit)
        if limit is not None
        else PanelPlan(((range(len(sizes)), range(len(sizes))),), 0)
    )
    keep = len(cut.parts) > 1
    known: dict[Any, tuple[int, Cost, tuple[str, ...]] | None] = {}
    by_size = sorted(range(len(tasks)), key=lambda n: -_entries(tasks[n]))
    last: tuple[int, Cost, tuple[str, ...]] | None = None
    found: dict[int, tuple[int, Cost, tuple[str, ...]] | None] = {}
    for n in by_size:
        key = _signature(tasks[n])
        if key not in known:
            known[key] = _measured(tasks[n], batch_size, slices, first.dtype, keep=keep) if len(known) < MEASURED else last
        found[n] = last = known[key]
    chunks: list[Chunk] = []
    costs: list[Cost] = []
    fallbacks: list[str] = []
    for n, task in enumerate(tasks):
        one = found[n]
        if one is None:  # nothing in it depends on the parameters
            continue
        step, cost, names = one
        fallbacks += names
        for start in range(0, task.batch, step):
            chunks.append(Chunk(n, start, min(start + step, task.batch), step >= task.batch))
            costs.append(cost)
    return Plan(tuple(chunks), tuple(costs), cut, tuple(dict.fromkeys(fallbacks)))


def _measured(
    task: Task, batch_size: int | None, slices: Mapping[str, slice], dtype: torch.dtype, *, keep: bool
) -> tuple[int, Cost, tuple[str, ...]] | None:
    """Return samples per chunk, the cost of a chunk and its fallbacks; None if the parameters have no effect."""
    normalizer, batch = normalizer_of(task), task.batch
    with torch.no_grad():
        split = is_split(task, batch_size)
        step = batch if not split else min(batch_size or 1, batch)
        try:
            traced = loss_trace(task.part(slice(0, step)) if split else task, normalizer)
        except TraceError:
            if reached(task):
                raise
            return None
        cost = _cost(traced, slices, dtype, keep)
        if split and batch_size is None and (more := min(batch, next_step(task, step, cost.sweep_bytes))) > step:
            step = more
            cost = _cost(loss_trace(task.part(slice(0, step)), normalizer), slices, dtype, keep)
    return step, cost, traced.trace.fallbacks


def _cost(traced: LossTrace, slices: Mapping[str, slice], dtype: torch.dtype, keep: bool) -> Cost:
    """Return the cost of a chunk by its shapes; on values where shapes of an operation depend on its entries."""
    size = max(rows.stop for rows in slices.values())
    if products_are_cheaper(traced.trace, size, dtype.itemsize):
        products = product_cost(traced.trace, size, dtype.itemsize)
        values = sum(_touched(x) for x in traced.trace.values)
        moved = dtype.itemsize * products.passes
        return Cost(2 * products.multiplications, moved, products.operations, products.bytes + 4 * values, 0)
    limit = CACHE if keep else None
    try:
        return measure(traced, slices, dtype, keep=limit)
    except (RuntimeError, NotImplementedError, TypeError):
        return measure(traced, slices, dtype, keep=limit, shapes=False)


def check_workspace(need: int, matrix: int, device: torch.device, free: int | None = None) -> None:
    """Raise OutOfMemoryError if workspace and matrix exceed the free memory (``free``, or what is free now)."""
    free = available_memory(device) if free is None else free
    if need + matrix > free:
        raise OutOfMemoryError(
            f"hessian: the derivatives of one chunk of samples take {gib(need)} beside {gib(matrix)} of the matrix, but only "
            f"{gib(free)} are free on {device}. Pass batch_size=1, shorter sequences, fewer params=[...], or use "
            "hessian_operator, which needs neither"
        )


def _entries(task: Task) -> int:
    return sum(x.numel() for x in torch.utils._pytree.tree_leaves(task.inputs) if isinstance(x, Tensor))


def _signature(task: Task) -> Any:
    leaves = torch.utils._pytree.tree_leaves((task.inputs, task.target))
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves), normalizer_of(task) > 0
