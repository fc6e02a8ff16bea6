"""The sweep back: the derivative of a traced scalar with respect to every value on the way to it."""

from __future__ import annotations

import torch
from torch import Tensor

from hessiankit.tracing.trace import Trace


def adjoints(trace: Trace, scale: float = 1.0) -> dict[int, Tensor]:
    """Return the derivative of ``scale`` times the trace's scalar output with respect to every moving value, by id."""
    seed = torch.full_like(trace.values[trace.output], scale)
    found = {trace.output: seed.unsqueeze(0)}  # (1, *value.shape): one direction
    for application in reversed(trace.applications):
        adjoint = found.get(application.output)
        if adjoint is None:
            continue
        moving = [at in trace.moving for at in application.inputs]
        at_point = application.primitive.linearise(trace.gather(application), None, moving)  # type: ignore[arg-type]
        for at, moves, covector in zip(application.inputs, moving, at_point.pull(adjoint), strict=True):
            if at is not None and moves and covector is not None:
                found[at] = found[at] + covector if at in found else covector
    return {at: adjoint[0] for at, adjoint in found.items()}
