"""A primitive for a value of which only autograd's graph is known: its actions come from that graph, between two points of it.

A custom ``torch.autograd.Function``, what ``torch.vmap`` made, complex numbers, a gradient taken within the module: no
operation was seen, but torch can differentiate. Both derivatives are by reverse mode here, so that they are tested against
themselves where the segment is made (<u, J t> = <J^T u, t>, a symmetric second derivative, vmap against a loop), and the
whole by :func:`verify_segments` against central differences of the module's own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from derivations.primitive import Covectors, Inputs, Primitive, Tangents
from hessiankit.errors import TraceError
from hessiankit.torch_state import one_turn
from hessiankit.tracing import reverse
from hessiankit.tracing.edges import Unseen
from hessiankit.tracing.witnesses import (
    adjoint_difference,
    asymmetry,
    batch_difference,
    central_differences,
    difference,
    generic,
    rounding,
    tangents_of,
)

if TYPE_CHECKING:
    from hessiankit.tracing.trace import Trace

_set_version = torch._C._autograd._unsafe_set_version_counter


@dataclass(frozen=True, eq=False)
class Segment(Primitive):
    """A value as a function of values that were seen before it, at the point where it was recorded and nowhere else.

    Attributes:
        root: The value, with its graph.
        edges: Where the inputs lie in the graph, in order.
        name: What the result reports: the functions of autograd in between.
        leaves: What the graph reads where it depends on leaves, with their memory and version when it was recorded.
        is_linear: Whether its first derivative does not depend on the inputs.
    """

    root: Tensor
    edges: tuple[GradientEdge, ...]
    name: str
    leaves: tuple[tuple[Tensor, Tensor, int], ...] = ()
    is_linear: bool = False
    _proven: set[int] = field(default_factory=set, init=False, repr=False)

    def value(self, *inputs: Tensor) -> Tensor:
        return self.root.detach()

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        with self._differentiated():
            self._prove_first(inputs)
            return reverse.jvp(self.root, self.edges, tangents)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        with self._differentiated():
            return reverse.vjp(self.root, self.edges, adjoint)

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        with self._differentiated():
            self._prove_second(inputs)
            return reverse.curvature(self.root, self.edges, adjoint, tangents)

    def _prove_first(self, inputs: Inputs) -> None:
        """Compare <u, J t> with <J^T u, t>, and what vmap makes of both with a loop, on generic vectors."""
        if 1 in self._proven:
            return
        y, x = self.root, self.edges
        u, tangents = generic(y, 0), tangents_of(inputs, 1)
        pushed = reverse.jvp(y, x, [t[None] for t in tangents])[0]
        pulled = tuple(None if c is None else c[0] for c in reverse.vjp(y, x, u[None]))
        if (gap := adjoint_difference(u, pushed, tangents, pulled)) > rounding(y.dtype):
            raise self._refusal(
                "its backward is marked once_differentiable or leaves torch (detach, NumPy, no_grad), so that torch takes it "
                f"for a constant (<u, J t> and <J^T u, t> differ by {gap:.2g} of their terms)"
            )
        together = reverse.vjp(y, x, torch.stack([2 * u, u]))
        forward = reverse.jvp(y, x, [torch.stack([2 * t, t]) for t in tangents])
        gap = max(batch_difference(together, pulled), batch_difference((forward,), (pushed,)))
        self._check_batch(gap)
        self._proven.add(1)

    def _prove_second(self, inputs: Inputs) -> None:
        """Test the second derivative for symmetry, and what vmap makes of it, on generic vectors."""
        if 2 in self._proven:
            return
        self._prove_first(inputs)
        y, x = self.root, self.edges
        u, first, second = generic(y, 0), tangents_of(inputs, 1), tangents_of(inputs, 100)
        bent = [
            tuple(c if c is None else c[0] for c in reverse.curvature(y, x, u, [d[None] for d in t])) for t in (first, second)
        ]
        if (gap := asymmetry(first, second, *bent)) > rounding(y.dtype):
            raise self._refusal(f"its second derivative by reverse-over-reverse is not symmetric, by {gap:.2g} of its terms")
        self._check_batch(batch_difference(reverse.curvature(y, x, u, [torch.stack([2 * t, t]) for t in first]), bent[0]))
        self._proven.add(2)

    def _check_batch(self, gap: float) -> None:
        if gap > rounding(self.root.dtype):
            raise self._refusal(f"torch.vmap of its backward differs from a loop by {gap:.2g} of the largest entry")

    @contextmanager
    def _differentiated(self) -> Iterator[None]:
        """Let the leaves be as they were, and name what cannot be differentiated."""
        try:
            with one_turn(), _as_recorded(self.leaves):
                yield
        except (torch.OutOfMemoryError, TraceError):
            raise
        except Exception as error:  # whatever a backward of the user's own may raise
            first = str(error).split("\n")[0] or type(error).__name__
            raise self._refusal(f"torch cannot differentiate it twice: {first}") from error

    def _refusal(self, why: str) -> TraceError:
        return TraceError(
            f"trace: {self.name} is a value without operations that could be seen, and {why}. Write it in operations of torch, "
            "or detach() it to treat it as a constant"
        )


def segment(unseen: Unseen, edges: tuple[GradientEdge, ...]) -> Segment:
    """Return the primitive for a value that autograd alone knows, as a function of those of its inputs that move.

    Raises:
        TraceError: If torch cannot differentiate it.
    """
    found = Segment(unseen.root, edges, f"autograd: {_shortened(unseen.names)}", unseen.leaves)
    with found._differentiated():
        affine = reverse.is_affine(unseen.root, edges)
    return replace(found, is_linear=affine)


def verify_segments(trace: Trace, gradient_at: Callable[[dict[str, Tensor]], Mapping[str, Tensor | None]]) -> None:
    """Compare the second derivative of a traced scalar along one generic direction with central differences of its gradient.

    Nothing is done for a trace without segments: the primitives of the others have shown that they are right.

    Args:
        trace: A trace whose output is a scalar.
        gradient_at: The gradient of the module's own call at given parameters, by name; None where autograd does not reach one.

    Raises:
        TraceError: They differ.
    """
    names = tuple(dict.fromkeys(a.primitive.name for a in trace.applications if isinstance(a.primitive, Segment)))
    if not names:
        return
    parameters = {name: trace.values[at] for name, at in trace.parameters.items()}
    direction = dict(zip(parameters, tangents_of(list(parameters.values()), 1), strict=True))
    mine = product(trace, direction)

    def gradient(at: tuple[Tensor, ...]) -> Covectors:
        found = gradient_at(dict(zip(parameters, at, strict=True)))
        return tuple(torch.zeros_like(x) if found[name] is None else found[name] for name, x in parameters.items())

    theirs, uncertainty = central_differences(gradient, tuple(parameters.values()), tuple(direction.values()))
    gap = difference(tuple(mine.values()), theirs) if theirs else float("inf")
    dtype = max((x.dtype for x in parameters.values()), key=lambda d: torch.finfo(d).eps)
    if not gap <= max(3 * uncertainty, 100 * rounding(dtype)) or uncertainty > 0.1:
        raise TraceError(
            f"trace: the second derivative of the loss is off by {gap:.2g} of its largest entry from central differences of the "
            f"module's own gradient (known to {uncertainty:.1g}) along one direction. It passes {'; '.join(names)}, of which only a "
            "backward is known: that may be wrong when it is differentiated itself, where it reads what forward computed and kept, "
            "or passes gradients straight through; a detach() elsewhere does the same. Write it in operations of torch"
        )


def product(trace: Trace, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the Hessian of a traced scalar times one vector, both by the names of the parameters."""
    tangents = {trace.parameters[name]: t[None] for name, t in direction.items()}
    for a in trace.applications:
        moved = [None if at is None else tangents.get(at) for at in a.inputs]
        if any(t is not None for t in moved):
            tangents[a.output] = a.primitive.jvp(trace.gather(a), moved)  # type: ignore[arg-type]
    first = {trace.output: torch.ones_like(trace.values[trace.output])[None]}
    second: dict[int, Tensor] = {}
    for a in reversed(trace.applications):
        adjoint, bar = first.pop(a.output, None), second.pop(a.output, None)
        inputs: Inputs = trace.gather(a)  # type: ignore[assignment]
        if adjoint is not None:
            _add(trace, first, a.inputs, a.primitive.vjp(inputs, adjoint))
            moved = [None if at is None else tangents.get(at) for at in a.inputs]
            if not a.primitive.is_linear and any(t is not None for t in moved):
                _add(trace, second, a.inputs, a.primitive.curvature(inputs, adjoint[0], moved))
        if bar is not None:
            _add(trace, second, a.inputs, a.primitive.vjp(inputs, bar))
    return {n: second[at][0] if at in second else torch.zeros_like(trace.values[at]) for n, at in trace.parameters.items()}


def _add(trace: Trace, bars: dict[int, Tensor], ids: tuple[int | None, ...], covectors: Covectors) -> None:
    for at, covector in zip(ids, covectors, strict=True):
        if at is not None and at in trace.moving and covector is not None:
            bars[at] = bars[at] + covector if at in bars else covector


@contextmanager
def _as_recorded(leaves: tuple[tuple[Tensor, Tensor, int], ...]) -> Iterator[None]:
    """Let leaves have the values that they had: a graph reads them anew, and would refuse those that training has moved."""
    now = [(leaf, leaf.data, leaf._version) for leaf, _, _ in leaves]
    try:
        for leaf, data, version in leaves:
            leaf.data = data
            _set_version((leaf,), (version,))
        yield
    finally:
        for leaf, data, version in now:
            leaf.data = data
            _set_version((leaf,), (version,))


def _shortened(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
