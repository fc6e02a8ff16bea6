"""What a computation costs, from the shapes of its tensors alone: nothing is multiplied, nothing large is allocated.

A sweep and its unwinding run on meta tensors, which have shapes and no entries; a :class:`Meter` beneath them counts
multiply-adds, bytes moved, operations, and the bytes alive at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hessiankit.engine.pieces import counted
from hessiankit.engine.storage import Kept, Matrix
from hessiankit.engine.sweep import Sweep
from hessiankit.engine.unwinding import unwind
from hessiankit.request.loss_trace import LossTrace
from hessiankit.tracing.trace import Trace

aten = torch.ops.aten
_NUMBER = {aten._local_scalar_dense.default: 0, aten.equal.default: False, aten.is_nonzero.default: False}


@dataclass(frozen=True)
class Cost:
    """What one chunk of samples takes.

    Attributes:
        flops: Floating-point operations of matrix products, a multiply-add counted as two.
        moved: Bytes that operations read and write.
        operations: How many there are.
        peak_bytes: Bytes alive at once, the matrix not counted.
        sweep_bytes: What the sweep itself reports; chunks are cut by it.
        kept_bytes: Bytes of the curvature that lifts read, all of it together.
        flops_again: The part of ``flops`` that each panel takes again where that curvature is not kept.
        moved_again: The same of ``moved``.
        operations_again: The same of ``operations``.
    """

    flops: float
    moved: float
    operations: int
    peak_bytes: int
    sweep_bytes: int
    kept_bytes: int = 0
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
        """Count what runs within as often as that."""
        before = self._times
        self._times *= times
        try:
            yield
        finally:
            self._times = before

    def shortened(self) -> AbstractContextManager[None]:
        """Let long loops run once for all pieces of a length, where there are shapes only."""
        return counted(self.repeated) if self.shapes else nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, tuple(kwargs.values())))
        if self.shapes:
            ghosts = sum(x.is_meta for x in given)
            if ghosts and func in _NUMBER:
                return _NUMBER[func]
            if 0 < ghosts < len(given):
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
    """Return a meta tensor laid out as another tensor.

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
        keep: If given, also count the curvature that lifts read; up to so many bytes it will be kept.
        shapes: False to compute the curvature in earnest, where an operation needs its entries to know its shapes.
    """
    one = traced.trace
    resting = 2 * sum(_touched(x) for x in one.values)  # values and their adjoints
    matrix = Matrix(slices, dtype, torch.device("meta"))
    with torch.no_grad():
        plain = Meter(shapes=True)
        if keep is None and shapes:
            with plain, plain.shortened():
                sweep = _swept(one, shapes)
                unwind(sweep, matrix)
            return Cost(plain.flops, plain.moved, plain.operations, plain.peak + resting, sweep.peak_bytes)
        with Meter(shapes=shapes) as keeper, keeper.shortened():
            kept, sweep = Kept(), _swept(one, shapes)
            unwind(sweep, kept)  # type: ignore[arg-type]
            swept = sweep.peak_bytes
            del sweep
        with Meter(shapes=True) as lifter, lifter.shortened():
            kept.replay(matrix)
        peak = max(keeper.peak, keeper.live + lifter.peak)
        if shapes and keep is not None and keeper.live > keep:  # too much to be kept
            with plain, plain.shortened():
                unwind(_swept(one, shapes), matrix)
            peak = plain.peak
    return Cost(
        flops=keeper.flops + lifter.flops,
        moved=keeper.moved + lifter.moved,
        operations=keeper.operations + lifter.operations,
        peak_bytes=peak + resting,
        sweep_bytes=swept,
        kept_bytes=keeper.live,
        flops_again=keeper.flops,
        moved_again=keeper.moved,
        operations_again=keeper.operations,
    )


def _swept(one: Trace, shapes: bool) -> Sweep:
    traced = Trace(list(one.values), list(one.applications), one.parameters, set(one.moving), one.output)
    sweep = Sweep(traced)
    if shapes:
        traced.values[:] = [as_shape(x) for x in traced.values]
        sweep.lambdas = {at: as_shape(x) for at, x in sweep.lambdas.items()}
    sweep.run()
    return sweep


def _touched(x: Tensor) -> int:
    """Bytes of a tensor, axes along which it is repeated counted once."""
    if not x.numel():
        return 0
    n = math.prod(length if step else 1 for length, step in zip(x.shape, x.stride(), strict=True))
    return n * x.element_size()
