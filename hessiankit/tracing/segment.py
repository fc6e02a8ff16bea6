"""A primitive for a value known only from autograd's graph; its actions are derivatives along a segment of that graph.

A custom ``torch.autograd.Function``, what ``torch.vmap`` made, complex numbers, a gradient taken within the module: no
operation was seen, but torch can differentiate. Both derivatives are by reverse mode here, so that they are tested against
themselves where the segment is made (<u, J t> = <J^T u, t>, a symmetric second derivative, vmap against a loop), and the
whole by :func:`verify_segments` against central differences of the module's own gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessiankit.primitives.primitive import Covectors, Inputs, Primitive, Tangents
from hessiankit.support.errors import TraceError
from hessiankit.support.torch_state import TORCH_LOCK
from hessiankit.tracing import reverse
from hessiankit.tracing.derivative_tests import adjoint_difference, asymmetry, batch_difference, generic, rounding, tangents_of
from hessiankit.tracing.graph import Unseen
from hessiankit.tracing.source_line import first_line


def _set_version(leaf: Tensor, version: int) -> None:
    """Set the version counter of a tensor, of which torch took one before 2.7, and takes a tuple since."""
    setter: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        setter((leaf,), (version,))
    except TypeError:
        setter(leaf, version)


@dataclass(frozen=True, eq=False)
class Segment(Primitive):
    """A value as a function of values that were seen before it, at the point where it was recorded and nowhere else.

    Attributes:
        root: The value, with its graph.
        edges: Positions of the inputs in the graph, in order.
        inputs: Values of the inputs.
        name: Functions of autograd in between, for the report.
        leaves: Leaves that the graph reads, with their memory and version when it was recorded.
        is_linear: Whether its first derivative does not depend on the inputs.
    """

    root: Tensor
    edges: tuple[GradientEdge, ...]
    inputs: tuple[Tensor, ...]
    name: str
    leaves: tuple[tuple[Tensor, Tensor, int], ...] = ()
    is_linear: bool = False
    reads_values = False  # the graph has them
    has_one_value = True
    calls = 30
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
            cotangent = adjoint.to(self.root.dtype)
            return _in_one_type(reverse.curvature(self.root, self.edges, cotangent, self._in_own_types(tangents)), adjoint.dtype)

    def _in_own_types(self, tangents: Tangents) -> Tangents:
        """Return tangents in the types that the graph computes in; the derivatives of a trace are taken in one."""
        return [None if t is None else t.to(x.dtype) for t, x in zip(tangents, self.inputs, strict=True)]

    def _prove_first(self) -> None:
        """Compare <u, J t> with <J^T u, t>, and vmap with a loop for both, on generic vectors."""
        if 1 in self._proven:
            return
        y, x = self.root, self.edges
        u, tangents = generic(y, 0), tangents_of(self.inputs, 1)
        (tangent,), push_gap = batch_difference(lambda *t: (reverse.jvp(y, x, t),), tangents)
        assert tangent is not None
        covectors, pull_gap = batch_difference(lambda a: reverse.vjp(y, x, a), [u])
        if (gap := adjoint_difference(u, tangent, tangents, covectors)) > rounding(torch.finfo(y.dtype).eps):
            raise self._refusal(
                "its backward is marked once_differentiable or leaves torch (detach, NumPy, no_grad), so that torch takes it "
                f"for a constant (<u, J t> and <J^T u, t> differ by {gap:.2g} of their terms)"
            )
        self._check_batch(max(push_gap, pull_gap))
        self._proven.add(1)

    def _prove_second(self) -> None:
        """Test the second derivative for symmetry, and vmap of it against a loop, on generic vectors."""
        if 2 in self._proven:
            return
        self._prove_first()
        y, x = self.root, self.edges
        u, first, second = generic(y, 0), tangents_of(self.inputs, 1), tangents_of(self.inputs, 100)
        (first_product, batch_gap), (second_product, _) = (
            batch_difference(lambda *t: reverse.curvature(y, x, u, t), t) for t in (first, second)
        )
        if (gap := asymmetry(first, second, first_product, second_product)) > rounding(torch.finfo(y.dtype).eps):
            raise self._refusal(f"its second derivative by reverse-over-reverse is not symmetric, by {gap:.2g} of its terms")
        self._check_batch(batch_gap)
        self._proven.add(2)

    def _check_batch(self, gap: float) -> None:
        if gap > rounding(torch.finfo(self.root.dtype).eps):
            raise self._refusal(f"torch.vmap of its backward differs from a loop by {gap:.2g} of the largest entry")

    @contextmanager
    def _differentiated(self) -> Iterator[None]:
        """Restore the leaves, and name the function that cannot be differentiated in an error."""
        try:
            with TORCH_LOCK, _as_recorded(self.leaves):
                yield
        except (torch.OutOfMemoryError, TraceError):
            raise
        except Exception as error:  # whatever a backward of the user's own may raise
            raise self._refusal(f"torch cannot differentiate it twice: {first_line(error)}") from error

    def _refusal(self, why: str) -> TraceError:
        return TraceError(
            f"trace: {self.name} is a value without operations that could be seen, and {why}. Write it in operations of torch, "
            "or detach() it to treat it as a constant"
        )


def segment(unseen: Unseen, variables: Sequence[tuple[GradientEdge, Tensor]]) -> Segment:
    """Return the primitive for a value known from autograd's graph only, as a function of its moving inputs."""
    edges, inputs = zip(*variables, strict=True)
    first, rest = ", ".join(unseen.names[:3]), len(unseen.names) - 3
    name = f"autograd: {first}{f' and {rest} more' if rest > 0 else ''}"
    primitive = Segment(unseen.root, edges, inputs, name, unseen.leaves)
    with primitive._differentiated():
        affine = reverse.is_affine(unseen.root, edges)
    return replace(primitive, is_linear=affine)


@contextmanager
def _as_recorded(leaves: tuple[tuple[Tensor, Tensor, int], ...]) -> Iterator[None]:
    """Give leaves their recorded values: a graph reads them again, and refuses values that training has changed."""
    state = [(leaf, leaf.data, leaf._version) for leaf, _, _ in leaves]
    try:
        for leaf, data, version in leaves:
            leaf.data = data
            _set_version(leaf, version)
        yield
    finally:
        for leaf, data, version in state:
            leaf.data = data
            _set_version(leaf, version)


def _in_one_type(covectors: Covectors, dtype: torch.dtype) -> Covectors:
    return tuple(None if c is None else c.to(dtype) for c in covectors)
