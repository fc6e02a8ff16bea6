"""Rows of the Hessian as products with unit vectors, for chains of many small operations such as recurrences.

A sweep treats every pair of places that parameters enter, T^2 / 2 of them for T places, in some operations of torch each.
Products run every operation of the trace three times for a block of vectors. Which of the two takes less is decided from shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from derivations.fused_attention import ScaledDotProductAttention
from hessiankit.engine.jacobians import find_sites, is_product
from hessiankit.engine.linearisation import CACHED, Linearisation
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.tracing.trace import Trace

LONG = 64
"""Operations of a trace from which the two are compared; a sweep of fewer takes some tenths of a second at most."""

CALL = 8_000
"""Passes over a number that take as long as one call of a small operation of torch; measured, like the constants below."""

PAIR = 15
"""Calls of torch that a sweep makes for a pair of places: curvature pulled back, and a block written."""

STEP = 12
"""Calls of torch that a sweep makes for an operation of the trace."""

WRITES = 5
"""Passes over an entry of the block of two parameters for each pair of places that adds to it."""

COPIES = 12
"""Passes over an entry of a vector that is multiplied, and of its product."""

ROUNDS = 3
"""How often a product runs an operation: tangents, curvature, covectors."""

MATMUL = 8
"""Multiply-adds of a product of matrices that take as long as a pass over a number."""


@dataclass(frozen=True)
class ProductCost:
    """Cost of all P products of a Hessian with unit vectors.

    Attributes:
        operations: Calls of torch.
        multiplications: Multiply-adds of products of matrices.
        passes: Passes over a number, by all operations.
        bytes: Of the tangents and covectors of the vectors that are multiplied together.
    """

    operations: int
    multiplications: float
    passes: float
    bytes: int

    @property
    def work(self) -> float:
        """All of it, in passes over a number."""
        return self.operations * CALL + self.multiplications / MATMUL + self.passes


def product_work(trace: Trace) -> tuple[float, float]:
    """Return the multiply-adds of a product with the Hessian, six times those of a call, and its passes over a number."""
    multiplications, passes = 0.0, 0.0
    for a in trace.applications:
        inputs, entries = trace.gather(a), trace.values[a.output].numel()
        passes += 6.0 * entries
        if isinstance(a.primitive, ScaledDotProductAttention):
            multiplications += 12.0 * entries * inputs[1].shape[-2]  # type: ignore[union-attr]
        elif is_product(a.primitive):
            multiplications += 6.0 * entries * inputs[0].shape[-1]  # type: ignore[union-attr]
    return multiplications, passes


def product_cost(trace: Trace, size: int, itemsize: int) -> ProductCost:
    """Return the cost of ``size`` products with the Hessian of a trace."""
    each = itemsize * (3 * sum(trace.values[a.output].numel() for a in trace.applications) + 2 * size)
    together = max(1, min(size, CACHED // each))
    calls = ROUNDS * len(trace.applications) * math.ceil(size / together)
    multiplications, passes = product_work(trace)
    return ProductCost(calls, size * multiplications, size * (passes + COPIES * size), each * together)


def sweep_work(trace: Trace, itemsize: int, *, diagonal: bool = False) -> float:
    """Return a lower bound of the work of a sweep, in passes over a number.

    It counts operations, the pairs of places with curvature between them, and parameters that are taken whole, each entry of
    which is pushed and pulled as by a product.

    Args:
        trace: Of the loss.
        itemsize: Bytes of a number.
        diagonal: Whether only the diagonal is asked for: of parameters with several places no block is written, and those with
            one place take work that is linear in the number of places, which is left out.
    """
    every = find_sites(trace)
    sites = {at: site for at, site in every.items() if site.jacobians}
    if diagonal:
        uses = Counter(jacobian.parameter for site in sites.values() for jacobian in site.jacobians)
        sites = {at: site for at, site in sites.items() if any(uses[jacobian.parameter] > 1 for jacobian in site.jacobians)}
    numbers = {at: n for n, at in enumerate(sites)}
    shapes = [trace.values[at].shape for at in sites]
    sizes = [0 if diagonal else sum(jacobian.size for jacobian in site.jacobians) for site in sites.values()]
    before = dict.fromkeys(trace.parameters.values(), 0)  # by value: the places that move it, as bits
    linked = [0] * len(sites)
    for a in trace.applications:
        moved = 0
        for at in a.inputs:
            moved |= before.get(at, 0) if at is not None else 0
        if a.output in numbers:
            moved |= 1 << numbers[a.output]
        if not a.primitive.is_linear:
            for n in _bits(moved):
                linked[n] |= moved
        before[a.output] = moved
    parameters, whole = set(trace.parameters.values()), set[int]()
    for a in trace.applications:
        covered = every[a.output].covered if a.output in every else ()
        whole.update(at for k, at in enumerate(a.inputs) if at in parameters and k not in covered)
    total = float(STEP * CALL * len(trace.applications))
    total += product_cost(trace, sum(trace.values[at].numel() for at in whole), itemsize).work
    for n, others in enumerate(linked):
        for m in _bits(others & ((1 << n + 1) - 1)):
            rows = min(shape[:-1].numel() for shape in (shapes[n], shapes[m]))
            total += PAIR * CALL + rows * shapes[n][-1] * shapes[m][-1] + sizes[n] * sizes[m] * (WRITES + rows / MATMUL)
    return total


def _bits(mask: int) -> list[int]:
    """Return the positions of the bits that are set.

    >>> _bits(0b1101)
    [0, 2, 3]
    """
    return [n for n, bit in enumerate(reversed(bin(mask)[2:])) if bit == "1"]


def products_are_cheaper(trace: Trace, size: int, itemsize: int, *, diagonal: bool = False) -> bool:
    """Tell whether ``size`` products with the Hessian of a trace take less than a sweep does at least."""
    if len(trace.applications) < LONG:
        return False
    return product_cost(trace, size, itemsize).work <= sweep_work(trace, itemsize, diagonal=diagonal)


class ProductRows:
    """The Hessian of a linearised loss, times a factor, to be added to a symmetric matrix or to panels of it.

    Args:
        linearised: The loss.
        scale: The factor.
    """

    def __init__(self, linearised: Linearisation, scale: float) -> None:
        self.linearised, self.scale = linearised, scale

    def replay(self, matrix: SymmetricStorage) -> None:
        """Add the rows that a matrix stores."""
        size = max((rows.stop for rows in matrix.slices.values()), default=0)
        step = max(1, CACHED // self.linearised.bytes_per_vector)
        for start in range(matrix.top.start, matrix.top.stop, step):
            stop = min(start + step, matrix.top.stop)
            units = torch.zeros(stop - start, size, dtype=matrix.data.dtype, device=matrix.data.device)
            units.diagonal(start).fill_(1.0)
            rows = slice(start - matrix.top.start, stop - matrix.top.start)
            matrix.add_rows(rows, self.scale * self.linearised.product(units)[:, matrix.left])
