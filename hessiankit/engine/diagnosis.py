"""Errors for a Hessian that is not finite: the block, and the first operation with such a value or derivative."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.loss_trace import loss_trace
from hessiankit.support.errors import InputError
from hessiankit.tracing.trace import Application, Trace


def without_effect(caller: str, names: Iterable[str]) -> InputError:
    """Return the error for parameters that the loss does not depend on."""
    return InputError(
        f"{caller}: none of the parameters ({', '.join(map(repr, names))}) has an effect on the loss; the module does not use "
        "them, or detaches what they enter"
    )


def not_finite(caller: str, i: str, j: str, batches: Sequence[BatchLoss]) -> InputError:
    """Return the error for a block that is not finite."""
    return InputError(f"{caller}: the block ({i!r}, {j!r}) is NaN or infinite{origin_of_any(batches)}. {REMEDY}")


REMEDY = (
    "Keep the inputs away from such a point (an eps inside a square root or a norm, no division by zero), "
    "or use a wider dtype if a value overflows"
)


def origin(trace: Trace) -> str | None:
    """Return a phrase that names the first operation whose value, adjoint or second derivative is not finite, or None."""
    for a in trace.applications:
        if bool(torch.isnan(trace.values[a.output]).any()):
            return f"{_name_of(a)} returns NaN"
    adjoints = trace.adjoints()
    for a in reversed(trace.applications):
        if a.output in adjoints and _has_infinite_slope(trace, a, adjoints[a.output]):
            return f"{_name_of(a)} has no finite derivative at its input{_zeros(trace, a)}"
    for a in reversed(trace.applications):
        if a.output in adjoints and not a.primitive.is_linear and _has_infinite_curvature(trace, a, adjoints[a.output]):
            return f"{_name_of(a)} has no finite second derivative at its input{_zeros(trace, a)}"
    return None


def origin_of_any(batches: Sequence[BatchLoss]) -> str:
    """Return a clause that names the first such operation of some requests, or ""."""
    with torch.no_grad():
        for batch in batches:
            phrase = origin(loss_trace(batch).trace)
            if phrase is not None:
                return f": the operation {phrase}"
    return ""


def _has_infinite_slope(trace: Trace, a: Application, adjoint: Tensor) -> bool:
    if not bool(torch.isfinite(adjoint).all()):
        return False
    covectors = a.primitive.vjp(trace.gather(a), adjoint.unsqueeze(0))  # type: ignore[arg-type]
    ones = torch.ones_like(adjoint).unsqueeze(0)  # an adjoint of zero may hide a slope that is infinite
    covectors = (*covectors, *a.primitive.vjp(trace.gather(a), ones))  # type: ignore[arg-type]
    moves = [at is not None and at in trace.moving for at in a.inputs] * 2
    return any(m and c is not None and not bool(torch.isfinite(c).all()) for m, c in zip(moves, covectors, strict=True))


def _has_infinite_curvature(trace: Trace, a: Application, adjoint: Tensor) -> bool:
    inputs = trace.gather(a)
    tangents = tuple(
        torch.ones_like(x).unsqueeze(0) if x is not None and at in trace.moving else None
        for at, x in zip(a.inputs, inputs, strict=True)
    )
    covectors = a.primitive.curvature(inputs, adjoint, tangents)  # type: ignore[arg-type]
    return any(c is not None and not bool(torch.isfinite(c).all()) for c in covectors)


def _zeros(trace: Trace, a: Application) -> str:
    """Return a clause on the first row of zeros of an input, the usual reason, or ""."""
    for x in trace.gather(a):
        if x is not None and x.is_floating_point() and x.ndim and bool((x == 0).all(-1).any()):
            row = [int(i) for i in (x == 0).all(-1).nonzero()[0]]
            return f", where row {row[0] if len(row) == 1 else tuple(row)} is all zeros" if row else ", which is all zeros"
    return ""


def _name_of(a: Application) -> str:
    kind = getattr(a.primitive, "name", "") or type(a.primitive).__name__
    return f"{a.name!r} ({kind})"
