"""Whether all ranks' modules compute the same function: what they do with the same data, operation by operation.

Equal parameters do not say so: an eps, or another attribute that is no tensor, may differ. Data of one rank are sent to all, and
the operations of torch below automatic differentiation are compared: their names, numbers, shapes and constant tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hessiankit.diagnostics.digest import digest
from hessiankit.diagnostics.distributed.ranks import Ranks
from hessiankit.diagnostics.sharpness.batches import MicroBatch, evaluating, forward
from hessiankit.engine.problem.calling import named_tensors
from hessiankit.support.errors import InputError

T = TypeVar("T")


def common(ranks: Ranks, own: Iterable[T]) -> T | None:
    """Return the first thing that the first rank with any holds, to every rank; None where there is nothing."""
    first = next(iter(own), None)
    held = ranks.gather(first is not None)
    if not any(held):
        return None
    source = held.index(True)
    value: T = ranks.gather(first if ranks.rank == source else None)[source]
    return value


def check_same_function(
    ranks: Ranks, run: Callable[[AbstractContextManager[Any]], Any], named: Iterable[tuple[str, Tensor]], *, sharded: bool = False
) -> None:
    """Raise an error on every rank unless the same operations with the same numbers run on all of them.

    ``run`` calls the module with the data of :func:`common`, within the context manager that it is passed. Tensors that are
    known to be equal are ``named``: data, parameters, buffers. Of a ``sharded`` model operations on
    parameters alone are left out.
    """
    calls = _Calls(named, data_only=sharded)
    with torch.compiler.set_stance("force_eager"):  # compiled code shows no operations
        if sharded:
            with ranks.exchange():
                run(calls)
        else:
            ranks.together(lambda: run(calls))
    held = ranks.gather([zlib.crc32(line.encode()) for line in calls.lines])
    other = next((rank for rank, lines in enumerate(held) if lines != held[0]), None)
    if other is None:
        return
    pairs = zip([*held[0], None], [*held[other], None], strict=False)
    at = next(k for k, (mine, its) in enumerate(pairs) if mine != its)
    lines = ranks.gather(calls.lines[at] if at < len(calls.lines) else "nothing more")
    raise InputError(
        f"{ranks.who}: the same data take operation {at} as {lines[0]} on rank 0 and {lines[other]} on rank {other}; expected "
        "the same module on every rank, with the same attributes (an eps, a flag, a number in forward or in the loss)"
    )


def check_same_forward(ranks: Ranks, model: nn.Module, one: MicroBatch | None, *, sharded: bool = False) -> None:
    """Compare what the ranks' modules do with a micro-batch that all of them hold; nothing where there is none."""
    if ranks.size == 1 or one is None:
        return
    one = one.on(next(model.parameters()).device)

    def run(watched: AbstractContextManager[Any]) -> None:
        with evaluating(model), torch.no_grad(), watched:
            forward(model, one)

    own = [] if sharded else [*model.named_parameters(), *model.named_buffers()]
    check_same_function(ranks, run, [*own, *named_tensors(one.inputs)], sharded=sharded)


_PLAIN = (int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, type(None))


class _Calls(TorchDispatchMode):
    """The operations that run, a line each; tensors by the number of the operation that made their memory."""

    supports_higher_order_operators = True

    def __init__(self, named: Iterable[tuple[str, Tensor]], *, data_only: bool) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._data_only = data_only
        self._names: dict[int, tuple[str, Any]] = {}  # with the memory itself, so that its address is not used again
        for name, x in named:
            self._name(x, repr(name))

    def _name(self, x: Tensor, name: str) -> None:
        memory = x.untyped_storage() if x.layout is torch.strided else x
        self._names[_address(x)] = (name, memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_listed = not self._data_only or any(_address(x) in self._names for x in inputs)
        line = f"{func}{self._said((*args, *(kwargs or {}).items()))}" if is_listed else ""
        out = func(*args, **(kwargs or {}))
        if is_listed:
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and _address(x) not in self._names:
                    self._name(x, f"%{len(self.lines)}")
            self.lines.append(line)
        return out

    def _said(self, x: Any) -> str:
        if isinstance(x, Tensor):
            shape = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            if (known := self._names.get(_address(x))) is not None:
                return f"{known[0]} {shape}"
            dense = x.layout is torch.strided and not self._data_only
            return f"a constant {shape}" + (f" of digest {digest(x)[:16]}" if dense else "")
        if isinstance(x, (list, tuple)):
            return f"({', '.join(map(self._said, x))})"
        return str(x) if isinstance(x, _PLAIN) else type(x).__name__  # a device, a generator, a function may be a rank's own


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)
