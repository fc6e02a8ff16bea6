"""A batch linearised once, so that products with its Hessian, or with the Gauss-Newton part, cost two sweeps each.

With t_v the tangent of a value along a vector V (pushed forward by each primitive's jvp) and lambda_v its adjoint, the
product is what the second-order adjoint of every value sums to at the parameters:

    bar(inputs of v)  +=  D phi_v^T bar(v)  +  [lambda_v . D^2 phi_v] t(inputs of v),        H V = bar(parameters).

The Gauss-Newton part keeps the second term only in the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from derivations.linearised import Linearised
from derivations.primitive import Covectors
from hessiankit.errors import TraceError
from hessiankit.request.handshake import Handshake
from hessiankit.request.loss_trace import loss_trace, normalizer_of
from hessiankit.request.own_call import own_value, reached
from hessiankit.request.task import Task
from hessiankit.tracing.trace import Trace

Bars: TypeAlias = "dict[int, Tensor]"  # covectors (S, *value.shape) by the value's id

CACHED = 10 * 2**20
"""Bytes of tangents that vectors of a block treated together may take on a CPU: more leave its caches."""


@dataclass(frozen=True)
class _Step:
    """One application on the way to the loss.

    Attributes:
        primitive: What it applies, linearised.
        inputs: Ids of the inputs that move; None for the others.
        output: Id of the output.
        bends: Whether its second derivative counts.
        pushes: Whether anything that bends reads the tangent of its output.
        frees: Values whose tangents nobody reads after it.
    """

    primitive: Linearised
    inputs: tuple[int | None, ...]
    output: int
    bends: bool
    pushes: bool
    frees: tuple[int, ...]


class Linearisation:
    """One batch: its traced loss, with all that products need and that no vector changes."""

    def __init__(self, task: Task, *, gauss_newton: bool) -> None:
        self.count = normalizer_of(task)
        traced = loss_trace(task, self.count)
        self.trace = traced.trace
        self.parameters = [(at, self.trace.values[at]) for at in map(self.trace.parameters.__getitem__, task.parameters)]
        self.sizes = [value.numel() for _, value in self.parameters]
        self.loss = float(self.trace.values[self.trace.output])
        with task.at(), torch.no_grad():
            self.steps, bars = self._linearise(_downstream(self.trace, traced.output) if gauss_newton else None)
        self.gradient = self._collect(bars, torch.empty(1, task.size, dtype=task.dtype, device=task.device))[0]
        self._task = task if self.trace.fallbacks else None  # its copies need not live as long as the products otherwise
        handshake = Handshake(task)
        handshake.add(self.trace, {at: bar[0] for at, bar in bars.items()})
        handshake.close()
        self.bytes_per_vector = 3 * sum(_bytes(self.trace.values[s.output]) for s in self.steps) + 2 * _bytes(self.gradient)

    def product(self, rows: Tensor) -> Tensor:
        """Return H V as rows: (S, P) to (S, P)."""
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        step = max(1, len(rows) if rows.device.type != "cpu" else CACHED // self.bytes_per_vector)
        with self._at_the_point():
            for some, into in zip(rows.split(step), out.split(step), strict=True):
                self._collect(self._sweep_back(self._sweep_forward(some.contiguous())), into)
        return out

    @contextmanager
    def _at_the_point(self) -> Iterator[None]:
        """Without gradients; where torch differentiates, at the parameters that the module had, which its graph may read."""
        if self._task is None:
            with torch.inference_mode():
                yield
        else:
            with self._task.at(), torch.no_grad():
                yield

    def _linearise(self, bending: set[int] | None) -> tuple[list[_Step], Bars]:
        """Sweep back with the adjoints; return the steps and the gradient. Those that bend have their outputs in ``bending``."""
        out = self.trace.values[self.trace.output]
        adjoints: Bars = {self.trace.output: torch.ones_like(out).unsqueeze(0)}
        steps: list[_Step] = []
        read: set[int] = set()  # values whose tangents something that bends reads, now or through others
        seen: set[int] = set()
        for a in reversed(self.trace.applications):
            adjoint = adjoints.pop(a.output, None)
            if adjoint is None:
                continue
            inputs = tuple(at if at in self.trace.moving else None for at in a.inputs)
            present = {at for at in inputs if at is not None}
            counts = not a.primitive.is_linear and (bending is None or a.output in bending)
            at_point = a.primitive.linearise(
                self.trace.gather(a),  # type: ignore[arg-type]
                adjoint[0] if counts else None,
                [at is not None for at in inputs],
            )
            steps.append(_Step(at_point, inputs, a.output, at_point.bends, a.output in read, tuple(present - seen)))
            if at_point.bends or a.output in read:
                read |= present
            seen |= present
            _add(adjoints, inputs, at_point.pull(adjoint))
        return steps[::-1], adjoints

    def _sweep_forward(self, rows: Tensor) -> dict[int, list[Tensor | None]]:
        """Push tangents through; return those that enter the primitives that bend, by the primitive's output."""
        pieces = zip(self.parameters, rows.split(self.sizes, 1), strict=True)
        tangents: dict[int | None, Tensor] = {at: piece.reshape(-1, *x.shape).to(x.dtype) for (at, x), piece in pieces}
        entering: dict[int, list[Tensor | None]] = {}
        for step in self.steps:
            moved = [tangents.get(at) for at in step.inputs]
            if step.bends:
                entering[step.output] = moved
            if step.pushes:
                tangents[step.output] = step.primitive.push(moved)
            for at in step.frees:
                tangents.pop(at, None)
        return entering

    def _sweep_back(self, entering: dict[int, list[Tensor | None]]) -> Bars:
        """Pull second-order adjoints back; return those of the parameters."""
        bars: Bars = {}
        for step in reversed(self.steps):
            bar, moved = bars.pop(step.output, None), entering.pop(step.output, None)
            if bar is not None or moved is not None:
                _add(bars, step.inputs, step.primitive.pull(bar, moved))
        return bars

    def _collect(self, found: Bars, out: Tensor) -> Tensor:
        """Write the covectors of the parameters into rows (S, P)."""
        for (at, value), part in zip(self.parameters, out.split(self.sizes, 1), strict=True):
            covector = found.get(at)
            if covector is None:
                part.zero_()
            elif len(part) == 1:  # a transposed matrix is copied several times faster than a stack of one
                part.view(value.shape).copy_(covector[0])
            else:
                part.view(-1, *value.shape).copy_(covector)
        return out


