"""A batch in parts of some samples, each traced, with its paths and the expected cost of its sweeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hessiankit.engine.cost import SweepCost, sweep_cost
from hessiankit.engine.paths import Paths
from hessiankit.engine.product_rows import products_are_cheaper
from hessiankit.engine.sections import sections
from hessiankit.engine.sweep_plans import Section
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.loss_trace import LossTrace, loss_trace, samples_are_independent

WORKSPACE = 512 * 2**20
"""Bytes that derivatives may take beside a large matrix, which each part passes over once, or beside an operator."""

CHUNK = WORKSPACE // 8
"""Bytes that they may take beside a small one, where a further part repeats calls of torch alone."""

EXCESS = 4
"""Ratio to that limit above which a batch is split without a ``batch_size``; every part passes over the whole matrix."""


@dataclass(frozen=True)
class BatchPart:
    """Some samples of a batch.

    Attributes:
        batch: Loss of these samples.
        traced_loss: Trace of its loss.
        paths: Paths of the trace.
        sections: Sections of the paths with the least cost.
        cost: Cost of their sweeps.
        stop: Number of samples of the batch up to its end.
        loss: Share of the loss.
    """

    batch: BatchLoss
    traced_loss: LossTrace
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
    split: bool,
    gauss_newton: bool = False,
    is_diagonal: bool = False,
) -> Iterator[BatchPart]:
    """Yield a batch in parts of ``batch_size`` samples; with None, whole, or in parts if its derivatives take too much.

    Args:
        batch: One batch.
        batch_size: Samples of a part.
        split: Whether to split it there; see :func:`is_split`, which calls the module, outside :meth:`BatchLoss.at`.
        gauss_newton: Whether second derivatives count in the loss only.
        is_diagonal: Whether only the curvature of places with themselves is computed.
    """
    step, start = batch_size if split and batch_size else batch.n_samples, 0
    while start < batch.n_samples:
        stop = min(start + step, batch.n_samples)
        samples = batch.part(slice(start, stop)) if split else batch
        traced_loss = loss_trace(samples)
        paths = Paths(traced_loss.trace, traced_loss.loss_side() if gauss_newton else None, batch.share, by_column=is_diagonal)
        loss = float(traced_loss.trace.values[traced_loss.trace.output])
        plan = sections(paths, is_diagonal=is_diagonal)
        cost = sweep_cost(paths, plan, is_diagonal=is_diagonal)
        part = BatchPart(samples, traced_loss, paths, plan, cost, stop, loss)
        if batch_size is None and not split and part.bytes > EXCESS * _limit(batch) and _can_be_split(batch):
            split, step = True, max(1, _limit(batch) * batch.n_samples // part.bytes)
            continue
        yield part
        start = stop


def is_split(batch: BatchLoss, batch_size: int | None) -> bool:
    """Tell whether a batch is split into parts of ``batch_size`` samples."""
    return batch_size is not None and batch_size < batch.n_samples and _can_be_split(batch)


def _can_be_split(batch: BatchLoss) -> bool:
    """Tell whether the loss of a batch is a known sum over its samples."""
    return batch.n_samples > 1 and bool(batch.loss.name) and samples_are_independent(batch)


def _limit(batch: BatchLoss) -> int:
    return min(WORKSPACE, max(2 * CHUNK, batch.size**2 * batch.dtype.itemsize // 4))
