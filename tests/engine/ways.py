"""How the table of ways is written: cases, the gradient that a user would take, its central differences, and a picture of a state."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from curvature_reference import by_differences, draw
from torch import Tensor, nn

CALLS = r"two calls|called again|earlier calls|each call|depends on .*calls"
"""What a refusal says of a loss that differs from call to call."""


@dataclass(frozen=True)
class Case:
    """A module as its user has it, what it is called with, and the context that the calls are made in."""

    module: nn.Module
    inputs: Any
    target: Any
    loss: Any = "mse"
    params: Any = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Way:
    """A way in which a module reaches, changes or hides a parameter or a state.

    Attributes:
        make: Makes the case anew, the same each time.
        refused: What the message of a refusal has to match; None where the result has to be right.
        right: Whether the right result is taken.
        reference: Makes the case to be differentiated instead: with tensors in place of what autograd takes for constant.
        fresh: Whether a call changes what the next one finds, so that each one is made on a new case.
        verified: Whether ``check`` has two references for it.
    """

    make: Callable[[], Case]
    refused: str | None = None
    right: bool = True
    reference: Callable[[], Case] | None = None
    fresh: bool = False
    verified: bool = True


WAYS: dict[str, Way] = {}


def way(name: str, make: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Enter a function that makes a case, or a module for the data of :func:`case`, into the table under a name.

    A function with an argument ``constant`` is called with False for the user's case and with True for the reference.
    Without a function it is a decorator of one.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        frozen = "constant" in signature(function).parameters
        if frozen:
            options["reference"] = partial(_made, function, constant=True)
        assert name not in WAYS, name
        WAYS[name] = Way(partial(_made, function, **({"constant": False} if frozen else {})), **options)
        return function

    return enter if make is None else enter(make)


def forward(name: str, has: Any = None, buffers: Any = None, **options: Any) -> Callable[..., Any]:
    """Enter the decorated f(self, x) as the forward of a module with these attributes and buffers."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        def make() -> nn.Module:
            net = Net(function, **deepcopy(has or {}))
            for buffer, value in deepcopy(buffers or {}).items():
                net.register_buffer(buffer, value)
            return net

        way(name, make, **options)
        return function

    return enter


def _made(function: Callable[..., Any], **options: Any) -> Case:
    torch.manual_seed(0)  # what modules are initialised with
    made = function(**options)
    return made if isinstance(made, Case) else case(made)


def refused(name: str, cause: str, make: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Enter a way that has to be refused: there is no right result."""
    return way(name, make, refused=cause, right=False, **options)


def case(module: nn.Module, inputs: Any = None, target: Any = None, **options: Any) -> Case:
    """Return a case with four samples of two entries, and as many to compare with."""
    return Case(module, draw(4, 2) if inputs is None else inputs, draw(4, 2, seed=2) if target is None else target, **options)


class Net(nn.Module):
    """tanh(x W^T + b) * v by default, or f(self, x); P = 8. Modules among its attributes become generic too."""

    def __init__(self, f: Callable[..., Any] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.l = nn.Linear(2, 2)
        self.v = nn.Parameter(torch.zeros(2))
        for name, value in attributes.items():
            setattr(self, name, value)
        generic(self)
        if f is not None:
            self.f = f

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.f(self, *inputs, **named)

    @staticmethod
    def f(self: Net, x: Tensor) -> Tensor:
        return self.l(x).tanh() * self.v


def generic(module: nn.Module) -> nn.Module:
    """Move every parameter to a generic value in float64."""
    generator = torch.Generator().manual_seed(0)
    for p in module.double().parameters():
        p.data.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.1)
    return module


def mse(z: Tensor, target: Tensor) -> Tensor:
    return (z - target).square().mean()


def leaves_of(this: Case) -> list[nn.Parameter]:
    """Return the module's own parameters that are asked for."""
    wanted = None if this.params is None else set(this.params)
    return [p for n, p in this.module.named_parameters() if (p.requires_grad if wanted is None else n in wanted)]


def value_of(this: Case) -> Tensor:
    """Return the loss as a user computes it: call the module, call the loss."""
    if isinstance(this.inputs, Mapping):
        outputs = this.module(**this.inputs)
    else:
        outputs = this.module(*(this.inputs if isinstance(this.inputs, tuple) else (this.inputs,)))
    return outputs if this.loss is None else (mse if this.loss == "mse" else this.loss)(outputs, this.target)  # type: ignore[no-any-return]


def hessian_of(way: Way) -> Tensor:
    """Return the Hessian of a way by differences of the user's own gradient."""
    make = way.reference or way.make
    current = [make()]

    def leaves() -> list[nn.Parameter]:
        if way.fresh:
            current[0] = make()
        return leaves_of(current[0])

    def loss() -> Tensor:
        with current[0].around():
            return value_of(current[0])

    return by_differences(leaves, loss)


def picture(*things: Any) -> list[Any]:
    """Return all that can be seen of modules, tensors and containers, and the states of the random numbers: for ``==``."""
    state: Any = np.random.get_state()  # noqa: NPY002
    states = [torch.get_rng_state().tolist(), random.getstate(), str(state[0]), state[1].tobytes(), state[2:]]
    seen: dict[int, Any] = {}
    return [*states, torch.get_default_dtype(), torch.is_grad_enabled(), *(_picture(thing, seen) for thing in things)]


def _picture(x: Any, seen: dict[int, Any]) -> Any:
    if x is None or isinstance(x, (bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)):
        return x if x == x else "nan"
    if id(x) in seen:
        return "seen", id(x)
    seen[id(x)] = x
    return type(x).__name__, id(x), *(_picture(part, seen) if deep else part for deep, part in _parts(x))


def _parts(x: Any) -> Iterator[tuple[bool, Any]]:
    """Yield what is to be compared: (whether it is looked into, it)."""
    if isinstance(x, Tensor):
        yield False, (str(x.dtype), tuple(x.shape), str(x.device), x.requires_grad)
        if not x.is_meta:
            yield False, (x.data_ptr(), x.detach().as_subclass(Tensor).contiguous().numpy().tobytes())
        if x.is_leaf:
            yield True, x.grad
        hooks = (getattr(x, name, None) or {} for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        yield False, [(key, id(hook)) for registered in hooks for key, hook in registered.items()]
        yield False, list(getattr(x, "__dict__", {}))
        yield from ((True, value) for key, value in getattr(x, "__dict__", {}).items() if not key.endswith("_hooks"))
    elif isinstance(x, torch.Generator):
        yield False, x.get_state().tolist()
    elif isinstance(x, Mapping):
        yield False, [key if isinstance(key, (str, int)) else id(key) for key in x]
        yield from ((True, value) for value in x.values())
    elif isinstance(x, (list, tuple, set, deque)):
        yield from ((True, part) for part in x)
    elif isinstance(x, FunctionType):
        yield from ((True, cell.cell_contents) for cell in x.__closure__ or ())
    elif isinstance(x, MethodType):
        yield True, x.__self__
    elif isinstance(x, partial):
        yield from ((True, part) for part in (x.func, *x.args, *x.keywords.values()))
    elif isinstance(x, (nn.Module, SimpleNamespace)):
        yield False, list(vars(x))
        yield from ((True, value) for value in vars(x).values())