class Constant:
    """One batch whose loss does not depend on the parameters: what a :class:`Linearisation` of it would be."""

    def __init__(self, task: Task) -> None:
        self.trace = Trace()
        self.loss = own_value(task)
        self.gradient = torch.zeros(task.size, dtype=task.dtype, device=task.device)
        self.bytes_per_vector = _bytes(self.gradient)

    def product(self, rows: Tensor) -> Tensor:
        """Return zeros, (S, P)."""
        return torch.zeros_like(rows, memory_format=torch.contiguous_format)


def linearise(task: Task, *, gauss_newton: bool) -> Linearisation | Constant:
    """Linearise one batch.

    Raises:
        TraceError: If torch cannot trace the module.
    """
    try:
        return Linearisation(task, gauss_newton=gauss_newton)
    except TraceError:
        if reached(task):
            raise
    return Constant(task)


def _add(bars: Bars, ids: tuple[int | None, ...], covectors: Covectors) -> None:
    for at, covector in zip(ids, covectors, strict=True):
        if at is not None and covector is not None:
            bars[at] = bars[at] + covector if at in bars else covector


def _downstream(trace: Trace, value: int | None) -> set[int]:
    reached = {value}
    for a in trace.applications:
        if any(at in reached for at in a.inputs if at is not None):
            reached.add(a.output)
    return {at for at in reached if at is not None and at != value}


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
