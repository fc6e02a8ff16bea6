"""Second derivatives through segments of autograd's graph, compared with central differences of the module's own gradient."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hessiankit.primitives.primitive import Inputs, Primitive
from hessiankit.support.errors import TraceError
from hessiankit.tracing.derivative_tests import FEWER_WEIGHTS, difference, estimates, rounding, settled, tangents_of
from hessiankit.tracing.segment import Segment
from hessiankit.tracing.trace import Apply, Trace, accumulate, ancestors_of_output, exactly, pull_one

UNSETTLED = 0.1
"""Uncertainty of central differences, relative to the largest entry, above which they confirm nothing (unless rounding is
the cause)."""

STEPS = (1e-2, 4e-3)
"""Steps of the central differences of the whole loss, relative to the size of the parameters: eight gradients."""

FINER_STEPS = ((1e-4, 1e-5), (1e-3, 3e-4))
"""Steps where the others do not settle, as beside kinks of a ReLU; the second pair where rounding swamps the first."""


@dataclass(frozen=True)
class Probe:
    """Derivatives of a traced scalar along one generic direction, for comparison: the same direction for all of a batch.

    Attributes:
        names: Names of the segments that it passes.
        gradient: Gradient by the name of the parameter.
        product: The Hessian times the direction.
        rounding: Relative difference that the coarsest type of the module explains.
    """

    names: tuple[str, ...]
    gradient: dict[str, Tensor]
    product: dict[str, Tensor]
    rounding: float


def probe_segments(trace: Trace, fixed_rows: Mapping[str, int] | None = None) -> Probe | None:
    """Return the derivatives of a trace that :func:`verify_segments` compares; None for one without segments.

    ``fixed_rows`` are rows of parameters, by name, that torch leaves out of the gradient, and the direction too.
    """
    path = ancestors_of_output(trace)  # the loss may read other values as numbers alone
    names = tuple(dict.fromkeys(a.primitive.name for a in path if isinstance(a.primitive, Segment)))
    if not names:
        return None
    results = products(trace, generic_direction({name: trace.values[at] for name, at in trace.parameters.items()}, fixed_rows))
    return Probe(names, *results, rounding(trace.eps or torch.finfo(trace.values[trace.output].dtype).eps))


def verify_segments(
    probes: Sequence[Probe],
    point: Mapping[str, Tensor],
    call_at: Callable[[dict[str, Tensor]], tuple[float, Mapping[str, Tensor | None]]],
    fixed_rows: Mapping[str, int] | None = None,
) -> None:
    """Compare the derivatives of a traced loss along one generic direction with central differences of the module's own call.

    Of both orders: of the loss, since a backward may be no derivative of its forward, and of its gradient, since it may be
    wrong when it is differentiated itself. Half precision leaves no digits to compare: nothing is done there.

    ``call_at`` returns the loss, and its gradient by name (None where autograd does not reach one), of the module's own call
    at given values of the parameters; ``fixed_rows`` is as in :func:`probe_segments`.
    """
    tolerance = 100 * max(probe.rounding for probe in probes)
    if tolerance > 1:
        return
    names = tuple(dict.fromkeys(name for probe in probes for name in probe.names))
    direction = generic_direction(point, fixed_rows)
    tangents = tuple(direction[name] for name in point)
    gradients, product = (
        tuple(torch.stack([kind[name] for kind in kinds]).sum(0) for name in point)
        for kinds in ([probe.gradient for probe in probes], [probe.product for probe in probes])
    )

    def call(at: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        loss, results = call_at(dict(zip(point, at, strict=True)))
        pairs = ((results[name], x) for name, x in point.items())
        return (*(torch.zeros_like(x) if g is None else g for g, x in pairs), at[0].new_tensor([loss]).double())

    size, steep = (max((float(x.abs().max()) for x in kind if x.numel()), default=0.0) for kind in (product, gradients))
    noise = 64 * (tolerance / 100) ** 2 * steep  # of the gradient's rounding errors, before they are divided by a step
    results = estimates(call, tuple(point.values()), tangents, STEPS, FEWER_WEIGHTS)
    finer = next((steps for steps in FINER_STEPS if noise / min(steps) < UNSETTLED * size), ())
    if not settled([values[:-1] for values in results])[1] <= UNSETTLED:
        results += estimates(call, tuple(point.values()), tangents, finer, FEWER_WEIGHTS)
    terms = torch.cat([(g * t).double().flatten() for g, t in zip(gradients, tangents, strict=True)])
    change, uncertainty = settled([values[-1:] for values in results])
    error = terms.sum() - change[0] if change and change[0] is not None else terms.new_zeros(1)
    scale = float(terms.abs().sum())
    gap = float(error.abs()) / scale if scale else 0.0
    if gap > max(3 * uncertainty, tolerance):
        raise _differs("first", gap, uncertainty, "the loss", names)
    differences, uncertainty = settled([values[:-1] for values in results])
    gap = difference(product, differences) if differences else float("inf")
    if gap > max(3 * uncertainty, tolerance):
        raise _differs("second", gap, uncertainty, "its gradient", names)
    if not uncertainty <= UNSETTLED and noise / min(STEPS) < UNSETTLED * size:
        raise TraceError(
            f"trace: central differences of the loss's gradient do not settle (known to {uncertainty:.1g}), so that the "
            f"derivative of {'; '.join(names)}, of which only a backward is known, cannot be confirmed: the loss is not smooth "
            "around here. Write it in operations of torch, or pass handshake=False to go without the comparison"
        )


def _differs(order: str, gap: float, uncertainty: float, of: str, names: tuple[str, ...]) -> TraceError:
    return TraceError(
        f"trace: the {order} derivative of the loss is off by {gap:.2g} from central differences of {of} (known to "
        f"{uncertainty:.1g}) along one direction, both by the module's own call. It passes {'; '.join(names)}, of which only a "
        "backward is known: that may be no derivative of its forward (straight-through, reversed or clipped gradients), or wrong "
        "when it is differentiated itself (where it reads what forward computed and kept). Write it in operations of torch, or "
        "pass handshake=False to go without the comparison: what its backward returns then counts as the derivative"
    )


def generic_direction(point: Mapping[str, Tensor], fixed_rows: Mapping[str, int] | None) -> dict[str, Tensor]:
    """Return the same tangents for the same parameters, whatever their order."""
    direction = {name: tangents_of([x], 1 + k)[0] for k, (name, x) in enumerate(sorted(point.items()))}
    for name, row in (fixed_rows or {}).items():
        if name in direction:
            direction[name][row] = 0
    return direction


def products(
    trace: Trace,
    direction: Mapping[str, Tensor],
    bending: Container[int] | None = None,
    apply: Apply = exactly,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradient of a traced scalar, and its Hessian times one vector, by the names of the parameters.

    Args:
        trace: The scalar.
        direction: The vector; parameters without an entry do not move.
        bending: Values whose second derivatives count, by id; None: all.
        apply: Application of a linear map to tangents or covectors; another one may add rounding errors.
    """
    tangents = {trace.parameters[name]: t[None] for name, t in direction.items() if name in trace.parameters}
    for a in trace.applications:
        input_tangents = [None if at is None else tangents.get(at) for at in a.inputs]
        if any(t is not None for t in input_tangents):
            (tangent,) = apply(partial(_push, a.primitive, trace.gather(a)), input_tangents)
            assert tangent is not None
            tangents[a.output] = tangent
    adjoints = trace.adjoints(apply=apply)
    bars: dict[int, Tensor] = {}
    for a in reversed(trace.applications):
        bar, adjoint = bars.pop(a.output, None), adjoints.get(a.output)
        inputs: Inputs = trace.gather(a)  # type: ignore[assignment]
        input_tangents = [None if at is None else tangents.get(at) for at in a.inputs]
        bends = not a.primitive.is_linear and (bending is None or a.output in bending)
        if adjoint is not None and bends and any(t is not None for t in input_tangents):
            accumulate(bars, trace.moving_inputs(a), apply(partial(a.primitive.curvature, inputs, adjoint), input_tangents))
        if bar is not None:
            accumulate(bars, trace.moving_inputs(a), apply(partial(pull_one, partial(a.primitive.vjp, inputs)), [bar]))
    zeros = {name: torch.zeros_like(trace.values[at]) for name, at in trace.parameters.items()}
    gradient = {name: adjoints.get(trace.parameters[name], zero) for name, zero in zeros.items()}
    product = {name: bars[trace.parameters[name]][0] if trace.parameters[name] in bars else zero for name, zero in zeros.items()}
    return gradient, product


def _push(primitive: Primitive, inputs: Any, tangents: Any) -> tuple[Tensor]:
    return (primitive.jvp(inputs, tangents),)
