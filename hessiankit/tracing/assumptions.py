"""Operations that read one triangle of a matrix and take the other one for granted.

Their derivatives in torch belong to matrices that have the structure: that of ``cholesky(A)`` is the symmetric one, although
only the lower triangle of A is read. Only as functions of (A + A^T) / 2, or of the triangle itself, do value, first and
second derivative belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessiankit.errors import TraceError
from hessiankit.tracing.witnesses import rounding

aten = torch.ops.aten

SYMMETRIC: Mapping[str, int] = {
    "aten::cholesky": 0,
    "aten::linalg_cholesky": 0,
    "aten::linalg_cholesky_ex": 0,
    "aten::linalg_eigh": 0,
    "aten::_linalg_eigh": 0,
    "aten::linalg_eigvalsh": 0,
    "aten::linalg_ldl_factor": 0,
    "aten::linalg_ldl_factor_ex": 0,
}
"""Operation -> position of the argument that it assumes to be symmetric."""

HERMITIAN_OPTION: frozenset[str] = frozenset({"aten::linalg_pinv", "aten::linalg_matrix_rank"})
"""Operations that assume it of their first argument where they are called with ``hermitian=True``."""

TRIANGULAR: Mapping[str, int] = {"aten::cholesky_inverse": 0, "aten::cholesky_solve": 1}
"""Operation -> position of the factor, lower or with ``upper=True`` upper, of which it reads that triangle alone."""


@dataclass(frozen=True)
class Structure:
    """What an operation takes for granted of one argument.

    Attributes:
        position: Of the argument.
        kind: "symmetric", "lower triangular" or "upper triangular".
        projection: What makes any matrix one of that kind, and leaves those of that kind as they are.
        remedy: The same, as a user writes it.
    """

    position: int
    kind: str
    projection: Callable[[Tensor], Tensor]
    remedy: str

    def check(self, operation: Any, x: Tensor) -> None:
        """Raise TraceError if an argument is not of that kind, beyond rounding."""
        scale, off = (float(y.abs().max()) if y.numel() else 0.0 for y in (x, x - self.projection(x)))
        if off > rounding(x.dtype) * scale:
            raise TraceError(
                f"trace: {operation} takes its argument for {self.kind}, and that of shape {tuple(x.shape)} is off by {off:.2g} "
                f"(largest entry {scale:.2g}): torch reads one triangle, and its derivative is that of a {self.kind} matrix. "
                f"Pass {self.remedy}"
            )


def structure(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Structure | None:
    """Return the structure that an operation takes for granted of one of its arguments; None where there is none.

    >>> found = structure(aten.linalg_cholesky.default, (torch.eye(2),), {})
    >>> found.position, found.kind, found.projection(torch.tensor([[1.0, 0.0], [4.0, 3.0]])).tolist()
    (0, 'symmetric', [[1.0, 2.0], [2.0, 3.0]])
    """
    schema = getattr(operation, "_schema", None)
    name = "" if schema is None else schema.name
    if name in SYMMETRIC or (name in HERMITIAN_OPTION and _option(schema, "hermitian", args, kwargs)):
        return Structure(SYMMETRIC.get(name, 0), "symmetric", symmetrised, "(A + A.mT) / 2")
    if name in TRIANGULAR and _option(schema, "upper", args, kwargs):
        return Structure(TRIANGULAR[name], "upper triangular", torch.triu, "A.triu()")
    if name in TRIANGULAR:
        return Structure(TRIANGULAR[name], "lower triangular", torch.tril, "A.tril()")
    return None


def symmetrised(x: Tensor) -> Tensor:
    """Return (X + X^T) / 2."""
    return (x + x.mT) / 2


def _option(schema: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return a truth value that an operation is called with, by position, by keyword or by default."""
    for position, argument in enumerate(schema.arguments):
        if argument.name == name:
            return bool(args[position] if position < len(args) else kwargs.get(name, argument.default_value))
    return False
