"""Entries at which a derivative is not finite and does not matter, taken out of a trace.

The root of a dead unit, ``F.relu(h) ** 1.5`` or the norm of a row of zeros behind a ReLU, has a derivative that is not finite
where the unit does not move; ``torch.where(h > 0, torch.log(h), 0)`` has one that is not read. Zero times infinity is then not
a number in a chain of products, although the loss is smooth there. Torch's own backward formulas mask many of these; here the
trace gets what a careful author writes,

    y = where(dead, y0, f(where(dead, c, x))),          y0 = f(x) at this point, f smooth at c,

for entries that are dead: those that do not change with the parameters around this point, or that the loss does not read there.
An entry that moves keeps its derivative, and the result says that it is not finite.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hessiankit.primitives.directions import unbroadcast
from hessiankit.primitives.indexing import Where
from hessiankit.primitives.linear import MaskedFill
from hessiankit.primitives.primitive import Inputs
from hessiankit.support.errors import TraceError
from hessiankit.support.torch_state import read_numbers
from hessiankit.tracing.trace import Application, Trace, accumulate


@torch.no_grad()
def without_dead_entries(trace: Trace) -> None:
    """Rewrite, in place, the applications of a trace whose derivatives are not finite at dead entries."""
    masks: dict[int, Tensor] = {}
    for a in trace.applications:
        mask = a.primitive.singular(trace.gather(a), trace.values[a.output])  # type: ignore[arg-type]
        if mask is not None:
            masks[a.output] = mask
    occurs = read_numbers(mask.any() for mask in masks.values())
    singular = {at: mask for (at, mask), occurrence in zip(masks.items(), occurs, strict=True) if occurrence}
    if not singular:
        return
    point = _Nearby(trace)
    adjoints: dict[int, Tensor] = {trace.output: torch.ones_like(trace.values[trace.output])}
    applications: list[Application] = []
    for a in reversed(trace.applications):
        adjoint = adjoints.get(a.output)
        inputs: Inputs = [None if at is None else point.values[at] for at in a.inputs]  # type: ignore[misc]
        parts = [a]
        if a.output in singular:
            zero_adjoint = torch.ones_like(singular[a.output]) if adjoint is None else adjoint == 0
            dead = singular[a.output] & (zero_adjoint | ~point.moves[a.output])
            if bool(dead.any()):
                parts = _kept_apart(trace, a, dead)
                inputs = [_filled(x, dead, c) for x, c in zip(inputs, a.primitive.regular, strict=True)]  # type: ignore[misc]
                adjoint = None if adjoint is None else adjoint.masked_fill(dead, 0)
        applications += reversed(parts)
        if adjoint is not None:
            accumulate(adjoints, trace.moving_inputs(a), _pulled(a, inputs, adjoint))
    trace.applications[:] = reversed(applications)


class _Nearby:
    """Masks of the entries that change with the parameters, and values near the trace's, which take the same branches.

    An entry counts as one that changes if an operation changes it when those of its inputs that change do, each by a thousandth
    of itself or, where it is zero, of the largest. What is small or cancels on the way from the parameters thus does not count
    as constant, and a unit that is dead by more than a thousandth does.
    """

    def __init__(self, trace: Trace) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.moves = {at: torch.ones_like(trace.values[at], dtype=torch.bool) for at in trace.parameters.values()}
        self.values, opposite = list(trace.values), list(trace.values)
        for at in trace.parameters.values():
            self._step(at, opposite)
        for a in trace.applications:
            value, nearby, opposite_value = (_value(a, values) for values in (trace.values, self.values, opposite))
            if a.primitive.has_one_value or value is None or nearby is None or opposite_value is None:
                self.moves[a.output] = torch.ones_like(trace.values[a.output], dtype=torch.bool)
            else:
                changes = [(value != x) & ~(value.isnan() & x.isnan()) for x in (nearby, opposite_value)]
                self.moves[a.output] = changes[0] | changes[1]
            self._step(a.output, opposite)

    def _step(self, at: int, opposite: list[Tensor]) -> None:
        """Move the entries of a value that change, by numbers of either sign and of about one size."""
        x = self.values[at]
        noise = torch.rand(x.shape, generator=self._generator, dtype=torch.float64, device="cpu").to(x) - 0.5
        sizes = x.abs().nan_to_num(0, 0, 0)
        sizes = torch.where(sizes == 0, (float(sizes.max()) if x.numel() else 0.0) or 1.0, sizes)
        step = (noise + noise.sign()) * sizes * self.moves[at] / 1024
        self.values[at], opposite[at] = x + step, x - step


def _value(a: Application, values: list[Tensor]) -> Tensor | None:
    """Return an application's value; None where it is undefined, such as a factorisation of an indefinite matrix."""
    try:
        return a.primitive.value(*(None if at is None else values[at] for at in a.inputs))  # type: ignore[arg-type]
    except RuntimeError:
        return None


def _kept_apart(trace: Trace, a: Application, dead: Tensor) -> list[Application]:
    """Return applications that compute an output with its dead entries as constants."""
    inputs, parts = list(a.inputs), list[Application]()
    for k, (at, c) in enumerate(zip(a.inputs, a.primitive.regular, strict=True)):
        if at is not None:
            fill = MaskedFill(_of_shape(dead, trace.values[at]), c)
            inputs[k] = trace.derived(fill, (at,), f"{a.name}_alive", parts)
    y = trace.values[a.output]
    alive = trace.add_value(a.primitive.value(*(None if at is None else trace.values[at] for at in inputs)), moving=True)  # type: ignore[arg-type]
    parts.append(replace(a, inputs=tuple(inputs), output=alive))
    parts.append(Application(Where(dead), (trace.add_value(y), alive), a.output, f"{a.name}_dead"))
    return parts


def _filled(x: Tensor | None, dead: Tensor, c: float) -> Tensor | None:
    return None if x is None else x.masked_fill(_of_shape(dead, x), c)


def _of_shape(dead: Tensor, x: Tensor) -> Tensor:
    """Return the entries of an input that enter dead entries of the output alone."""
    return unbroadcast((~dead).to(x.dtype).unsqueeze(0), x.shape)[0] == 0


def _pulled(a: Application, inputs: Inputs, adjoint: Tensor) -> tuple[Tensor | None, ...]:
    """Return the covectors of an adjoint; NaN, which counts as read, where a nearby point has none."""
    try:
        return tuple(None if c is None else c[0] for c in a.primitive.vjp(inputs, adjoint.unsqueeze(0)))
    except TraceError:
        return tuple(None if x is None else torch.full_like(x, torch.nan) for x in inputs)
