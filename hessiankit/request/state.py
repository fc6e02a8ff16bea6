"""A module as it was when it was asked about: what its own call may change, and values that training does not move."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, OrderedDict, list, set)


class ModuleState:
    """Copies of a module's tensors, and of what its attributes are.

    Parameters, buffers and plain tensors among the attributes are held by what they are, with copies of their values;
    everything else (hooks, modes, counters, lists, dicts) as the objects that the attributes name.

    Args:
        module: The module; nothing of it is changed.

    Attributes:
        values: Copies of the values of parameters and buffers, by name.
        modes: Whether each submodule is in training mode.

    >>> layer = nn.Linear(2, 1)
    >>> state = ModuleState(layer)
    >>> with torch.no_grad():
    ...     _ = layer.weight.add_(1)
    >>> with state.present():
    ...     unmoved = torch.equal(layer.weight, state.values["weight"])
    >>> unmoved, torch.equal(layer.weight, state.values["weight"])
    (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = _Attributes(module)
        self.module = module
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.values = {name: x.detach().clone() for name, x in named.items()}
        self.modes = tuple(m.training for m in module.modules())
        self._tensors = {name: (x, self.values[name]) for name, x in named.items()}
        for name, x in self._attributes.plain_tensors():
            self._tensors.setdefault(name, (x, x.detach().clone()))

    @contextmanager
    def present(self, values: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Let the module be as it was, in memory of its own; after that, as it is now.

        Every parameter and buffer stays the object that it is, so that whoever holds one, a list, a closure, a hook, reads
        the same values; only the memory behind it is another.

        Args:
            values: Other values of some parameters, by name.
        """
        values = values or {}
        now = _Attributes(self.module)
        behind = [(x, x.data) for x, _ in self._tensors.values()]
        try:
            self._attributes.restore()
            for name, (x, copy) in self._tensors.items():
                x.data = values.get(name, copy)
            yield
        finally:
            for x, data in behind:
                x.data = data
            now.restore()

    def changed_tensor(self) -> str | None:
        """Return the parameter or buffer that has been given other values, or another tensor, since; None if none has."""
        for kind, found in (("parameter", self.module.named_parameters()), ("buffer", self.module.named_buffers())):
            for name, x in found:
                if name not in self.values or not _same_values(x, self.values[name]):
                    return f"{kind} {name!r}"
        return None

    def changed_attribute(self) -> str | None:
        """Return an attribute that is another object now, or whose entries are; None if there is none."""
        return self._attributes.changed()

    def restore(self) -> None:
        """Undo what the module's call has changed."""
        self._attributes.restore()
        for x, copy in self._tensors.values():
            if not _same_values(x, copy):
                x.data.copy_(copy)


class _Attributes:
    """What the attributes of a module and of its submodules are, and what their lists and dicts hold."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(name, m, dict(m.__dict__)) for name, m in module.named_modules()]
        self._entries = [
            (f"{name}.{key}".lstrip("."), x, x.copy())
            for name, _, attributes in self._held
            for key, x in attributes.items()
            if type(x) in _CONTAINERS
        ]
        self._flags = [(p, p.requires_grad) for p in module.parameters()]

    def plain_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the leaf tensors among the attributes that are neither parameters nor buffers."""
        for name, _, attributes in self._held:
            for key, x in attributes.items():
                if isinstance(x, Tensor) and x.is_leaf and x.layout is torch.strided:
                    yield f"{name}.{key}".lstrip("."), x

    def changed(self) -> str | None:
        """Return the first attribute that is not what it was, or None."""
        for name, m, attributes in self._held:
            for key in {**attributes, **m.__dict__}:
                if key not in attributes or key not in m.__dict__ or not _same(m.__dict__[key], attributes[key]):
                    return f"{name}.{key}".lstrip(".")
        return next((name for name, x, copy in self._entries if not _same_entries(x, copy)), None)

    def restore(self) -> None:
        """Give every attribute, list and dict what it had."""
        for _, m, attributes in self._held:
            m.__dict__.update(attributes)
            for key in m.__dict__.keys() - attributes.keys():
                del m.__dict__[key]
        for _, x, copy in self._entries:
            if not _same_entries(x, copy):
                x.clear()
                x.extend(copy) if isinstance(x, list) else x.update(copy)
        for p, flag in self._flags:
            if p.requires_grad is not flag:
                p.requires_grad_(flag)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b)


def _same_entries(x: Any, copy: Any) -> bool:
    if len(x) != len(copy):
        return False
    if isinstance(x, dict):
        return all(a is b and _same(x[a], copy[b]) for a, b in zip(x, copy, strict=True))
    return all(map(_same, x, copy)) if isinstance(x, list) else x == copy


def _same_values(x: Tensor, copy: Tensor) -> bool:
    if (x.shape, x.dtype, x.device) != (copy.shape, copy.dtype, copy.device):
        return False
    return torch.equal(x, copy) or bool(((x == copy) | ((x != x) & (copy != copy))).all())
