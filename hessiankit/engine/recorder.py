"""Recording of torch operations with their tensors, so that they can be run again: see :mod:`hessiankit.engine.plan`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hessiankit.support.kernels import noted

_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
LIMIT = 200_000  # operations beyond which a plan takes longer to make than it is worth


class PlanError(Exception):
    """What was recorded cannot be run again on other values, and why."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a record, without its entries.

    Attributes:
        storage: What tensors that share memory have in common.
        shape: Of the tensor.
        strides: In entries.
        offset: Of the first entry in the storage, in entries.
        dtype: Of the entries.
        device: Where they are.
        storage_bytes: Of the storage.
    """

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int

    @property
    def numel(self) -> int:
        """How many entries there are."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the entries."""
        return self.numel * self.dtype.itemsize

    def on(self, storage: torch.UntypedStorage, start: int = 0) -> Tensor:
        """Return such a tensor on other memory, which starts so many bytes into a storage."""
        x = torch.empty(0, dtype=self.dtype, device=self.device)
        return x.set_(storage, start // self.dtype.itemsize + self.offset, self.shape, self.strides)


@dataclass(frozen=True)
class PlannedStep:
    """One operation of a plan.

    Attributes:
        name: Of the operation.
        shapes: Of what it writes.
        bytes: That it reads and writes.
        multiplications: Of products of matrices; 0 for other operations.
        start: Of what it writes into the result, the first entry; None where it writes elsewhere.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    multiplications: int
    start: int | None = None


@dataclass(frozen=True)
class Note:
    """One operation that ran: a function of torch, or a compiled sum or product; of its tensors the specs."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """Of the operation, without its namespace."""
        schema = getattr(self.function, "_schema", None)
        return str(self.args[0].name) if schema is None else str(schema.name).rpartition("::")[2]

    def written(self) -> list[TensorSpec]:
        """Return the arguments that it writes into."""
        schema = getattr(self.function, "_schema", None)
        if schema is None:
            return [self.args[0].into]
        if not schema.is_mutable:
            return []
        found: list[Any] = []
        for n, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found.append(self.kwargs.get(argument.name) if argument.kwarg_only or n >= len(self.args) else self.args[n])
        return _specs(found)

    def read(self) -> list[TensorSpec]:
        """Return the tensors among the arguments."""
        if getattr(self.function, "_schema", None) is None:
            return list(self.args[0].tensors())
        return _specs((self.args, self.kwargs))

    def returned(self) -> list[TensorSpec]:
        """Return the tensors that it returned."""
        return _specs(self.result)

    def planned(self, result: int) -> PlannedStep:
        """Return the step of a plan that it becomes; ``result`` is the storage of the result."""
        written = self.written() or self.returned()
        products = 0
        if self.name in ("mm", "bmm") and self.returned():
            products = math.prod(self.returned()[0].shape) * self.args[0].shape[-1]
        elif self.name in ("addmm", "baddbmm", "addmm_", "baddbmm_"):
            products = math.prod(written[0].shape) * self.args[1].shape[-1]
        elif getattr(self.function, "_schema", None) is None:
            products = self.args[0].multiplications
        touched = sum(x.bytes for x in dict.fromkeys((*self.read(), *written)))
        start = next((x.offset for x in self.written() if x.storage == result), None)
        return PlannedStep(self.name, tuple(x.shape for x in written), touched, products, start)


class Recorder(TorchDispatchMode):
    """Notes every operation that runs within it.

    Memory whose entries follow from inputs is released as usual; what depends on no input is kept for the plan.

    Args:
        inputs: The tensors that may have other entries when the record is run again; what results are added to is one of them.
        bytes_allowed: Of what is kept.

    Attributes:
        notes: The operations.
        kept: Memory of inputs, and of what depends on none of them.
        made: Memory that an operation has made.

    >>> x = torch.ones(2)
    >>> with Recorder([x]) as recorder:
    ...     y = (2 * x + torch.ones(2)).sum()
    >>> [note.name for note in recorder.notes], [storage.nbytes() for storage in recorder.kept.values()]
    (['mul', 'ones', 'add', 'sum'], [8, 8])
    """

    def __init__(self, inputs: Iterable[Tensor], bytes_allowed: int = 2**63) -> None:
        super().__init__()
        self.notes: list[Note] = []
        self.kept: dict[int, torch.UntypedStorage] = {}
        self.made: set[int] = set()
        self._left = bytes_allowed
        self._seen: dict[int, tuple[int, StorageWeakRef]] = {}  # its number; a key is not used again while there is a reference
        self._inputs = {self.spec(x).storage for x in inputs}
        self._varying = set(self._inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        before: tuple[Any, Any] = tree_map(self.spec, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        earlier = len(self._seen)
        self._add(Note(func, *before, tree_map(self.spec, result)), earlier)
        return result

    def add_compiled(self, function: Any, terms: Any) -> None:
        """Note a compiled sum or product, which has not run yet."""
        self._add(Note(function, (terms.mapped(self.spec),), {}, None), len(self._seen))

    def _add(self, note: Note, earlier: int) -> None:
        """Add a note, before which there were so many storages."""
        self.notes.append(note)
        varies = any(x.storage in self._varying for x in note.read())
        new = [x for x in note.returned() if self._seen[x.storage][0] >= earlier]
        self.made |= {x.storage for x in new}
        for x in (*new, *note.written()) if varies else ():
            if x.storage not in self._varying:
                self._varying.add(x.storage)
                self._left += 0 if x in new else x.storage_bytes
                del self.kept[x.storage]
        self._left -= 0 if varies else sum({x.storage: x.storage_bytes for x in new}.values())
        if self._left < 0 or len(self.notes) > LIMIT:
            raise PlanError("what depends on no input takes more memory, or there are more operations, than a plan is worth")

    def spec(self, x: Any) -> Any:
        """Return the spec of a tensor; its memory, if it was not seen before, is kept."""
        if not isinstance(x, Tensor):
            return x
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            raise PlanError("a tensor is sparse, or a conjugate that is not computed")
        storage = x.untyped_storage()
        key = storage_key(x)
        if key not in self._seen:
            self._seen[key] = (len(self._seen), StorageWeakRef(storage))
            self.kept[key] = storage
        return TensorSpec(key, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype, x.device, storage.nbytes())


def _specs(tree: Any) -> list[TensorSpec]:
    return [x for x in tree_leaves(tree) if isinstance(x, TensorSpec)]


def recorder() -> Recorder | None:
    """Return what records at present, if anything does."""
    return _recorder.get()


@contextmanager
def recording(inputs: Iterable[Tensor], bytes_allowed: int = 2**63) -> Iterator[Recorder]:
    """Record what runs within the block; arguments as in :class:`Recorder`.

    Raises:
        PlanError: What is kept does not fit into so many bytes.
    """
    mode = Recorder(inputs, bytes_allowed)
    token = _recorder.set(mode)
    try:
        with noted(), mode:
            yield mode
    finally:
        _recorder.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Leave out of a record what runs within the block: it decides on structure, and the result reads none of it."""
    if recorder() is None:
        yield
        return
    with _disable_current_modes():
        yield


def storage_key(x: Tensor) -> int:
    """Return what tensors that share memory have in common."""
    return int(x.untyped_storage()._cdata)
