"""A request for second derivatives: module, inputs, target, loss and parameters, checked before any work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.request.calling import Loss, named_tensors, read_outputs, samples
from hessiankit.request.selection import ByName, Params
from hessiankit.request.state import ModuleState
from hessiankit.support.containers import arguments
from hessiankit.support.torch_state import TORCH_LOCK, ordinary_path, preserved_random_states
from hessiankit.tracing.one_dtype import widest
from hessiankit.tracing.trace import address

__all__ = ["Loss", "OwnGradient", "Params", "Task"]


@dataclass(frozen=True)
class OwnGradient:
    """What torch computes by the module's own call.

    Attributes:
        loss: The loss.
        gradient: By the name of the parameter; None where autograd does not reach it.
    """

    loss: float
    gradient: dict[str, Tensor | None]


@dataclass(frozen=True)
class Task:
    """A validated request: one batch, a loss, and the parameters to differentiate.

    The module is the user's own and is called as the user calls it; values at which it is called are put into its parameters
    for that time (:meth:`ModuleState.present`). Data are copies, which the caller may overwrite.

    Attributes:
        module: The function under study.
        inputs: What it is called with: a tuple of positional arguments, or a dict of keyword arguments.
        target: What the loss compares with, if anything.
        loss: A name, a callable, or None where the module returns its loss.
        parameters: Name -> value, in the order of ``named_parameters()``.
        state: The module as it was.
        whole: The loss, a callable, reads an output object, so that the two are one function.
        by_logits: The loss, of the module's own or of the whole output, depends on the parameters by the logits alone.
        reference: Loss and gradient of the module's own call, which every result is compared with; None where that is off.
        first: The number of the first sample in the whole data, by which labels are drawn.
    """

    module: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]
    target: Any
    loss: Loss
    parameters: dict[str, Tensor]
    state: ModuleState
    whole: bool = False
    by_logits: bool = False
    reference: OwnGradient | None = None
    first: int = 0

    @property
    def slices(self) -> dict[str, slice]:
        """Columns of each parameter in the Hessian, in the order of ``named_parameters()``."""
        columns, start = {}, 0
        for name, value in self.parameters.items():
            columns[name] = slice(start, start + value.numel())
            start += value.numel()
        return columns

    @property
    def shapes(self) -> ByName[tuple[int, ...]]:
        """Shape of each parameter, by its name."""
        listed = {id(leaf): name for name, leaf in self.leaves.items()}
        names = self.module.named_parameters(remove_duplicate=False)
        also = {name: listed[id(p)] for name, p in names if id(p) in listed and name not in self.parameters}
        return ByName(((name, tuple(p.shape)) for name, p in self.parameters.items()), also)

    @property
    def size(self) -> int:
        """Number of parameters P."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The module's own parameters, by name, whether or not they are still part of it."""
        own = {name: x for name, x, _ in self.state.tensors()}
        return {name: own[name] for name in self.parameters}

    @property
    def still(self) -> dict[str, int]:
        """The rows of embeddings that torch leaves out of the gradient, by the name of the parameter."""
        with self.at():
            padded = {id(m.weight): m.padding_idx for m in self.module.modules() if isinstance(m, nn.Embedding)}
        rows = {name: padded.get(id(leaf)) for name, leaf in self.leaves.items()}
        return {name: row for name, row in rows.items() if row is not None}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of results: the widest of the parameters' types, at least float32."""
        return widest(p.dtype for p in self.parameters.values())

    @property
    def device(self) -> torch.device:
        """Device of the parameters and of results."""
        return next(iter(self.parameters.values())).device

    @property
    def kept(self) -> set[int]:
        """Addresses of the request's own memory: its copies of the data and of the module's tensors, or what these share."""
        data = (x for _, x in named_tensors((self.inputs, self.target)))
        return {address(x) for x in (*data, *(values for _, _, values in self.state.tensors()))}

    @contextmanager
    def at(self, parameters: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Let the module be as it was, at some values of its parameters, gradients on, and random states put back after that."""
        if parameters is None and self.state.is_present:
            with torch.enable_grad(), self.state.present():
                yield
            return
        with (
            TORCH_LOCK,
            preserved_random_states(self.module),
            torch.inference_mode(False),
            torch.enable_grad(),
            self.state.present(parameters),
        ):
            yield

    def run(self) -> Any:
        """Call the module on the inputs, as it is now."""
        positional, keywords = arguments(self.inputs)
        with ordinary_path(self.module):
            return self.module(*positional, **keywords)

    def read(self) -> Any:
        """Call the module as it is now, and return what the loss reads."""
        return read_outputs("hessian", self.loss, self.run())

    def part(self, rows: slice | Tensor) -> Task:
        """Return the same request for some samples."""
        inputs, target = samples((self.inputs, self.target), rows, self.batch)
        return replace(self, inputs=inputs, target=target, reference=None)

    @cached_property
    def batch(self) -> int:
        """Number of samples: the length of the first axis that inputs and target share, else of the first tensor."""
        lengths = [int(x.shape[0]) for _, x in named_tensors(self.inputs) if x.ndim]
        if isinstance(self.target, Tensor) and self.target.ndim and self.target.shape[0] in lengths:
            return int(self.target.shape[0])
        return lengths[0] if lengths else 1
