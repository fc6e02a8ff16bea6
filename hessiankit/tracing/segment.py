"""A primitive for a value of which only autograd's graph is known: its actions come from that graph, between two points of it.

A custom ``torch.autograd.Function``, what ``torch.vmap`` made, complex numbers, a gradient taken within the module: no
operation was seen, but torch can differentiate. Both derivatives are by reverse mode here, so that they are tested against
themselves where the segment is made (<u, J t> = <J^T u, t>, a symmetric second derivative, vmap against a loop), and the
whole by :func:`verify_segments` against central differences of the module's own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    FEWER_WEIGHTS,
    adjoint_difference,
    asymmetry,
    batch_difference,
    difference,
    estimates,
    generic,
    rounding,
    settled,
    tangents_of,
)

if TYPE_CHECKING:
    from hessiankit.tracing.trace import Trace

COARSE = 1e-4
"""What rounding may explain of a difference where a module computes in less than float64: differences need not settle there."""

STEPS = (1e-2, 4e-3)
"""Of the central differences of the whole loss, relative to the size of the parameters: eight gradients."""

_set_version = torch._C._autograd._unsafe_set_version_counter


@dataclass(frozen=True, eq=False)
class Segment(Primitive):
    """A value as a function of values that were seen before it, at the point where it was recorded and nowhere else.

    Attributes:
        root: The value, with its graph.
        edges: Where the inputs lie in the graph, in order.
        inputs: Their values.
        name: What the result reports: the functions of autograd in between.
        leaves: What the graph reads where it depends on leaves, with their memory and version when it was recorded.
        is_linear: Whether its first derivative does not depend on the inputs.
    """

    root: Tensor
    edges: tuple[GradientEdge, ...]
    inputs: tuple[Tensor, ...]
    name: str
    leaves: tuple[tuple[Tensor, Tensor, int], ...] = ()
    is_linear: bool = False
    reads_values = False  # the graph has them
    _proven: set[int] = field(default_factory=set, init=False, repr=False)

    def value(self, *inputs: Tensor) -> Tensor:
        return self.root.detach()

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        with self._differentiated():
            self._prove_first()
            kind = next(t.dtype for t in tangents if t is not None)
            return reverse.jvp(self.root, self.edges, self._in_own_types(tangents)).to(kind)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        with self._differentiated():
            return _in_one_type(reverse.vjp(self.root, self.edges, adjoint.to(self.root.dtype)), adjoint.dtype)

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        with self._differentiated():
            self._prove_second()
            own = adjoint.to(self.root.dtype)
            return _in_one_type(reverse.curvature(self.root, self.edges, own, self._in_own_types(tangents)), adjoint.dtype)

    def _in_own_types(self, tangents: Tangents) -> Tangents:
        """Return tangents in the types that the graph computes in; the derivatives of a trace are taken in one."""
        return [None if t is None else t.to(x.dtype) for t, x in zip(tangents, self.inputs, strict=True)]

    def _prove_first(self) -> None:
        """Compare <u, J t> with <J^T u, t>, and what vmap makes of both with a loop, on generic vectors."""
        if 1 in self._proven:
            return
        y, x = self.root, self.edges
        u, tangents = generic(y, 0), tangents_of(self.inputs, 1)
        pushed = reverse.jvp(y, x, [t[None] for t in tangents])[0]
        pulled = tuple(None if c is None else c[0] for c in reverse.vjp(y, x, u[None]))
        if (gap := adjoint_difference(u, pushed, tangents, pulled)) > rounding(torch.finfo(y.dtype).eps):
            raise self._refusal(
                "its backward is marked once_differentiable or leaves torch (detach, NumPy, no_grad), so that torch takes it "
                f"for a constant (<u, J t> and <J^T u, t> differ by {gap:.2g} of their terms)"
            )
        together = reverse.vjp(y, x, torch.stack([2 * u, u]))
        forward = reverse.jvp(y, x, [torch.stack([2 * t, t]) for t in tangents])
        gap = max(batch_difference(together, pulled), batch_difference((forward,), (pushed,)))
        self._check_batch(gap)
        self._proven.add(1)

    def _prove_second(self) -> None:
        """Test the second derivative for symmetry, and what vmap makes of it, on generic vectors."""
        if 2 in self._proven:
            return
        self._prove_first()
        y, x = self.root, self.edges
        u, first, second = generic(y, 0), tangents_of(self.inputs, 1), tangents_of(self.inputs, 100)
        bent = [
            tuple(c if c is None else c[0] for c in reverse.curvature(y, x, u, [d[None] for d in t])) for t in (first, second)
        ]
        if (gap := asymmetry(first, second, *bent)) > rounding(torch.finfo(y.dtype).eps):
            raise self._refusal(f"its second derivative by reverse-over-reverse is not symmetric, by {gap:.2g} of its terms")
        self._check_batch(batch_difference(reverse.curvature(y, x, u, [torch.stack([2 * t, t]) for t in first]), bent[0]))
        self._proven.add(2)

    def _check_batch(self, gap: float) -> None:
        if gap > rounding(torch.finfo(self.root.dtype).eps):
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


def segment(unseen: Unseen, moving: Sequence[tuple[GradientEdge, Tensor]]) -> Segment:
    """Return the primitive for a value that autograd alone knows, as a function of those of its inputs that move.

    Args:
        unseen: What is known of the value.
        moving: Where these inputs lie in the graph, and their values.

    Raises:
        TraceError: If torch cannot differentiate it.
    """
    edges, inputs = zip(*moving, strict=True)
    found = Segment(unseen.root, edges, inputs, f"autograd: {_shortened(unseen.names)}", unseen.leaves)
    with found._differentiated():
        affine = reverse.is_affine(unseen.root, edges)
    return replace(found, is_linear=affine)


@dataclass(frozen=True)
class Probe:
    """Derivatives of a traced scalar along one generic direction, for comparison: the same direction for all of a batch.

    Attributes:
        names: Of the segments that it passes.
        gradient: By the name of the parameter.
        product: The Hessian times the direction.
        rounding: What the coarsest type that the module computed in explains of a difference.
    """

    names: tuple[str, ...]
    gradient: dict[str, Tensor]
    product: dict[str, Tensor]
    rounding: float


def probe_segments(trace: Trace, still: Mapping[str, int] | None = None) -> Probe | None:
    """Return what :func:`verify_segments` compares of a trace; None for one without segments, where each primitive is known.

    ``still`` are rows of parameters, by name, that torch leaves out of the gradient, and the direction too.
    """
    names = tuple(dict.fromkeys(a.primitive.name for a in trace.applications if isinstance(a.primitive, Segment)))
    if not names:
        return None
    found = products(trace, _direction({name: trace.values[at] for name, at in trace.parameters.items()}, still))
    return Probe(names, *found, rounding(trace.eps or torch.finfo(trace.values[trace.output].dtype).eps))


def verify_segments(
    probes: Sequence[Probe],
    point: Mapping[str, Tensor],
    call_at: Callable[[dict[str, Tensor]], tuple[float, Mapping[str, Tensor | None]]],
    still: Mapping[str, int] | None = None,
) -> None:
    """Compare the derivatives of a traced loss along one generic direction with central differences of the module's own call.

    Of both orders: of the loss, since a backward may be no derivative of its forward, and of its gradient, since it may be
    wrong when it is differentiated itself. Half precision leaves no digits to compare: nothing is done there.

    Args:
        probes: Of the traces that the loss is the sum of.
        point: The values of the parameters, by name.
        call_at: The loss, and its gradient by name (None where autograd does not reach one), of the module's own call at
            given values of the parameters.
        still: As in :func:`probe_segments`.

    Raises:
        TraceError: They differ.
    """
    allowed = 100 * max(probe.rounding for probe in probes)
    if allowed > 1:
        return
    names = tuple(dict.fromkeys(name for probe in probes for name in probe.names))
    direction = _direction(point, still)
    tangents = tuple(direction[name] for name in point)
    slopes, bent = (
        tuple(torch.stack([kind[name] for kind in kinds]).sum(0) for name in point)
        for kinds in ([probe.gradient for probe in probes], [probe.product for probe in probes])
    )

    def call(at: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        loss, found = call_at(dict(zip(point, at, strict=True)))
        given = ((found[name], x) for name, x in point.items())
        return (*(torch.zeros_like(x) if slope is None else slope for slope, x in given), at[0].new_tensor([loss]).double())

    found = estimates(call, tuple(point.values()), tangents, STEPS, FEWER_WEIGHTS)
    terms = torch.cat([(slope * t).double().flatten() for slope, t in zip(slopes, tangents, strict=True)])
    change, unsure = settled([values[-1:] for values in found])
    off = terms.sum() - change[0] if change and change[0] is not None else terms.new_zeros(1)
    scale = float(terms.abs().sum())
    gap = float(off.abs()) / scale if scale else 0.0
    if gap > max(3 * unsure, allowed):
        raise _differs("first", gap, unsure, "the loss", names)
    theirs, unsure = settled([values[:-1] for values in found])
    gap = difference(bent, theirs) if theirs else float("inf")
    if gap > max(3 * unsure, allowed):
        raise _differs("second", gap, unsure, "its gradient", names)
    if not unsure <= 0.1 and allowed < COARSE:
        raise TraceError(
            f"trace: central differences of the loss's gradient do not settle (known to {unsure:.1g}), so that the derivative of "
            f"{'; '.join(names)}, of which only a backward is known, cannot be confirmed: the loss is not smooth around here. "
            "Write it in operations of torch, or pass handshake=False to go without the comparison"
        )


def _differs(which: str, gap: float, unsure: float, of: str, names: tuple[str, ...]) -> TraceError:
    return TraceError(
        f"trace: the {which} derivative of the loss is off by {gap:.2g} from central differences of {of} (known to {unsure:.1g}) "
        f"along one direction, both by the module's own call. It passes {'; '.join(names)}, of which only a backward is known: "
        "that may be no derivative of its forward (straight-through, reversed or clipped gradients), or wrong when it is "
        "differentiated itself (where it reads what forward computed and kept); a detach() elsewhere does the same. "
        "Write it in operations of torch"
    )


def _direction(point: Mapping[str, Tensor], still: Mapping[str, int] | None) -> dict[str, Tensor]:
    """Return the same tangents for the same parameters, whatever their order."""
    found = {name: tangents_of([x], 1 + k)[0] for k, (name, x) in enumerate(sorted(point.items()))}
    for name, row in (still or {}).items():
        if name in found:
            found[name][row] = 0
    return found


def products(trace: Trace, direction: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradient of a traced scalar, and its Hessian times one vector, by the names of the parameters."""
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
    zeros = {name: torch.zeros_like(trace.values[at])[None] for name, at in trace.parameters.items()}
    gradient, product = ({n: bars.get(trace.parameters[n], zero)[0] for n, zero in zeros.items()} for bars in (first, second))
    return gradient, product


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


def _in_one_type(covectors: Covectors, dtype: torch.dtype) -> Covectors:
    return tuple(None if c is None else c.to(dtype) for c in covectors)


def _shortened(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
