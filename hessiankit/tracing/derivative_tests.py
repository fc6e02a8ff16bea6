"""Equality tests of two derivatives of one function: on generic vectors, and by central differences where they differ.

A linear or bilinear map that vanishes on vectors drawn at random vanishes; one pair of them therefore tests the whole map.

torch defines the derivative of some functions for structured matrices only: that of ``cholesky(A)`` is symmetric, although the
value reads only the lower triangle of A. Value, first and second derivative are consistent only as functions of (A + A^T) / 2, or
of the triangle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hessiankit.primitives.primitive import Covectors, Inputs
from hessiankit.support.errors import TraceError

STEPS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 1e-5, 1e-6)
"""Steps of central differences, relative to the size of what moves: a larger one truncates or meets kinks, a smaller rounds."""
FEWER_STEPS = (1e-3, 1e-5)
"""Steps that show whether two routes that agree are both off."""
WEIGHTS = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
"""Weights of f(x + k h) - f(x - k h), k = 1 ... 4, in the first derivative to order eight."""
FEWER_WEIGHTS = (2 / 3, -1 / 12)
"""Weights of the first derivative to order four."""


def rounding(eps: float) -> float:
    """Return the relative difference between two routes that rounding to a unit of ``eps`` explains.

    >>> [f"{rounding(torch.finfo(kind).eps):.2g}" for kind in (torch.float64, torch.float32, torch.bfloat16)]
    ['1.5e-08', '0.00035', '0.25']
    """
    return max(eps**0.5, 32 * eps)


SEED = 0x3C6EF372FE94F82B
"""Added to the seeds of generic vectors: no parameter that was drawn from a seed of its user's is one of these vectors."""


def generic(like: Tensor, seed: int) -> Tensor:
    """Return numbers drawn at random, the same ones in every process, of the shape, dtype and device of a tensor."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(SEED + seed), dtype=torch.float64, device="cpu")
    return numbers.to(device=like.device, dtype=like.dtype)


def tangents_of(inputs: Inputs, seed: int) -> tuple[Tensor, ...]:
    """Return one generic tangent for each input, as large as the input."""
    return tuple(generic(x, seed + k) * _size(x) for k, x in enumerate(inputs))


def difference(a: Covectors, b: Covectors) -> float:
    """Return the largest difference of two lists of tensors, relative to the largest entry of the tensor that it is in.

    None stands for zero; a tensor of rounding errors beside larger ones counts as zero too. NaN where one is not finite.

    >>> difference((torch.tensor([1.0, 4.0]), None), (torch.tensor([2.0, 4.0]), torch.zeros(3))) < 0.25
    True
    """
    largest = max((_largest(x) for x in (*a, *b) if x is not None), default=0.0)
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        present = [z for z in (x, y) if z is not None and z.numel()]
        if not present:
            continue
        gap_tensor = present[0] - present[1] if len(present) == 2 else present[0]
        floor = torch.finfo(gap_tensor.dtype).eps ** 0.25 * largest
        scale = max(_largest(z) for z in present) + floor
        if scale != 0.0:
            gap = _largest(gap_tensor) / scale
            worst = gap if worst == worst and not gap <= worst else worst  # NaN stays
    return worst


def adjoint_difference(u: Tensor, tangent: Tensor, tangents: Sequence[Tensor], covectors: Covectors) -> float:
    """Return | <u, J t> - <J^T u, t> |, relative to the sum of the absolute terms of each."""
    left = [u * tangent]
    right = [c * t for c, t in zip(covectors, tangents, strict=True) if c is not None]
    return _sums_apart(left, right)


def asymmetry(first: Sequence[Tensor], second: Sequence[Tensor], to_first: Covectors, to_second: Covectors) -> float:
    """Return | <s, C t> - <t, C s> | for tangents s, t and a contraction C, relative to the terms."""
    left = [s * c for s, c in zip(first, to_second, strict=True) if c is not None]
    right = [t * c for t, c in zip(second, to_first, strict=True) if c is not None]
    return _sums_apart(left, right)


def batch_difference(action: Callable[..., Covectors], vectors: Sequence[Tensor]) -> tuple[Covectors, float]:
    """Return an action's results for single vectors v, and the largest relative difference from those of a batch (2 v, v)."""
    single = tuple(None if c is None else c[0] for c in action(*(v[None] for v in vectors)))
    batch = action(*(torch.stack([2 * v, v]) for v in vectors))
    rows = [tuple(None if c is None else c[k] / (2 - k) for c in batch) for k in (0, 1)]
    return single, max(difference(row, single) for row in rows)


def central_differences(
    function: Callable[[tuple[Tensor, ...]], Covectors],
    inputs: Inputs,
    tangents: Sequence[Tensor],
    steps: Sequence[float] = STEPS,
    weights: Sequence[float] = WEIGHTS,
) -> tuple[Covectors, float]:
    """Return the derivative of a function along tangents, and the difference between two steps of different length.

    Where the function is not defined around the point, nothing, with infinity.

    >>> found, open_ = central_differences(lambda x: (x[0] ** 3,), (torch.tensor([2.0]).double(),), (torch.ones(1).double(),))
    >>> abs(float(found[0]) - 12) < 1e-9, open_ < 1e-9
    (True, True)
    """
    return settled(estimates(function, inputs, tangents, steps, weights))


