"""The diagonal of the Hessian of one batch or many: by sweeps, or by products with unit vectors where these take less."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hessiankit.engine.assembly import CHUNK, WORKSPACE, is_split, next_step
from hessiankit.engine.cost import sweep_cost
from hessiankit.engine.diagnosis import without_effect
from hessiankit.engine.diagonal_rows import read_diagonal
from hessiankit.engine.jacobians import ParameterJacobian
from hessiankit.engine.linearisation import Linearisation
from hessiankit.engine.paths import Paths
from hessiankit.engine.problem.handshake import Handshake
from hessiankit.engine.problem.loss_trace import loss_trace, normalizer_of
from hessiankit.engine.problem.own_call import own_value, reached
from hessiankit.engine.problem.task import Task
from hessiankit.engine.product_rows import product_cost, products_are_cheaper
from hessiankit.support.errors import TraceError


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
        self.entries = torch.zeros(tasks[0].size, dtype=tasks[0].dtype, device=tasks[0].device)
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
        """Add one batch and return its loss."""
        normalizer, splits, value, start = normalizer_of(task), is_split(task, self.batch_size), 0.0, 0
        step = (self.batch_size or 1) if splits else task.batch
        while start < task.batch:
            rows = slice(start, min(start + step, task.batch))
            part = task.part(rows) if splits else task
            traced = loss_trace(part, normalizer)
            value += float(traced.trace.values[traced.trace.output])
            self.fallbacks += traced.trace.fallbacks
            paths = Paths(traced.trace, traced.output if gauss_newton else None, share, by_column=True)
            cost, itemsize = sweep_cost(paths, alone=True), task.dtype.itemsize
            products = product_cost(paths.trace, task.size, itemsize)
            if products_are_cheaper(cost, paths.trace, task.size, itemsize):
                self._announce(task.size)
                kept: dict[str, Any] = {"count": normalizer, "handshake": handshake, "traced": traced}
                self._products(Linearisation(part, gauss_newton=gauss_newton, **kept), task, share)
            else:
                self._announce(task.size * cost.coupled / products.work)
                handshake.add(paths.trace, paths.adjoints, share)
                read_diagonal(paths, self._add_entries)
            if self.batch_size is None:  # from the bytes of the first sample
                step = next_step(task, rows.stop - start, cost.numbers * itemsize)
            self.done += rows.stop - start
            start = rows.stop
            if self.progress is not None:
                self.progress(self.done, self.samples)
        return value

    def _add_entries(self, u: ParameterJacobian, values: Tensor) -> None:
        into = self.entries[self.tasks[0].slices[u.parameter]]
        for span, entries in u.runs():
            into[entries] += values[span].to(into.dtype)

    def _announce(self, products: float) -> None:
        self.cost = max(self.cost, products)
        if self.cost > self.most:
            raise TooCostly(self.cost)

    def _products(self, batch: Linearisation, task: Task, share: float) -> None:
        """Add the diagonal of a linearised batch by products with unit vectors."""
        step = max(1, min(WORKSPACE // batch.bytes_per_vector, CHUNK // (task.size * task.dtype.itemsize)))
        for at in torch.arange(task.size, device=task.device).split(step):
            units = self.entries.new_zeros(at.numel(), task.size)
            units.diagonal(int(at[0])).fill_(1.0)
            self.entries[at] += share * batch.product(units).diagonal(int(at[0]))
