"""A snapshot of a module: everything that a call may change, and copies of the parameters, safe from later training."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy as copied
from functools import cache, partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import RandomStates, different, has_memory, strided_parts, write_values

IMMUTABLE_TYPES = (str, int, bool, float, bytes, type(None))
"""Types of objects that nothing can be written into."""


class ModuleState:
    """Copies of a module's tensors and attributes.

    The state holds parameters, buffers and plain tensors among the attributes with copies of their values; other state (modes,
    hooks, counters, lists, closures, generators) by its contents.

    Args:
        module: The module; it is not changed.
        *callables: Other functions whose state a call may change: the loss.
        share: Hold the parameters themselves in place of copies, and detect changes of their values.

    Attributes:
        values: Copies of the values of parameters and buffers, by name.
        written: The buffers that a call of the module gives other values, such as the running statistics of a batch norm.
        is_present: Whether the recorded state is present.

    >>> layer = nn.Linear(2, 1)
    >>> state = ModuleState(layer)
    >>> with torch.no_grad():
    ...     _ = layer.weight.add_(1)
    >>> with state.present():
    ...     unmoved = torch.equal(layer.weight, state.values["weight"])
    >>> unmoved, torch.equal(layer.weight, state.values["weight"])
    (True, False)
    """

    def __init__(self, module: nn.Module, *callables: Any, share: bool = False) -> None:
        self.module, self.callables, self.is_present = module, callables, False
        self._contents = Held(module, *callables)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        tensors = {**parameters, **buffers}
        self.values = {name: x.detach() if share and name in parameters else x.detach().clone() for name, x in tensors.items()}
        self.written: set[str] = set()
        self._tensors = {name: (x, self.values[name]) for name, x in tensors.items()}
        for name, x in _plain_tensors(module):
            self._tensors.setdefault(name, (x, x.detach().clone()))
        self._marks = _marks(self._shared()) if share else {}

    @contextmanager
    def present(self, values: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Restore the module's recorded state within the context, and its present state afterwards.

        Parameters and buffers keep their identity, so that lists, closures and hooks that hold one read the same values. Their
        memory is exchanged for the copies; with other values it is overwritten instead, so that views see them too.

        Args:
            values: Other values of some parameters, by name.
        """
        if values is None and self.is_present:
            try:
                yield
            finally:
                self._contents.restore()
            return
        is_unmoved = self._contents.changed() is None
        contents = self._contents if is_unmoved else Held(self.module, *self.callables)
        was_present = self.is_present
        with_memory = {name: pair for name, pair in self._tensors.items() if has_memory(pair[0])}
        memory = [(x, x.data, x.data.clone() if values else None) for x, _ in with_memory.values()]
        others = [pair for name, pair in self._tensors.items() if name not in with_memory]  # which cannot change their memory
        present_values = [
            (x, x.detach().clone() if moved else copy) for (x, copy), moved in zip(others, different(others), strict=True)
        ]
        try:
            self._contents.restore_flags() if is_unmoved else self._contents.restore()
            for name, (x, copy) in with_memory.items():
                if values is None:
                    x.data = copy.clone() if name in self.written else copy
                else:
                    write_values(x, values.get(name, copy))
            _write_back(others)
            self.is_present = values is None
            yield
        finally:
            self.is_present = was_present
            for x, data, backup in memory:
                x.data = data
                if backup is not None:
                    write_values(x, backup)
            _write_back(present_values)
            contents.restore()

    def moved(self, values: Mapping[str, Tensor]) -> ModuleState:
        """Return the state with other values of some parameters."""
        state = copied(self)
        state.values, state.is_present = {**self.values, **values}, False
        state._tensors = {name: (x, values.get(name, copy)) for name, (x, copy) in self._tensors.items()}
        return state

    def slopes(self, value: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the derivatives of a value that the module's own call returned; None where autograd reaches none."""
        return torch.autograd.grad(value, leaves, allow_unused=True)

    def tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of every tensor of the module, the tensor, and the copy of its values."""
        for name, (x, values) in self._tensors.items():
            yield name, x, values

    def random_states(self) -> RandomStates:
        """Return a snapshot of the random states of the devices that the module is on."""
        return RandomStates(x.device for x, _ in self._tensors.values())

    def holds(self, x: Tensor) -> bool:
        """Tell whether a tensor is one of the module's own."""
        return any(x is tensor for tensor, _ in self._tensors.values())

    def changed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Yield the names of the module's parameters or buffers, those of ``tensors``, that have other values now."""
        tensor_of_name = dict(tensors)
        marks = _marks({name: x for name, x in tensor_of_name.items() if name in self._marks})
        new = {name for name in tensor_of_name if name not in self.values or self._marks.get(name) != marks.get(name)}
        old = [name for name in tensor_of_name if name not in new]
        differ = different((tensor_of_name[name], self.values[name]) for name in old)
        new.update(name for name, differs in zip(old, differ, strict=True) if differs)
        yield from (name for name in tensor_of_name if name in new)

    def check_shared(self, caller: str) -> None:
        """Raise an error if the values of a shared parameter have changed since."""
        marks = _marks(self._shared()) if self._marks else {}
        for name, mark in self._marks.items():
            if marks.get(name) != mark:
                raise InputError(
                    f"{caller}: the parameter {name!r} has been given other values since; make it anew for these, or let it keep "
                    "a copy of the parameters: snapshot=True"
                )

    def _shared(self) -> dict[str, Tensor]:
        """Return the shared parameters that still belong to the module, in the same memory; FSDP replaces them."""
        return {name: p for name, p in self.module.named_parameters() if self._is_in_place(name, p)}

    def _is_in_place(self, name: str, parameter: Tensor) -> bool:
        if name not in self.values or parameter is not self._tensors[name][0]:
            return False
        pairs = zip(strided_parts(parameter), strided_parts(self.values[name]), strict=True)
        return all(x.data_ptr() == value.data_ptr() for x, value in pairs)

    def changed_attribute(self) -> str | None:
        """Return what else a call has changed: an attribute, an entry of a list, a variable of a closure; None if nothing."""
        plain = {n: pair for n, pair in self._tensors.items() if n not in self.values}
        names = (n for n, differs in zip(plain, different(plain.values()), strict=True) if differs)
        return next(names, None) or self._contents.changed()

    def restore(self) -> None:
        """Undo what a call of the module has changed."""
        self._contents.restore()
        _write_back(self._tensors.values())


class Held:
    """The recorded contents of the modules, containers and closures that are reachable from some objects.

    Args:
        *roots: The objects.
        copies: Tensors whose values count too: name, tensor, and a copy of its values.

    >>> kept = [1, {"a": 2}, [], [3]]
    >>> held = Held(kept)
    >>> kept[1]["a"], kept[2][:], kept[3][:] = 3, [4], []
    >>> held.changed()
    '[1].a'
    >>> held.restore()
    >>> kept
    [1, {'a': 2}, [], [3]]
    """

    def __init__(self, *roots: Any, copies: Iterable[tuple[str, Tensor, Tensor]] = ()) -> None:
        self._copies = list(copies)
        self._containers: list[tuple[str, Any, Any]] = []  # the attributes of a module are a dict
        self._cells: list[tuple[str, CellType, Any]] = []
        self._generators: list[tuple[str, torch.Generator, Tensor]] = []
        self._tensors: list[tuple[str, Tensor, int, bool]] = []
        self._visits: set[int] = set()
        for root in roots:
            self._follow("", root)

    def _follow(self, path: str, x: Any) -> None:
        if isinstance(x, IMMUTABLE_TYPES) or id(x) in self._visits:
            return
        self._visits.add(id(x))
        if type(x) in (dict, OrderedDict):
            self._containers.append((path, x, dict(x)))
            for key, value in x.items():
                if type(value) not in IMMUTABLE_TYPES:
                    self._follow(path if key in OF_MODULES else f"{path}.{key}".lstrip("."), value)
        elif isinstance(x, (nn.Module, SimpleNamespace)):
            self._follow(path, x.__dict__)
        elif type(x) in (list, set, deque, tuple):
            if not isinstance(x, tuple):
                self._containers.append((path, x, x.copy()))
            for n, value in enumerate(x):
                self._follow(f"{path}[{n}]", value)
        elif isinstance(x, FunctionType):
            for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
                try:
                    content = cell.cell_contents
                except ValueError:  # not bound yet
                    continue
                self._cells.append((f"{path}.{name}".lstrip("."), cell, content))
                self._follow(f"{path}.{name}".lstrip("."), content)
        elif isinstance(x, MethodType):
            self._follow(path, x.__self__)
        elif isinstance(x, partial):
            self._follow(path, (x.func, x.args, x.keywords))
        elif isinstance(x, torch.Generator):
            self._generators.append((path, x, x.get_state()))
        elif isinstance(x, Tensor) and not is_lazy(x) and not x.is_inference():
            self._tensors.append((path, x, x._version, x.requires_grad))

    def changed(self) -> str | None:
        """Return the path of the first changed entry, or None."""
        paths = chain(
            (_entry(path, x, copy) for path, x, copy in self._moved()),
            (path for path, cell, content in self._cells if not _same(cell.cell_contents, content)),
            (path for path, x, state in self._generators if not torch.equal(x.get_state(), state)),
            (path for path, x, version, _ in self._tensors if x._version != version),
        )
        differ = zip(self._copies, different((x, copy) for _, x, copy in self._copies), strict=True)
        return next(paths, None) or next((name for (name, _, _), differs in differ if differs), None)

    def _moved(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the changed containers; most of a module's are empty."""
        yield from ((path, x, copy) for path, x, copy in self._containers if (x or copy) and not _same_entries(x, copy))

    def restore(self) -> None:
        """Restore the recorded contents; tensors without a copy keep their values."""
        for _, x, copy in self._moved():
            x.clear()
            x.extend(copy) if isinstance(x, (list, deque)) else x.update(copy)
        for _, cell, content in self._cells:
            cell.cell_contents = content
        for _, x, state in self._generators:
            x.set_state(state)
        self.restore_flags()
        _write_back((x, copy) for _, x, copy in self._copies)

    def restore_flags(self) -> None:
        """Restore whether tensors require gradients, which is no change of what they hold."""
        for _, x, _, flag in self._tensors:
            if x.is_leaf and x.requires_grad is not flag:
                x.requires_grad_(flag)


OF_MODULES = ("_parameters", "_buffers", "_modules")
"""Dicts of a module whose entries are its attributes, as a user writes them."""


def _write_back(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write copies back into the tensors that have other values."""
    entries = list(pairs)
    for (x, copy), differs in zip(entries, different(entries), strict=True):
        if differs:
            write_values(x, copy)


def _marks(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return a fingerprint of each tensor, which almost every change of its entries changes, permutations and signs included.

    On the CPU a hash of its values. On a device, where reading it would wait for all that is queued, how often an operation has
    written into the tensor, which leaves out what is written through ``.data``.
    """
    parts = {name: strided_parts(x) for name, x in tensors.items()}
    return {name: tuple(_hash_of_values(x) if x.device.type == "cpu" else x._version for x in of) for name, of in parts.items()}


HASH_WORDS = 2**16
"""Words hashed at once: with weights and workspace 1.5 MiB. Half or four times as many took 1.2 to 2.5 times as long."""

HASH_BASE = 6364136223846793005
"""Odd multiplier between groups of words (Knuth, MMIX)."""


@cache
def _hash_weights() -> Tensor:
    """Return odd 64-bit integers, one for each word of a group: multiplication by them is one-to-one modulo 2^64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (HASH_WORDS,), generator=generator, device="cpu") * 2 + 1


def _hash_of_values(x: Tensor) -> int:
    """Return a 64-bit hash of the entries of a tensor and of their order, without a copy of the tensor.

    A word is multiplied by the weight of its position. The upper half of the product is then mixed into the lower half: without
    this step the signs of two float64 entries, which are top bits, would cancel modulo 2^64.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    >>> len({_hash_of_values(y) for y in (x, x.flip(0), -x, x * torch.tensor([1, -1, -1, 1]))})
    4
    """
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    flat = x.reshape(-1)
    is_whole = flat.numel() * flat.element_size() % 8 == 0 and flat.data_ptr() % 8 == 0
    kind = torch.int64 if is_whole else {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    weights, total = _hash_weights(), 0
    workspace = torch.empty(HASH_WORDS, dtype=torch.int64, device="cpu")
    for words in flat.view(kind).split(HASH_WORDS):
        mixed = torch.mul(words, weights[: len(words)], out=workspace[: len(words)])
        mixed.bitwise_xor_(mixed >> 32)
        total = (total * HASH_BASE + int(mixed.sum())) % 2**64
    return total


def _plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the leaf tensors among the attributes that are neither parameters nor buffers."""
    for name, m in module.named_modules():
        for key, x in m.__dict__.items():
            if isinstance(x, Tensor) and x.is_leaf and x.layout is torch.strided and not x.is_inference() and not x.is_meta:
                yield f"{name}.{key}".lstrip("."), x


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b)


def _entry(path: str, x: Any, copy: Any) -> str:
    """Return the path of the first entry of a dict that differs from its copy, else that of the container."""
    union = {**copy, **x} if isinstance(x, dict) else {}
    keys = (key for key in union if isinstance(key, str) and not (key in x and key in copy and _same(x[key], copy[key])))
    return f"{path}.{next(keys, '')}".strip(".")


def _same_entries(x: Any, copy: Any) -> bool:
    """Tell whether a container holds what its copy does; a dict in the same order."""
    if len(x) != len(copy):
        return False
    if isinstance(x, dict):
        values, copies = x.values(), copy.values()
        return all(map(is_, x, copy)) and (all(map(is_, values, copies)) or all(map(_same, values, copies)))
    return all(a in x for a in copy) if isinstance(x, set) else all(map(_same, x, copy))
