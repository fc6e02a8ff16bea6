"""A batch linearised once, so that products with its Hessian, or with the Gauss-Newton part, cost two sweeps each.

With t_v the tangent of a value along a vector V (pushed forward by each primitive's jvp) and lambda_v its adjoint, the
product is what the second-order adjoint of every value sums to at the parameters:

    bar(inputs of v)  +=  D phi_v^T bar(v)  +  [lambda_v . D^2 phi_v] t(inputs of v),        H V = bar(parameters).

The Gauss-Newton part keeps the second term only in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hessiankit.curvature import loss_trace, normalizer_of
from hessiankit.sweep import adjoints
from hessiankit.task import Task
from hessiankit.trace import Trace


@dataclass(frozen=True)
class FrozenTask(Task):
    """A task with copies of the module's parameters and buffers, which training does not move."""

    state: dict[str, Tensor]

    def call(self, parameters: Any, *inputs: Any) -> Tensor:
        return torch.func.functional_call(self.module, {**self.state, **parameters}, inputs)


def freeze(task: Task, before: FrozenTask | None) -> FrozenTask:
    """Copy what a caller may overwrite: this batch, and the module's state unless an earlier batch has done so."""
    inputs = tuple(x.clone() if isinstance(x, Tensor) else x for x in task.inputs)
    target = None if task.target is None else task.target.clone()
    if before is not None:
        return replace(before, inputs=inputs, target=target)
    state = {n: x.detach().clone() for n, x in [*task.module.named_parameters(), *task.module.named_buffers()]}
    return FrozenTask(task.module, inputs, target, task.loss, {n: state[n] for n in task.parameters}, state)


class Linearisation:
    """One batch: its traced loss with every value and adjoint that products need."""

    def __init__(self, task: Task, *, gauss_newton: bool) -> None:
        self.count = normalizer_of(task)
        traced = loss_trace(task, self.count)
        self.trace = traced.trace
        self.names = tuple(task.parameters)
        self.loss = float(self.trace.values[self.trace.output])
        lambdas = adjoints(self.trace)
        reached = _downstream(self.trace, traced.output) if gauss_newton else set(lambdas)
        self.steps = [a for a in self.trace.applications if a.output in lambdas]
        self.adjoints = {
            a.output: lambdas[a.output] for a in self.steps if not a.primitive.is_linear and a.output in reached
        }  # of the primitives that bend, the only ones whose adjoint is read again
        self.gradient = self._collect({at: x.unsqueeze(0) for at, x in lambdas.items()}, 1)[0]
        self.bytes_per_vector = 3 * sum(_bytes(self.trace.values[a.output]) for a in self.steps) + 2 * _bytes(self.gradient)

    def product(self, rows: Tensor) -> Tensor:
        """Return H V as rows: (S, P) to (S, P)."""
        return self._collect(self._sweep_back(self._sweep_forward(rows)), rows.shape[0])

    def _sweep_forward(self, rows: Tensor) -> dict[int, list[Tensor | None]]:
        """Push tangents through; return those that enter the primitives that bend, by the primitive's output."""
        tangents: dict[int, Tensor] = {}
        start = 0
        for name in self.names:
            at = self.trace.parameters[name]
            value = self.trace.values[at]
            tangents[at] = rows[:, start : start + value.numel()].reshape(-1, *value.shape)
            start += value.numel()
        last_use = {at: i for i, a in enumerate(self.steps) for at in a.inputs if at is not None}
        entering: dict[int, list[Tensor | None]] = {}
        for i, a in enumerate(self.steps):
            moved = [None if at is None else tangents.get(at) for at in a.inputs]
            moves = any(t is not None for t in moved)
            if moves and a.output in self.adjoints:
                entering[a.output] = moved
            if moves and a.output != self.trace.output:
                tangents[a.output] = a.primitive.jvp(self.trace.gather(a), moved)  # type: ignore[arg-type]
            for at in {at for at in a.inputs if at is not None and last_use[at] == i}:
                tangents.pop(at, None)
        return entering

    def _sweep_back(self, entering: dict[int, list[Tensor | None]]) -> dict[int, Tensor]:
        """Pull second-order adjoints back; return those of the parameters."""
        bars: dict[int, Tensor] = {}
        for a in reversed(self.steps):
            inputs = self.trace.gather(a)
            bar, moved = bars.pop(a.output, None), entering.pop(a.output, None)
            if bar is not None:
                self._add(bars, a.inputs, a.primitive.vjp(inputs, bar))  # type: ignore[arg-type]
            if moved is not None:
                self._add(bars, a.inputs, a.primitive.curvature(inputs, self.adjoints[a.output], moved))  # type: ignore[arg-type]
        return bars

    def _add(self, bars: dict[int, Tensor], ids: tuple[int | None, ...], covectors: tuple[Tensor | None, ...]) -> None:
        for at, covector in zip(ids, covectors, strict=True):
            if at is not None and at in self.trace.moving and covector is not None:
                bars[at] = bars[at] + covector if at in bars else covector

    def _collect(self, found: dict[int, Tensor], width: int) -> Tensor:
        parts = []
        for name in self.names:
            at = self.trace.parameters[name]
            value = self.trace.values[at]
            covector = found.get(at)
            parts.append(value.new_zeros(width, value.numel()) if covector is None else covector.reshape(width, -1))
        return torch.cat(parts, 1)


def _downstream(trace: Trace, value: int | None) -> set[int]:
    reached = {value}
    for a in trace.applications:
        if any(at in reached for at in a.inputs if at is not None):
            reached.add(a.output)
    return {at for at in reached if at is not None and at != value}


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
