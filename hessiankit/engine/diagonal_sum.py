"""The diagonal of the Hessian of one batch or many, each parameter by the cheapest exact route.

Parameters whose sites move the loss row by row: :mod:`hessiankit.engine.row_diagonal`. The others together:
:mod:`hessiankit.engine.diagonal_accumulation`; where that would take too many of them whole, products with the Hessian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hessiankit.engine.assembly import CHUNK, WORKSPACE
from hessiankit.engine.diagnosis import without_effect
from hessiankit.engine.diagonal_accumulation import (
    BoundedForwardSweep,
    Entries,
    TooLarge,
    accumulate_diagonal,
    accumulation_work,
    diagonal_by_column,
    is_by_column,
    overlap,
)
from hessiankit.engine.jacobians import ParameterJacobian
from hessiankit.engine.linearisation import Batch, Linearisation, linearise
from hessiankit.engine.problem.handshake import Handshake
from hessiankit.engine.problem.loss_trace import LossTrace, loss_trace, normalizer_of, samples_are_independent
from hessiankit.engine.problem.own_call import own_value, reached
from hessiankit.engine.problem.task import Task
from hessiankit.engine.product_rows import product_work, products_are_cheaper
from hessiankit.engine.row_diagonal import RowDiagonal
from hessiankit.support.errors import TraceError

DENSE = 5  # speed of a multiply-add in the matrix products of an accumulation, relative to one in a product with H
ROOM = 4 * CHUNK  # bytes that tangents of the samples treated at once may take, about


class TooCostly(Exception):
    """The diagonal would take longer than the allowed number of products with the Hessian."""

    def __init__(self, products: float) -> None:
        super().__init__(products)
        self.products = products


class DiagonalSum:
    """The diagonals of several batches, each times its share, added up.

    Args:
        who: Name that starts an error message.
        tasks: One request a batch, for the same parameters.
        parts: What each batch's loss is multiplied by.
        batch_size: Samples of a chunk, or None.
        progress: Called with (samples done, samples in all).
        most: Raise :class:`TooCostly` where a batch would take longer than so many products with its Hessian.

    Attributes:
        entries: The diagonal so far.
        cost: Products with the Hessian that take as long, for the costliest batch; rows that stay apart count nothing.
        loss: The loss.
        fallbacks: Operations that were differentiated automatically.
    """

    def __init__(
        self,
        who: str,
        tasks: Sequence[Task],
        parts: Sequence[float],
        batch_size: int | None,
        progress: Callable[[int, int], None] | None,
        most: float = math.inf,
    ) -> None:
        self.who, self.most, self.cost = who, most, 0.0
        self.tasks, self.parts, self.batch_size, self.progress = tasks, parts, batch_size, progress
        self.entries = Entries(tasks[0].slices, tasks[0].dtype, tasks[0].device)
        self.samples, self.done = sum(task.batch for task in tasks), 0
        self.loss, self.fallbacks = 0.0, list[str]()

    def run(self, *, gauss_newton: bool) -> None:
        """Add all batches."""
        has_effect = False
        for task, share in zip(self.tasks, self.parts, strict=True):
            try:
                handshake = Handshake(task)
                with task.at(), torch.no_grad():
                    value = self._add(task, share, handshake, gauss_newton=gauss_newton)
                handshake.close()
                has_effect = True
            except TraceError:
                if reached(task):
                    raise
                value = own_value(task)  # nothing that is asked for has an effect on this batch
            self.loss += share * value
        if not has_effect:
            raise without_effect(self.who, self.tasks[0].parameters)

    def _add(self, task: Task, share: float, handshake: Handshake, *, gauss_newton: bool) -> float:
        """Add one batch and return its loss: parameters that move it row by row, then the others."""
        normalizer, value = normalizer_of(task), 0.0
        left: dict[str, Tensor] | None = None
        step = self.batch_size or max(1, int(task.batch * ROOM / _bytes(task)))
        for part in _parts(task, step if _splits(task, step) else task.batch):
            traced = loss_trace(part, normalizer)
            if products_are_cheaper(traced.trace, task.size, task.dtype.itemsize, diagonal=True):
                self._announce(task.size)
                value += float(traced.trace.values[traced.trace.output])
                self.fallbacks += traced.trace.fallbacks
                kept: dict[str, Any] = {"count": normalizer, "handshake": handshake, "traced": traced}
                self._products(Linearisation(part, gauss_newton=gauss_newton, **kept), task, share)
                self._report(part.batch)
                continue
            left = self._add_rowwise(traced, share, left, handshake, gauss_newton=gauss_newton)
            value += float(traced.trace.values[traced.trace.output])
            self.fallbacks += traced.trace.fallbacks
            if not left:
                self._report(part.batch)
        if left:
            self._add_coupled(replace(task, parameters=left, reference=None), share, normalizer, gauss_newton=gauss_newton)
        return value

    def _report(self, samples: int) -> None:
        self.done += samples
        if self.progress is not None:
            self.progress(self.done, self.samples)

    def _add_coupled(self, task: Task, share: float, normalizer: float, *, gauss_newton: bool) -> None:
        """Add the other parameters: by sweeps, or by products where a sweep would take too many of them whole."""
        before = self.entries.data.clone(), self.done
        try:
            self._sweep(task, share, normalizer, gauss_newton=gauss_newton)
        except TooLarge:
            self.entries.data, self.done = before
            self._announce(task.size)
            self._products(linearise(task, gauss_newton=gauss_newton), task, share)
            self._report(task.batch)

    def _announce(self, products: float) -> None:
        self.cost = max(self.cost, products)
        if self.cost > self.most:
            raise TooCostly(self.cost)

    def _products(self, batch: Batch, task: Task, share: float) -> None:
        """Add the diagonal of a linearised batch by products with unit vectors."""
        size = task.size
        step = max(1, min(WORKSPACE // batch.bytes_per_vector, CHUNK // (size * task.dtype.itemsize)))
        found = torch.empty(size, dtype=task.dtype, device=task.device)
        for at in torch.arange(size, device=task.device).split(step):
            units = found.new_zeros(at.numel(), size)
            units.diagonal(int(at[0])).fill_(1.0)
            found[at] = batch.product(units).diagonal(int(at[0]))
        for name, rows in task.slices.items():
            self.entries.add(name, None, share * found[rows])

    def _sweep(self, task: Task, share: float, normalizer: float, *, gauss_newton: bool) -> None:
        """Add the diagonal of some parameters by a forward sweep and reverse accumulation."""
        step, start, splits = self.batch_size or 1, 0, _splits(task, self.batch_size or 1)
        while start < task.batch:
            rows = slice(start, min(start + step, task.batch) if splits else task.batch)
            traced = loss_trace(task.part(rows) if splits else task, normalizer)
            sweep = BoundedForwardSweep(traced.trace, traced.output if gauss_newton else None, scale=share)
            sweep.run()
            if start == 0:
                products = accumulation_work(sweep) / (DENSE * sum(product_work(traced.trace)))
                if products > task.size:
                    raise TooLarge
                self._announce(products)
            accumulate_diagonal(sweep, self.entries)
            if self.batch_size is None:  # from the bytes of the first sample
                step = max(1, CHUNK * (rows.stop - rows.start) // max(sweep.peak_bytes, 1))
            self._report(rows.stop - start)
            start = rows.stop

    def _add_rowwise(
        self, traced: LossTrace, share: float, left: dict[str, Tensor] | None, handshake: Handshake, *, gauss_newton: bool
    ) -> dict[str, Tensor]:
        """Add the parameters whose sites move the loss row by row, unless an earlier part could not; return the others."""
        trace = traced.trace
        try:
            sweep = BoundedForwardSweep(trace, traced.output if gauss_newton else None, scale=share)
        except TooLarge:
            handshake.add(trace, trace.adjoints())
            return dict(self.tasks[0].parameters)
        handshake.add(trace, sweep.adjoints, share)
        jacobians: dict[str, list[tuple[int, ParameterJacobian]]] = {name: [] for name in trace.parameters}
        for at, site in sweep.sites.items():
            if at in sweep.adjoints:
                for jacobian in site.jacobians:
                    jacobians[jacobian.parameter].append((at, jacobian))
        whole = {jacobian.parameter for vertex in sweep.vertices.values() for jacobian in vertex.jacobians} | set(left or ())
        once = {n: found for n, found in jacobians.items() if n not in whole and found and _each_once([u for _, u in found])}
        columns = RowDiagonal(sweep).columns(sorted({at for found in once.values() for at, _ in found}))
        for name, found in once.items():
            if all(at in columns for at, _ in found):
                for at, u in found:
                    self.entries.add(name, u.at, diagonal_by_column(u, u, columns[at].reshape(-1, 1, 1, columns[at].shape[1])))
            else:
                whole.add(name)
        reaching = {n for n, at in trace.parameters.items() if at in sweep.adjoints}
        return {n: p for n, p in self.tasks[0].parameters.items() if n in reaching and (n in whole or n not in once)}


def _splits(task: Task, step: int) -> bool:
    return step < task.batch and isinstance(task.loss, str) and samples_are_independent(task)


def _parts(task: Task, step: int) -> Iterator[Task]:
    if step >= task.batch:
        yield task
        return
    for start in range(0, task.batch, step):
        yield task.part(slice(start, start + step))


def _bytes(task: Task) -> float:
    """Bytes of the tangents of all samples, if the module is a transformer block: its width is about sqrt(P / 12)."""
    tensors = [x for x in torch.utils._pytree.tree_leaves((task.inputs, task.target)) if isinstance(x, Tensor)]
    width, itemsize = math.sqrt(task.size / 12) + 1, task.dtype.itemsize
    return 8 * itemsize * width * (1 + sum(x.numel() * (1 if x.is_floating_point() else width) for x in tensors))


def _each_once(jacobians: list[ParameterJacobian]) -> bool:
    """Tell whether each entry of a parameter is reached by one of its jacobians, and from one column."""
    return all(is_by_column(u, u) for u in jacobians) and not any(
        overlap(u.at, v.at) for n, u in enumerate(jacobians) for v in jacobians[:n]
    )
