"""A primitive for a value of which only autograd's graph is known: its actions come from that graph, between two points of it.

A custom ``torch.autograd.Function``, what ``torch.vmap`` made, complex numbers, a gradient taken within the module: no
operation was seen, but torch can differentiate. Both derivatives are by reverse mode here, so that they are tested against
themselves where the segment is made (<u, J t> = <J^T u, t>, a symmetric second derivative, vmap against a loop), and the
whole by :func:`verify_segments` against central differences of the module's own gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from derivations.primitive import Covectors, Inputs, Primitive, Tangents
from hessiankit.errors import TraceError
from hessiankit.tracing import reverse
from hessiankit.tracing.edges import Unseen
from hessiankit.tracing.witnesses import (
    adjoint_difference,
    asymmetry,
    batch_difference,
    generic,
    rounding,
    tangents_of,
)


@dataclass(frozen=True, eq=False)
class Segment(Primitive):
    """A value as a function of values that were seen before it, at the point where it was recorded and nowhere else.

    Attributes:
        root: The value, with its graph.
        edges: Where the inputs lie in the graph, in order.
        name: What the result reports: the functions of autograd in between.
        is_linear: Whether its first derivative does not depend on the inputs.
    """

    root: Tensor
    edges: tuple[GradientEdge, ...]
    name: str
    is_linear: bool = False
    _proven: set[int] = field(default_factory=set, init=False, repr=False)

    def value(self, *inputs: Tensor) -> Tensor:
        return self.root.detach()

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        with self._named():
            self._prove_first(inputs)
            return reverse.jvp(self.root, self.edges, tangents)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        with self._named():
            return reverse.vjp(self.root, self.edges, adjoint)

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        with self._named():
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
                f"its backward is not made of operations that torch can differentiate (<u, J t> and <J^T u, t> differ by {gap:.2g})"
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
    def _named(self) -> Iterator[None]:
        try:
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
    found = Segment(unseen.root, edges, f"autograd: {_shortened(unseen.names)}")
    with found._named():
        affine = reverse.is_affine(unseen.root, edges)
    return Segment(unseen.root, edges, found.name, affine)


def _shortened(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
