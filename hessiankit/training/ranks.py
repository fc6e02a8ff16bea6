"""The processes of a call: process group, collectives with error handling, and checks that all ranks hold the same model.

Equal parameters do not say so: an eps, or another attribute that is no tensor, may differ. So data of one rank are sent to all,
and the operations of torch below automatic differentiation are compared: their names, numbers, shapes and constant tensors.

Work of one rank goes through :meth:`Ranks.together`: if it fails on any rank, all ranks raise the same line, and none waits for
a rank that has stopped. If a rank disappears, the others notice by its closed connections or by the process group's time-out.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy as copied
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hessiankit.support.errors import HessiankitError, InputError, named
from hessiankit.support.package import __version__
from hessiankit.support.torch_state import has_memory
from hessiankit.training.digest import digest

if TYPE_CHECKING:
    from typing_extensions import Self

R = TypeVar("R")
E = TypeVar("E", bound=Exception)
_CONNECTION = ("/gloo/", "NCCL", "ncclComm", "Connection closed", "Connection reset", "Timed out waiting")


class RankError(HessiankitError, RuntimeError):
    """Another process of the group stopped, or did not answer in time."""


class Ranks:
    """The ranks of a process group (None: all processes) in one call of the function ``who``, the prefix of every message.

    Without torch.distributed this process is rank 0 of 1.
    """

    def __init__(self, who: str, group: dist.ProcessGroup | None = None) -> None:
        self.who, self.group = who, group
        active = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if active else 0
        self.size = dist.get_world_size(group) if active else 1
        if self.rank < 0:
            raise InputError(f"{who}: this process is not in the process group it was given; call it on the group's ranks only")

    def named(self, who: str) -> Self:
        """Return the ranks in a call of another function."""
        ranks = copied(self)
        ranks.who = who
        return ranks

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.exchange():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        with self.exchange():
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks, to every rank the same bits, in the tensor's dtype; ``value`` is overwritten."""
        if self.size == 1:
            return value
        value = value.contiguous()  # the same memory layout on every rank
        is_supported = value.device.type in str(dist.get_backend_config(self.group))
        place = value if is_supported else value.to(_device(self.group))
        with self.exchange():
            dist.all_reduce(place, group=self.group)
        return place.to(value.device)

    def whole(self, value: Tensor) -> Tensor:
        """Return the whole of a tensor that ``fully_shard`` has sharded, and any other tensor unchanged."""
        if not isinstance(value, DTensor):
            return value
        with self.exchange():
            return value.full_tensor()

    def together(self, work: Callable[[], R]) -> R:
        """Do the work of this rank; if it fails on any rank, raise the same line on all of them.

        Raises:
            InputError: Or another of the library's errors, as the first rank that failed raised it.
            RankError: If that rank failed with anything else.
        """
        result, fault = None, None
        try:
            result = work()
        except RankError:
            raise
        except Exception as error:  # of any kind: the other ranks raise it too
            fault = error
        text = named(self.who, " ".join(str(fault).split())).removeprefix(f"{self.who}: ")
        report = (type(fault), text) if isinstance(fault, HessiankitError) else (RankError, f"{type(fault).__name__}: {text}")
        reports = self.gather(None if fault is None else report)
        failures = [rank for rank, line in enumerate(reports) if line is not None]
        if failures:
            kind, text = reports[failures[0]]
            everywhere = len(failures) == self.size and len(set(reports)) == 1
            prefix = "" if everywhere or self.size == 1 else f"on rank {failures[0]} of {self.size}: "
            raise _of_all(kind(f"{self.who}: {prefix}{text}")) from fault
        return result  # type: ignore[return-value]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Let an error of one rank within the context be raised on all ranks, where they :meth:`proceed` next."""
        try:
            yield
        except Exception as fault:
            if not (isinstance(fault, RankError) or hasattr(fault, "of_all_ranks")):
                self.proceed(fault)
            raise
        self.proceed()

    def proceed(self, fault: Exception | None = None) -> None:
        """Tell the other ranks whether this one goes on; raise the same line on all of them if one does not."""

        def failed() -> None:
            if fault is not None:
                raise fault

        if self.size == 1:
            return
        if int(self.sum(torch.tensor(int(fault is not None), device="cpu"))):
            self.together(failed)

    def agree(self, remedy: str = "make the same call everywhere, only with the rank's own data", /, **options: Any) -> None:
        """Raise an error on every rank unless all of them passed the same options, which are compared as they print."""
        entries = self.gather({name: repr(value) for name, value in options.items()})
        for name in dict.fromkeys(name for entry in entries for name in entry):
            for rank, entry in enumerate(entries):
                if entry.get(name) != entries[0].get(name):
                    raise _of_all(
                        InputError(
                            f"{self.who}: {name} is {entries[0].get(name)} on rank 0 and {entry.get(name)} on rank {rank}; "
                            f"expected the same on every rank: {remedy}"
                        )
                    )

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """A collective call: what torch raises where it has lost another rank becomes a :class:`RankError`."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            message = None if isinstance(error, RankError) else _communication(error) or _communication(error.__cause__)
            if message is None:
                raise
            duration = f"{time.monotonic() - began:.1f} s"
            raise RankError(
                f"{self.who}: rank {self.rank} of {self.size} lost the others after {duration}: one was killed, is stuck, or "
                f"raised an error of its own; read the logs of all ranks, and start all again (torch: {message})"
            ) from error


def _of_all(error: E) -> E:
    """Mark an error as one that all ranks raise."""
    error.of_all_ranks = True  # type: ignore[attr-defined]
    return error


def _communication(error: BaseException | None) -> str | None:
    """Return torch's message of a failed exchange; None for any other error."""
    if not isinstance(error, RuntimeError):
        return None
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, dist.DistError) or any(word in message for word in _CONNECTION):
        return message.split("] ", 1)[-1].split(". This is")[0]
    return None


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group's backend can send."""
    if "cpu" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def check_versions(ranks: Ranks) -> None:
    """Raise an error on every rank unless all of them run the same releases."""
    python = ".".join(platform.python_version_tuple()[:2])
    ranks.agree(**{"the version of hessiankit": __version__, "of torch": torch.__version__, "of Python": python})


