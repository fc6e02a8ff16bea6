"""Recording of torch operations with their tensors, so that they can be run again: see :mod:`hessiankit.engine.plan`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hessiankit.support.kernels import noted

_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
LIMIT = 200_000  # operations beyond which a plan takes longer to make than it is worth


class PlanError(Exception):
    """What was recorded cannot be run again on other values, and why."""


@dataclass(frozen=True)
class Note:
    """One operation that ran: a function of torch, or a compiled sum, with its arguments and what it returned."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """Of the operation, without its namespace."""
        schema = getattr(self.function, "_schema", None)
        return "compiled sum" if schema is None else str(schema.name).rpartition("::")[2]

    def written(self) -> list[Tensor]:
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
        return [x for x in tree_leaves(found) if isinstance(x, Tensor)]

    def read(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        if getattr(self.function, "_schema", None) is None:
            return list(self.args[0].tensors())
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def returned(self) -> list[Tensor]:
        """Return the tensors that it returned."""
        return [x for x in tree_leaves(self.result) if isinstance(x, Tensor)]


class Recorder(TorchDispatchMode):
    """Notes every operation that runs within it.

    >>> import torch
    >>> x = torch.ones(2)
    >>> with Recorder() as recorder:
    ...     y = (2 * x).sum()
    >>> [note.name for note in recorder.notes]
    ['mul', 'sum']
    """

    def __init__(self, bytes_allowed: int = 2**63) -> None:
        super().__init__()
        self.notes: list[Note] = []
        self._left = bytes_allowed
        self._made: set[int] = set()
        self._given: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        before: tuple[Any, Any] = tree_map(self._as_it_is, (args, kwargs))
        self.notes.append(Note(func, *before, result))
        self._made |= {id(x) for x in tree_leaves(result) if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and not result._is_view():
            self._left -= result.numel() * result.element_size()
        if self._left < 0 or len(self.notes) > LIMIT:
            raise PlanError("intermediates take more memory, or more operations, than a plan is worth")
        return result

    def _as_it_is(self, x: Any) -> Any:
        """Return a tensor from elsewhere, say a parameter, with the memory that it has now: it may be given another later."""
        if not isinstance(x, Tensor) or id(x) in self._made:
            return x
        return self._given.setdefault((id(x), storage_key(x)), (x, x.detach()))[1]


def recorder() -> Recorder | None:
    """Return what records at present, if anything does."""
    return _recorder.get()


@contextmanager
def recording(bytes_allowed: int = 2**63) -> Iterator[Recorder]:
    """Record what runs within the block, as long as all that it makes fits into so many bytes.

    Raises:
        PlanError: It does not.
    """
    mode = Recorder(bytes_allowed)
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
