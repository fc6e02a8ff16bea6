"""Rows of the Hessian as products with unit vectors, for chains of many small operations such as recurrences.

A sweep treats every pair of places that parameters enter, T^2 / 2 of them for T places, in some operations of torch each.
Products run every operation of the trace three times for a block of vectors. Which of the two takes less is decided from shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hessiankit.engine.cost import CALL, MATMUL, SweepCost
from hessiankit.engine.linearisation import Linearisation, vectors_together
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.tracing.trace import Trace

COPIES = 12
"""Passes over an entry of a vector that is multiplied, and of its product."""

LONG = 64
"""Operations of a trace from which the two are compared; a sweep of fewer takes some tenths of a second at most."""

SETUP = 30
"""Calls of torch by which an operation is linearised and its derivatives are compared, for the chain of 60 layers and the
recurrences of ``tests/engine/cut_models.py``: with half of them the chain took products, 1.2 times the time of its sweeps."""

CLEARLY = 0.7
"""Share of a sweep's work below which products are taken: both are estimates."""


@dataclass(frozen=True)
class ProductCost:
    """Cost of all P products of a Hessian with unit vectors.

    Attributes:
        operations: Calls of torch.
        multiplications: Multiply-adds of products of matrices.
        passes: Passes over a number, by all operations.
        bytes: Bytes of the tangents and covectors of the vectors that are multiplied together.
    """

    operations: int
    multiplications: float
    passes: float
    bytes: int

    @property
    def numbers(self) -> float:
        """Cost without the calls, in units of one pass over a number."""
        return self.multiplications / MATMUL + self.passes

    @property
    def work(self) -> float:
        """Total cost, in units of one pass over a number."""
        return self.operations * CALL + self.numbers


def product_cost(trace: Trace, size: int, itemsize: int) -> ProductCost:
    """Return the cost of ``size`` products with the Hessian of a trace."""
    numbers = sum(trace.values[a.output].numel() for a in trace.applications)
    bytes_per_vector = itemsize * (3 * numbers + 2 * size)
    count = max(1, min(size, vectors_together(bytes_per_vector, len(trace.applications), numbers)))
    calls = len(trace.applications) * (SETUP + 3 * math.ceil(size / count))  # tangents, curvature, covectors
    calls += 2 * size * sum(a.primitive.calls - 1 for a in trace.applications)
    terms = (a.primitive.multiplications(trace.gather(a), trace.values[a.output]) for a in trace.applications)  # type: ignore[arg-type]
    multiplications, passes = 6.0 * sum(terms), 6.0 * numbers  # of one product: six times those of a call
    return ProductCost(calls, size * multiplications, size * (passes + COPIES * size), bytes_per_vector * count)


def products_are_cheaper(cost: SweepCost, trace: Trace, size: int, itemsize: int) -> bool:
    """Tell whether ``size`` products with the Hessian of a trace take clearly less than a sweep of some cost."""
    return len(trace.applications) >= LONG and product_cost(trace, size, itemsize).work <= CLEARLY * cost.work


def add_products(linearised: Linearisation, scale: float, matrix: SymmetricStorage) -> None:
    """Add the Hessian of a linearised loss, times a factor, to a symmetric matrix or to a panel of it."""
    size = max((rows.stop for rows in matrix.slices.values()), default=0)
    for start in range(matrix.top.start, matrix.top.stop, linearised.vectors_together):
        stop = min(start + linearised.vectors_together, matrix.top.stop)
        units = torch.zeros(stop - start, size, dtype=matrix.data.dtype, device=matrix.data.device)
        units.diagonal(start).fill_(1.0)
        rows = slice(start - matrix.top.start, stop - matrix.top.start)
        matrix.add_rows(rows, scale * linearised.product(units)[:, matrix.left])
