"""The sweep back: the derivative of a traced scalar with respect to every value on the way to it."""

from __future__ import annotations

import torch
from torch import Tensor

from hessiankit.tracing.trace import Trace


def adjoints(trace: Trace, scale: float = 1.0) -> dict[int, Tensor]:
    """Return the derivative of ``scale`` times the trace's scalar output with respect to every moving value, by id."""
    out = trace.values[trace.output]
    found: dict[int, Tensor] = {trace.output: torch.full_like(out, scale)}
    for application in reversed(trace.applications):
        adjoint = found.get(application.output)
        if adjoint is None:
            continue
        inputs = trace.gather(application)
        pulled = application.primitive.vjp(inputs, adjoint.unsqueeze(0))  # type: ignore[arg-type]
        for at, covector in zip(application.inputs, pulled, strict=True):
            if at is not None and at in trace.moving and covector is not None:
                found[at] = found[at] + covector[0] if at in found else covector[0]
    return found
