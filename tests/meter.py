"""A meter of the operations, and of the bytes alive, beneath a computation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Meter(TorchDispatchMode):
    """Counts multiply-adds (two each), operations, and bytes alive."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.operations = self.live = self.peak = 0
        self._uses: dict[int, int] = {}  # Python tensors by storage
        self._watched: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operations += 1
        name = func.overloadpacket.__name__  # baddbmm_ multiplies as baddbmm does
        count = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        before = {x.untyped_storage()._cdata for x in tensors((args, tuple(kwargs.values())))}
        for x in tensors((out,)):
            self._watch(x, before)
        return out

    def _watch(self, x: Tensor, before: set[int]) -> None:
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


class BytesAlive(TorchDispatchMode):
    """Counts the bytes alive of all storages that operations have met, also of those that are resized.

    Args:
        *known: Tensors that are there before.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.marked = 0
        self._look(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._look(tree_leaves((args, kwargs, out)))
        return out

    def mark(self) -> None:
        """Note the bytes that are alive now; the most of all times are ``marked``."""
        alive = {at: UntypedStorage._new_with_weak_ptr(ref.cdata) for at, ref in self._storages.items()}
        self._storages = {at: self._storages[at] for at, storage in alive.items() if storage is not None}
        self.marked = max(self.marked, sum(storage.nbytes() for storage in alive.values() if storage is not None))

    def _look(self, values: Iterable[Any]) -> None:
        for x in values:
            if isinstance(x, Tensor) and not isinstance(x, DTensor):
                storage = x.untyped_storage()
                known = self._storages.get(storage._cdata)
                if known is None or known.expired():
                    self._storages[storage._cdata] = StorageWeakRef(storage)


class PeakBytes(BytesAlive):
    """Marks the bytes that are alive after every operation."""

    def _look(self, values: Iterable[Any]) -> None:
        super()._look(values)
        self.mark()


def tensors(x: Any) -> list[Tensor]:
    """Return the tensors in nested lists and tuples."""
    if isinstance(x, Tensor):
        return [x]
    return [y for part in x for y in tensors(part)] if isinstance(x, (list, tuple)) else []
