"""A batch in parts of some samples, each traced, with its paths and the expected cost of its sweeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hessiankit.engine.cost import SweepCost, sweep_cost
from hessiankit.engine.paths import Paths
from hessiankit.engine.product_rows import products_are_cheaper
from hessiankit.engine.sections import Section, sections
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.loss_trace import LossTrace, loss_trace, samples_are_independent

CHUNK = 64 * 2**20
"""Bytes that the derivatives of some samples may take beside a small matrix."""

MOST = 8 * CHUNK
"""The same beside a large one: each part passes over the whole matrix once."""

SEVERAL = 40
"""Steps, those of two transformer blocks, from which it is worth the forecasts whether all cuts, or none, take less."""

LARGE = 4
"""Times that, from which a batch is cut where nobody asked for it."""


@dataclass(frozen=True)
class BatchPart:
    """Some samples of a batch.

    Attributes:
        batch: Of these samples.
        traced: Its loss.
        paths: Of the trace.
        sections: Of the paths, those that take least.
        cost: Of their sweeps.
        stop: Samples of the batch up to its end.
        loss: Its share of the loss.
    """

    batch: BatchLoss
    traced: LossTrace
    paths: Paths
    sections: list[Section]
    cost: SweepCost
    stop: int
    loss: float

    @property
    def bytes(self) -> int:
        """Approximate bytes that the derivatives take at one time."""
        return self.cost.numbers * self.batch.dtype.itemsize

    @property
    def is_long(self) -> bool:
        """Whether products take less than sweeps."""
        return products_are_cheaper(self.cost, self.paths.trace, self.batch.size, self.batch.dtype.itemsize)


def parts(
    batch: BatchLoss,
    batch_size: int | None,
    *,
    cut: bool,
    gauss_newton: bool = False,
    alone: bool = False,
) -> Iterator[BatchPart]:
    """Yield a batch in parts of ``batch_size`` samples; with None, whole, or in parts if its derivatives take too much.

    Args:
        batch: One batch.
        batch_size: Samples of a part.
        cut: Whether to cut it there; see :func:`is_cut`, which calls the module and has to be outside :meth:`BatchLoss.at`.
        gauss_newton: Whether second derivatives count in the loss only.
        alone: Whether only curvature of places with themselves is asked for.
    """
    step, start = batch_size if cut and batch_size else batch.n_samples, 0
    while start < batch.n_samples:
        stop = min(start + step, batch.n_samples)
        samples = batch.part(slice(start, stop)) if cut else batch
        traced = loss_trace(samples)
        paths = Paths(traced.trace, traced.loss_side() if gauss_newton else None, batch.share, by_column=alone)
        loss = float(traced.trace.values[traced.trace.output])
        chosen, cost = cheapest(samples, paths, alone=alone)
        part = BatchPart(samples, traced, paths, chosen, cost, stop, loss)
        if batch_size is None and not cut and part.bytes > LARGE * _limit(batch) and _can_be_split(batch):
            cut, step = True, max(1, _limit(batch) * batch.n_samples // part.bytes)
            continue
        yield part
        start = stop


def cheapest(batch: BatchLoss, paths: Paths, *, alone: bool = False) -> tuple[list[Section], SweepCost]:
    """Return the sections of a trace with the cheapest sweeps, and their cost: with the cuts that pay, all cuts, or none."""
    chosen = sections(paths, alone=alone)
    cost = sweep_cost(paths, chosen, alone=alone)
    if alone or len(paths.steps) < SEVERAL or products_are_cheaper(cost, paths.trace, batch.size, batch.dtype.itemsize):
        return chosen, cost
    others = [sections(paths, cut=cut) for cut in (True, False)]
    costs = [(chosen, cost), *((other, sweep_cost(paths, other)) for other in others)]
    return min(costs, key=lambda pair: pair[1].work)


def is_cut(batch: BatchLoss, batch_size: int | None) -> bool:
    """Tell whether a batch is cut into parts of ``batch_size`` samples."""
    return batch_size is not None and batch_size < batch.n_samples and _can_be_split(batch)


def _can_be_split(batch: BatchLoss) -> bool:
    """Tell whether the loss of a batch is a known sum over its samples."""
    return batch.n_samples > 1 and bool(batch.loss.name) and samples_are_independent(batch)


def _limit(batch: BatchLoss) -> int:
    return min(MOST, max(2 * CHUNK, batch.size**2 * batch.dtype.itemsize // 4))
