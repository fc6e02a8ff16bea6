"""A traced loss in stretches between narrow places, so that values can be kept at these places alone and made anew between.

The narrow places of a transformer are those where only the residual stream passes: one before and one after each sublayer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hessiankit.tracing.trace import Application, Trace

WIDER = 4
"""How many times the values that pass a cut the values made since the last cut have to take, for a cut to pay."""


@dataclass(frozen=True)
class Stretch:
    """Applications in a row.

    Attributes:
        applications: In order; all of them on the way to the loss.
        entries: Values made before and read here or later, parameters left out.
    """

    applications: tuple[Application, ...]
    entries: tuple[int, ...]


def cut(trace: Trace, *, layers: bool) -> list[Stretch]:
    """Return what leads to the output, as one stretch or cut where a single value passes."""
    path = on_the_way(trace)
    if not layers:
        return [Stretch(tuple(path), ())]
    own, last = set(trace.parameters.values()), last_readers(path)
    found: list[Stretch] = []
    live: set[int] = set()
    some: list[Application] = []
    entries: tuple[int, ...] = ()
    made = 0
    for n, a in enumerate(path):
        some.append(a)
        live = {at for at in (*live, a.output) if last.get(at, -1) > n}
        made += size(trace.values[a.output])
        passing = sum(size(trace.values[at]) for at in live)
        if len(live) == 1 and made > WIDER * passing and not live & own:
            found.append(Stretch(tuple(some), entries))
            some, entries, made = [], tuple(live), 0
    return [*found, Stretch(tuple(some), entries)] if some else found


def on_the_way(trace: Trace) -> list[Application]:
    """Return the applications that the output depends on, in order."""
    reached, path = {trace.output}, []
    for a in reversed(trace.applications):
        if a.output in reached:
            path.append(a)
            reached.update(at for at in a.inputs if at is not None)
    return path[::-1]


def last_readers(applications: Sequence[Application]) -> dict[int, int]:
    """Return the position of the last application that reads each value."""
    return {at: n for n, a in enumerate(applications) for at in a.inputs if at is not None}


def first_readers(applications: Sequence[Application]) -> dict[int, int]:
    """Return the output of the first application that reads each value."""
    return {at: a.output for a in reversed(applications) for at in a.inputs if at is not None}


def size(x: Tensor) -> int:
    """Return the bytes of a tensor's entries."""
    return x.numel() * x.element_size()


def gather(a: Application, *values: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return an application's inputs, each from the first mapping that has it."""
    return tuple(None if at is None else next(v[at] for v in values if at in v) for at in a.inputs)
