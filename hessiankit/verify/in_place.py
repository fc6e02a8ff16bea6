"""Temporary changes of a user's module in place: other values, another dtype; afterwards its tensors are restored bit for bit.

The Parameter objects stay the same ones throughout, so whatever reaches them (a list, a closure, a hook, the loss) sees what
the module sees. Their storage is exchanged through ``.data``, never written into: putting back is exact and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from hessiankit.request.state import Held
from hessiankit.support.torch_state import preserved_buffers, preserved_random_states


@contextmanager
def _holding(values: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let tensors hold other values of their shape for a while; a ``.grad`` of another dtype is set aside."""
    pairs = list(values)
    states = [(x, x.data, x.grad, x.requires_grad) for x, _ in pairs]
    try:
        for x, value in pairs:
            if value.dtype != x.dtype:
                x.grad = None  # its dtype has to be that of the tensor
            _hold(x, value.detach())
        yield
    finally:
        for x, data, gradient, requires_grad in states:
            _hold(x, data)
            x.requires_grad_(requires_grad)
            x.grad = gradient


@contextmanager
def placed(values: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let tensors hold other values of their shape for a while, and require gradients; a ``.grad`` of another dtype is set aside.

    >>> p = nn.Parameter(torch.zeros(2))
    >>> with placed([(p, torch.ones(2))]):
    ...     inside = p.detach().clone()
    >>> inside.tolist(), p.tolist()
    ([1.0, 1.0], [0.0, 0.0])
    """
    pairs = list(values)
    with _holding(pairs):
        for x, _ in pairs:
            x.requires_grad_()
        yield


@contextmanager
def preserved(module: nn.Module, *objects: Any) -> Iterator[None]:
    """Restore what a call of a module and its loss can change: random states, attributes, lists, closures, values of buffers.

    >>> layer = nn.Linear(1, 1)
    >>> layer.seen = []
    >>> with preserved(layer):
    ...     layer.seen.append(1)
    ...     layer.calls = 1
    ...     _ = layer.train(False)
    >>> layer.seen, hasattr(layer, "calls"), layer.training
    ([], False, True)
    """
    state = Held(module, *objects)
    with preserved_random_states(module), preserved_buffers(module):
        try:
            yield
        finally:
            state.restore()


@contextmanager
def converted(owners: Iterable[Any], dtype: torch.dtype | None) -> Iterator[None]:
    """Hold every floating tensor of some modules in another dtype: parameters, buffers, and tensors among the attributes.

    Complex ones take the complex dtype of the same precision. What is no module is passed over; None converts nothing.

    >>> layer = nn.Linear(2, 1)
    >>> with converted([layer], torch.float64):
    ...     inside = layer.weight.dtype
    >>> inside, layer.weight.dtype
    (torch.float64, torch.float32)
    """
    if dtype is None:
        yield
        return
    tensors = {id(x): x for owner in owners if isinstance(owner, nn.Module) for x in _tensors(owner)}
    pairs = []
    for x in tensors.values():
        new_dtype = dtype.to_complex() if x.is_complex() and dtype.itemsize > 2 else dtype
        if (x.is_floating_point() or x.is_complex()) and x.dtype != new_dtype:
            pairs.append((x, x.data.to(new_dtype)))
    with _holding(pairs):
        yield


def _hold(x: Tensor, data: Tensor) -> None:
    """Let a tensor hold other data; a sparse one takes the place of another object, since its memory cannot be exchanged."""
    if x.layout is torch.strided:
        x.data = data
    else:
        torch.utils.swap_tensors(x, data.clone())


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the leaf tensors that a module and its children hold, in whatever containers."""
    for part in module.modules():
        attributes = {name: value for name, value in vars(part).items() if name not in ("_modules", "_forward_hooks")}
        for x in _pytree.tree_leaves(attributes, is_leaf=lambda value: isinstance(value, (Tensor, nn.Module))):
            if isinstance(x, Tensor) and x.is_leaf and not is_lazy(x) and not x.is_inference():
                yield x