def check_same_tensors(ranks: Ranks, tensors: Mapping[str, Tensor], noun: str) -> None:
    """Raise an error on every rank unless all of them hold the same tensors, bit by bit; ``noun`` names them, as in
    ``"parameter"``.
    """
    if ranks.size > 1:
        count = {f"the number of {noun}s": len(tensors)}
        descriptions = {f"the {noun} {name!r}": described(x) for name, x in tensors.items()}
        ranks.agree("load one checkpoint everywhere, or broadcast the state from rank 0", **count, **descriptions)


def described(x: Tensor) -> str:
    """Return the shape and the dtype of a tensor, and a digest of its values.

    >>> described(torch.zeros(2))
    '(2,), float32, digest b8c91d53eb483d77'
    """
    return f"{tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}, digest {digest(x)[:16]}"


def common(ranks: Ranks, items: Iterable[R]) -> R | None:
    """Return the first thing that the first rank with any holds, to every rank; None where there is nothing."""
    first = next(iter(items), None)
    has_items = ranks.gather(first is not None)
    if not any(has_items):
        return None
    source = has_items.index(True)
    value: R = ranks.gather(first if ranks.rank == source else None)[source]
    return value


def check_same_function(
    ranks: Ranks, run: Callable[[AbstractContextManager[Any]], Any], pairs: Iterable[tuple[str, Tensor]], *, sharded: bool = False
) -> None:
    """Raise an error on every rank unless the same operations with the same numbers run on all of them.

    ``run`` calls the module with the data of :func:`common`, within the context manager that it is passed. Tensors that are
    known to be equal are ``pairs``: data, parameters, buffers. Of a ``sharded`` model operations on
    parameters alone are left out.
    """
    calls = _Calls(pairs, is_data_only=sharded)
    with torch.compiler.set_stance("force_eager"):  # compiled code shows no operations
        if sharded:
            with ranks.exchange():
                run(calls)
        else:
            ranks.together(lambda: run(calls))
    if len(set(ranks.gather(digest(calls.lines)))) == 1:
        return
    first, *rest = ranks.gather(calls.lines)
    for rank, lines in enumerate(rest, 1):
        for at, (first_line, line) in enumerate(zip_longest(first, lines, fillvalue="nothing more")):
            if first_line != line:
                raise InputError(
                    f"{ranks.who}: the same data take operation {at} as {first_line} on rank 0 and {line} on rank {rank}; "
                    "expected the same module on every rank, with the same attributes (an eps, a flag, a number in forward or in "
                    "the loss)"
                )


_PLAIN = (int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, type(None))


class _Calls(TorchDispatchMode):
    """The operations that run, a line each; tensors by the number of the operation that made their memory."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], *, is_data_only: bool) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._is_data_only = is_data_only
        self._names: dict[int, tuple[str, Any]] = {}  # with the memory itself, so that its address is not used again
        for name, x in tensors:
            self._name(x, repr(name))

    def _name(self, x: Tensor, name: str) -> None:
        memory = x.untyped_storage() if has_memory(x) else x
        self._names[_address(x)] = (name, memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_listed = not self._is_data_only or any(_address(x) in self._names for x in inputs)
        line = f"{func}{self._text((*args, *(kwargs or {}).items()))}" if is_listed else ""
        out = func(*args, **(kwargs or {}))
        if is_listed:
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and _address(x) not in self._names:
                    self._name(x, f"%{len(self.lines)}")
            self.lines.append(line)
        return out

    def _text(self, x: Any) -> str:
        if isinstance(x, Tensor):
            shape = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            if (entry := self._names.get(_address(x))) is not None:
                return f"{entry[0]} {shape}"
            dense = has_memory(x) and not self._is_data_only
            return f"a constant {shape}" + (f" of digest {digest(x)[:16]}" if dense else "")
        if isinstance(x, (list, tuple)):
            return f"({', '.join(map(self._text, x))})"
        return str(x) if isinstance(x, _PLAIN) else type(x).__name__  # a device, a generator, a function may be a rank's own


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata if has_memory(x) else id(x)
