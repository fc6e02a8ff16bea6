"""A traced loss divided at checkpoints: values through which all paths pass are kept, and the others recomputed per segment.

In a transformer the checkpoints are the residual stream before and after each sublayer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from torch import Tensor

from hessiankit.tracing.trace import Application, Trace, ancestors_of_output, last_readers

WIDER = 4
"""Ratio of the bytes of the values since the last checkpoint to those that pass it from which a checkpoint pays."""


@dataclass(frozen=True)
class CheckpointSegment:
    """Applications between two checkpoints.

    Attributes:
        applications: Applications on the way to the loss, in order.
        entries: Values from before that are read here or later, parameters apart.
    """

    applications: tuple[Application, ...]
    entries: tuple[int, ...]

    def products(self, weights: Container[int | None]) -> tuple[int, ...]:
        """Return the outputs of products with weights, which cost more time to recompute than they save memory."""
        products = (a for a in self.applications if a.primitive.is_product and a.inputs[1] in weights)
        return tuple(a.output for a in products)


def split_at_checkpoints(trace: Trace, *, layers: bool) -> list[CheckpointSegment]:
    """Return the applications on the way to the output: one segment, or several between values through which all paths pass."""
    path = ancestors_of_output(trace)
    if not layers:
        return [CheckpointSegment(tuple(path), ())]
    parameter_ids, last = set(trace.parameters.values()), last_readers(path)
    segments: list[CheckpointSegment] = []
    live: set[int] = set()
    segment: list[Application] = []
    entries: tuple[int, ...] = ()
    count = 0
    for a in path:
        segment.append(a)
        live = {at for at in (*live, a.output) if last.get(at) not in (None, a.output)}
        count += size(trace.values[a.output])
        live_size = sum(size(trace.values[at]) for at in live)
        if len(live) == 1 and count > WIDER * live_size and not live & parameter_ids:
            segments.append(CheckpointSegment(tuple(segment), entries))
            segment, entries, count = [], tuple(live), 0
    return [*segments, CheckpointSegment(tuple(segment), entries)] if segment else segments


def size(x: Tensor) -> int:
    """Return the bytes of a tensor's entries."""
    return x.numel() * x.element_size()


def gather(a: Application, *values: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return an application's inputs, each from the first mapping that has it."""
    return tuple(None if at is None else next(v[at] for v in values if at in v) for at in a.inputs)