def estimates(
    function: Callable[[tuple[Tensor, ...]], Covectors],
    inputs: Inputs,
    tangents: Sequence[Tensor],
    steps: Sequence[float] = STEPS,
    weights: Sequence[float] = WEIGHTS,
) -> list[Covectors]:
    """Return central differences of a function along tangents with several steps, from large to small."""
    largest = max((_largest(t) / _size(x) for x, t in zip(inputs, tangents, strict=True)), default=1.0) or 1.0
    results = []
    for step in steps:
        with suppress(Exception):  # whatever a module raises outside its domain, as for a matrix that is not positive definite
            results.append(_along(function, inputs, tangents, step / largest, weights))
    return results


def settled(results: Sequence[Covectors]) -> tuple[Covectors, float]:
    """Return the estimate that differs least from the one before it, and that difference; () and infinity for a single one."""
    pairs = [(difference(successor, earlier), successor) for earlier, successor in pairwise(results)]
    gap, best = min(pairs, key=lambda pair: pair[0] if pair[0] == pair[0] else float("inf"), default=(float("inf"), ()))
    return best, gap


def _along(
    function: Callable[[tuple[Tensor, ...]], Covectors],
    inputs: Inputs,
    tangents: Sequence[Tensor],
    step: float,
    weights: Sequence[float],
) -> Covectors:
    def at(distance: float) -> Covectors:
        return function(tuple(x + distance * t for x, t in zip(inputs, tangents, strict=True)))

    def terms() -> Iterator[Covectors]:
        for k, weight in enumerate(weights, 1):
            pairs = zip(at(k * step), at(-k * step), strict=True)
            yield tuple(None if a is None or b is None else (a - b) * (weight / step) for a, b in pairs)

    return tuple(None if column[0] is None else torch.stack(column).sum(0) for column in zip(*terms(), strict=True))


def _sums_apart(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    sums = [sum(float(x.double().sum()) for x in side) for side in (left, right)]
    scale = max(sum(float(x.double().abs().sum()) for x in side) for side in (left, right))
    return abs(sums[0] - sums[1]) / scale if scale != 0.0 else 0.0


def _size(x: Tensor) -> float:
    return _largest(x) or 1.0


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


aten = torch.ops.aten

SYMMETRIC = frozenset((
    "aten::cholesky", "aten::linalg_cholesky", "aten::linalg_cholesky_ex", "aten::linalg_eigh", "aten::_linalg_eigh",
    "aten::linalg_eigvalsh", "aten::linalg_ldl_factor", "aten::linalg_ldl_factor_ex",
))  # fmt: skip
"""Operations that assume their first argument to be symmetric."""

HERMITIAN_OPTION = frozenset({"aten::linalg_pinv", "aten::linalg_matrix_rank"})
"""Operations that do so where they are called with ``hermitian=True``."""

TRIANGULAR: Mapping[str, int] = {"aten::cholesky_inverse": 0, "aten::cholesky_solve": 1}
"""Operation -> position of the factor, lower or with ``upper=True`` upper, of which it reads that triangle alone."""


@dataclass(frozen=True)
class AssumedStructure:
    """Structure of one argument that an operation assumes.

    Attributes:
        position: Position of the argument.
        kind: "symmetric", "lower triangular" or "upper triangular".
        projection: Projection of a matrix onto that kind, the identity on matrices of that kind.
        remedy: Source code of the projection for the error message.
    """

    position: int
    kind: str
    projection: Callable[[Tensor], Tensor]
    remedy: str

    def check(self, operation: Any, x: Tensor) -> None:
        """Raise TraceError if an argument lacks the structure, beyond rounding."""
        scale, distance = (float(y.abs().max()) if y.numel() else 0.0 for y in (x, x - self.projection(x)))
        if distance > rounding(torch.finfo(x.dtype).eps) * scale:
            raise TraceError(
                f"trace: {operation} takes its argument for {self.kind}, and that of shape {tuple(x.shape)} is off by "
                f"{distance:.2g} (largest entry {scale:.2g}): torch reads one triangle, and its derivative is that of a "
                f"{self.kind} matrix. Pass {self.remedy}"
            )


def structure(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AssumedStructure | None:
    """Return the structure that an operation assumes of one of its arguments; None where there is none.

    >>> found = structure(aten.linalg_cholesky.default, (torch.eye(2),), {})
    >>> found.position, found.kind, found.projection(torch.tensor([[1.0, 0.0], [4.0, 3.0]])).tolist()
    (0, 'symmetric', [[1.0, 2.0], [2.0, 3.0]])
    """
    schema = getattr(operation, "_schema", None)
    name = "" if schema is None else schema.name
    if name in SYMMETRIC or (name in HERMITIAN_OPTION and _option(schema, "hermitian", args, kwargs)):
        return AssumedStructure(0, "symmetric", lambda A: (A + A.mT) / 2, "(A + A.mT) / 2")
    if name in TRIANGULAR and _option(schema, "upper", args, kwargs):
        return AssumedStructure(TRIANGULAR[name], "upper triangular", torch.triu, "A.triu()")
    if name in TRIANGULAR:
        return AssumedStructure(TRIANGULAR[name], "lower triangular", torch.tril, "A.tril()")
    return None


def _option(schema: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return a truth value that an operation is called with, by position, by keyword or by default."""
    for position, argument in enumerate(schema.arguments):
        if argument.name == name:
            return bool(args[position] if position < len(args) else kwargs.get(name, argument.default_value))
    return False
