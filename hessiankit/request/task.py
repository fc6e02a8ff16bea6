"""What a Hessian is asked of: a module, its inputs, a target, a loss and the parameters; checked before any work."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.errors import InputError, OutOfMemoryError
from hessiankit.request.calling import Loss, arguments, map_tensors, named_tensors, read_outputs
from hessiankit.request.losses import IGNORE_INDEX, LOSSES, same_as
from hessiankit.request.selection import Params, Selection, select
from hessiankit.request.validation import check_arguments, check_module, check_outputs, one_kind
from hessiankit.torch_state import one_at_a_time, ordinary_path

__all__ = ["IGNORE_INDEX", "LOSSES", "FrozenTask", "Loss", "Params", "Task", "check_memory", "freeze", "make_task"]


@dataclass(frozen=True)
class Task:
    """A validated request: one batch, a loss, and the parameters to differentiate.

    Attributes:
        module: The function under study.
        inputs: What it is called with, the keyword arguments last.
        target: What the loss compares with, if anything.
        loss: A name, a callable, or None where the module returns its loss.
        parameters: Name -> value, in the order of ``named_parameters()``.
        keywords: The names of the last inputs, which are passed by keyword.
        whole: The loss, a callable, reads an output object, so that the two are one function.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    target: Any
    loss: Loss
    parameters: dict[str, Tensor]
    keywords: tuple[str, ...] = ()
    whole: bool = False

    @property
    def slices(self) -> dict[str, slice]:
        """Columns of each parameter in the Hessian, in the order of ``named_parameters()``."""
        found, start = {}, 0
        for name, value in self.parameters.items():
            found[name] = slice(start, start + value.numel())
            start += value.numel()
        return found

    @property
    def size(self) -> int:
        """Number of parameters P."""
        return sum(p.numel() for p in self.parameters.values())

    def call(self, parameters: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return what the loss reads of the module's outputs, at some parameters."""
        return read_outputs("hessian", self.loss, self.outputs(parameters, *inputs))

    @one_at_a_time
    def outputs(self, parameters: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return what the module returns, at some parameters."""
        split = len(inputs) - len(self.keywords)
        keywords = dict(zip(self.keywords, inputs[split:], strict=True))
        with ordinary_path(), self._settings():
            return torch.func.functional_call(self.module, self._state(parameters), inputs[:split], keywords)

    def _state(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(parameters)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        yield

    def part(self, rows: slice) -> Task:
        """Return the same request for some samples."""
        batch = self.batch

        def cut(x: Tensor) -> Tensor:
            return x[rows] if x.ndim and x.shape[0] == batch else x

        return replace(self, inputs=map_tensors(cut, self.inputs), target=map_tensors(cut, self.target))

    @cached_property
    def batch(self) -> int:
        """Number of samples: the length of the first axis that inputs and target share, else of the first tensor."""
        lengths = [int(x.shape[0]) for _, x in named_tensors(self.inputs) if x.ndim]
        if isinstance(self.target, Tensor) and self.target.ndim and self.target.shape[0] in lengths:
            return int(self.target.shape[0])
        return lengths[0] if lengths else 1


@dataclass(frozen=True)
class FrozenTask(Task):
    """A task with copies of its data and of the module's parameters and buffers, which training does not move.

    Attributes:
        state: The copies, by name.
        modes: Whether each submodule was in training mode.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    modes: tuple[bool, ...] = ()

    def _state(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**self.state, **parameters}

    @contextmanager
    def _settings(self) -> Iterator[None]:
        modules = list(self.module.modules())
        now = [m.training for m in modules]
        for module, mode in zip(modules, self.modes, strict=True):
            module.training = mode
        try:
            yield
        finally:
            for module, mode in zip(modules, now, strict=True):
                module.training = mode


def freeze(task: Task, before: FrozenTask | None = None) -> FrozenTask:
    """Copy what a caller may overwrite: this batch, and the module's state unless an earlier batch has done so."""
    inputs, target = map_tensors(torch.clone, task.inputs), map_tensors(torch.clone, task.target)
    if before is not None:
        return replace(before, inputs=inputs, target=target, loss=task.loss, keywords=task.keywords, whole=task.whole)
    module = task.module
    state = {n: x.detach().clone() for n, x in [*module.named_parameters(), *module.named_buffers()]}
    parameters = {n: state[n] for n in task.parameters}
    modes = tuple(m.training for m in module.modules())
    return FrozenTask(module, inputs, target, task.loss, parameters, task.keywords, task.whole, state, modes)


def make_task(who: str, module: nn.Module, inputs: Any, target: Any, loss: Loss, params: Params | Selection = None) -> Task:
    """Check everything that can be checked before computing, and return the request for what is, or has been, selected.

    Raises:
        InputError: If an argument cannot be used: the message says which, what was seen and what to pass.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"{who}: expected a torch.nn.Module, got {type(module).__name__}")
    check_module(who, module)
    parameters = dict(params if isinstance(params, Selection) else select(who, module, params))
    dtype, device = one_kind(who, module, parameters)
    check_arguments(who, module, inputs, target, loss, dtype, device)
    positional, keyword = arguments(inputs)
    task = Task(module, (*positional, *keyword.values()), target, loss, parameters, tuple(keyword))
    outputs = check_outputs(who, task, inputs, device)
    named = same_as(loss, outputs, target) if callable(loss) else None  # whose samples can be treated apart
    return replace(task, loss=named or loss, whole=callable(loss) and not isinstance(outputs, Tensor))


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device, as far as it tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", "rb", buffering=0) as file:  # the third line of many
            found = re.search(rb"MemAvailable:\s*(\d+) kB", file.read(512))
    except OSError:
        found = None
    if found is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(found[1]) * 1024


def check_memory(who: str, size: int, dtype: torch.dtype, device: torch.device, *, copies: int = 2, workspace: int = 0) -> None:
    """Raise OutOfMemoryError if ``copies`` P x P matrices and the work space do not fit, before anything is allocated."""
    one = size * size * dtype.itemsize
    need, free = copies * one + workspace, available_memory(device)
    if need > free:
        raise OutOfMemoryError(
            f"{who}: {size:,} parameters make a {size:,} x {size:,} {dtype} matrix of {gib(one)}, {gib(need)} with work space, "
            f"but only {gib(free)} are free on {device}. Select parameters with params=[...], let hessian write it to disk with "
            "out=..., or use a smaller model."
        )


def gib(n: int) -> str:
    """Return bytes for people.

    >>> gib(3 * 2**29), gib(1500)
    ('1.5 GiB', '1.5 KiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n >= 0.1 * size:
            return f"{n / size:,.1f} {unit}"
    return f"{n / 2**10:,.1f} KiB"
