"""A primitive for one operation that has no chapter: its actions come from automatic differentiation of this operation only.

Each derivative is taken by two routes of torch, which are compared on generic vectors at the point: reverse mode
(``torch.autograd.grad``, once or twice) and forward mode (``torch.func.jvp`` of the value or of the gradient). Where they
differ, or one of them is missing, central differences of the value or the gradient in float64 decide; where they agree, they
must not both be far from those, as at singular values that are zero. What passes is tested for symmetry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hessiankit.primitives.primitive import Covectors, Inputs, Primitive, Tangents
from hessiankit.support.errors import TraceError
from hessiankit.support.torch_state import load_forward_mode
from hessiankit.tracing import reverse
from hessiankit.tracing.derivative_tests import (
    FEWER_STEPS,
    FEWER_WEIGHTS,
    STEPS,
    WEIGHTS,
    adjoint_difference,
    asymmetry,
    batch_difference,
    central_differences,
    difference,
    generic,
    rounding,
    tangents_of,
)
from hessiankit.tracing.source_line import first_line

REVERSE, FORWARD_MODE = "reverse mode", "forward mode"
REVERSE_TWICE, JVP_OF_GRAD = "reverse-over-reverse", "jvp(grad)"
UNSETTLED = 0.05
"""Uncertainty of central differences, relative to the largest entry, below which they decide against two routes that agree."""
TOLERATED = (RuntimeError, NotImplementedError, ValueError)


@dataclass
class _Proof:
    """Routes proved at one point: for each order the route to take, or the error where there is none."""

    inputs: tuple[Tensor, ...] = ()
    routes: dict[int, str | TraceError] = field(default_factory=dict)
    remark: str = ""


@dataclass(frozen=True, eq=False)
class AutomaticDifferentiation(Primitive):
    """An operation known only by its value.

    ``function`` takes the differentiable inputs, in order. ``name`` is what the result reports.
    """

    function: Callable[..., Tensor]
    name: str
    calls = 30
    _proof: _Proof = field(default_factory=_Proof, init=False, repr=False)

    def value(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        if self._require(1, inputs) == REVERSE:
            return reverse.jvp(*self._graph(inputs), tangents)
        return torch.stack([self._forward(inputs, row) for row in _rows(inputs, tangents)])

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        self._require(1, inputs)
        return reverse.vjp(*self._graph(inputs), adjoint)

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        route = self._require(2, inputs, adjoint)
        if route == REVERSE_TWICE:
            return reverse.curvature(*self._graph(inputs), adjoint, tangents)
        rows = [self._jvp_of_grad(inputs, adjoint, row) for row in _rows(inputs, tangents)]
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    def prove(self, inputs: Inputs) -> str:
        """Compare the routes at a point.

        Returns:
            The name, with the route that was wrong, if any. What cannot be differentiated raises when it is asked for.
        """
        for order in (1, 2):
            try:
                self._require(order, inputs)
            except TraceError:
                break
        return self.name + self._proof.remark

    def _require(self, order: int, inputs: Inputs, adjoint: Tensor | None = None) -> str:
        """Return the route to a derivative, after its proof."""
        proof = self._proof
        if len(proof.inputs) != len(inputs) or any(a is not b for a, b in zip(proof.inputs, inputs, strict=True)):
            proof.inputs, proof.routes, proof.remark = tuple(inputs), {}, ""
        if order not in proof.routes:
            try:
                route = self._first(inputs) if order == 1 else self._second(inputs, adjoint)
            except TraceError as error:
                proof.routes[order] = error
                raise
            if route is None:  # not finite: what reads the result says where
                return REVERSE if order == 1 else REVERSE_TWICE
            proof.routes[order] = route
        plan = proof.routes[order]
        if isinstance(plan, TraceError):
            raise TraceError(*plan.args)
        return plan

    def _first(self, inputs: Inputs) -> str | None:
        """Compare J t by reverse and by forward mode, and <u, J t> with <J^T u, t>; central differences decide."""
        tangents = tangents_of(inputs, 1)
        y, x = self._graph(inputs)
        u = generic(y, 0)
        routes: dict[str, Callable[[], Covectors]] = {
            REVERSE: lambda: (reverse.jvp(y, x, [t[None] for t in tangents])[0],),
            FORWARD_MODE: lambda: (self._forward(inputs, tangents),),
        }
        route, tangent = self._decided("first", routes, lambda at: (self.function(*at),), inputs, tangents, y.dtype)
        if route is None or tangent[0] is None:
            return route
        covectors = self._by_batch("first", lambda a: reverse.vjp(y, x, a), [u])
        if (gap := adjoint_difference(u, tangent[0], tangents, covectors)) > rounding(torch.finfo(y.dtype).eps):
            raise self._refusal("first", f"<u, J t> and <J^T u, t> differ by {gap:.2g} of their terms")
        if route == REVERSE:
            self._by_batch("first", lambda *t: (reverse.jvp(y, x, t),), tangents)
        return route

    def _second(self, inputs: Inputs, adjoint: Tensor | None) -> str | None:
        """Compare [u . D^2 phi] t by both routes on generic vectors, and test it for symmetry."""
        self._require(1, inputs)
        first, second = tangents_of(inputs, 1), tangents_of(inputs, 100)
        y, x = self._graph(inputs)
        u = generic(y, 0) * (1 if adjoint is None else adjoint != 0)
        run: dict[str, Callable[[tuple[Tensor, ...]], Covectors]] = {
            REVERSE_TWICE: lambda t: _row(reverse.curvature(y, x, u, [d[None] for d in t])),
            JVP_OF_GRAD: lambda t: self._jvp_of_grad(inputs, u, t),
        }

        def gradient(at: tuple[Tensor, ...]) -> Covectors:
            return _row(reverse.vjp(*self._graph(at), u[None].to(at[0].dtype)))

        routes = {name: lambda by=by: by(first) for name, by in run.items()}  # type: ignore[misc]
        route, product = self._decided("second", routes, gradient, inputs, first, y.dtype)
        if route is None:
            return None
        if (gap := asymmetry(first, second, product, run[route](second))) > rounding(torch.finfo(y.dtype).eps):
            raise self._refusal("second", f"by {route} it is not symmetric, by {gap:.2g} of its terms")
        if route == REVERSE_TWICE:
            self._by_batch("second", lambda *t: reverse.curvature(y, x, u, t), first)
        return route

    def _decided(
        self,
        order: str,
        routes: Mapping[str, Callable[[], Covectors]],
        function: Callable[[tuple[Tensor, ...]], Covectors],
        inputs: Inputs,
        tangents: Inputs,
        dtype: torch.dtype,
    ) -> tuple[str | None, Covectors]:
        """Return the correct route to the derivative of ``function``, and its result; None where that is not finite."""
        results: dict[str, Covectors] = {}
        errors: dict[str, Exception] = {}
        for name, run in routes.items():
            try:
                results[name] = run()
            except torch.OutOfMemoryError:
                raise
            except TOLERATED as error:
                errors[name] = error
        if not results:
            raise self._impossible(next(iter(errors.values())))
        preferred, eps = next(iter(results)), torch.finfo(dtype).eps
        gap = difference(*results.values()) if len(results) == 2 else float("inf")
        gap = float("inf") if gap != gap else gap  # one of them is not finite
        if not any(_finite(values) for values in results.values()):
            return None, results[preferred]
        agree = gap <= rounding(eps)
        scheme = (FEWER_STEPS, FEWER_WEIGHTS) if agree else (STEPS, WEIGHTS)
        truth, uncertainty = central_differences(function, _doubled(inputs), _doubled(tangents), *scheme)
        distances = {name: difference(values, truth) if truth else float("inf") for name, values in results.items()}
        if agree and not (uncertainty <= UNSETTLED < distances[preferred]):
            return preferred, results[preferred]
        margin = max(3 * uncertainty, min(rounding(eps), 0.1))
        clear = uncertainty <= (max(0.2 * min(gap, 1.0), rounding(eps)) if len(results) == 2 else 0.01)
        right = min((name for name in distances if clear and distances[name] <= margin), key=distances.__getitem__, default=None)
        if right is not None:
            if len(results) == 2 and max(distances.values()) > margin:
                (rejected,) = set(results) - {right}
                self._proof.remark = f" (by {right}: {rejected} is wrong by {gap:.2g})"
            return right, results[right]
        of = "its value" if order == "first" else "its gradient"
        evidence = "; ".join(
            [f"{name} is {distance:.2g} from central differences of {of}" for name, distance in distances.items()]
            + [f"{name} raised {first_line(error)}" for name, error in errors.items()]
        )
        gap_note = (
            f"its two routes {'agree' if agree else f'differ by {gap:.2g} of the largest entry'}: " if len(results) == 2 else ""
        )
        raise self._refusal(order, f"{gap_note}{evidence} (known to {uncertainty:.1g})")

    def _by_batch(self, order: str, action: Callable[..., Covectors], vectors: Inputs) -> Covectors:
        """Return an action's results for single vectors, compared with those of vmap."""
        single, gap = batch_difference(action, vectors)
        if gap > max((rounding(torch.finfo(c.dtype).eps) for c in single if c is not None), default=0.0):
            raise self._refusal(order, f"torch.vmap of it differs from a loop by {gap:.2g} of the largest entry")
        return single

    def _graph(self, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
        """Run the operation under autograd; return its value and the leaves that stand for its inputs."""
        try:
            with torch.inference_mode(False), torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in inputs]
                return self.function(*leaves), leaves
        except torch.OutOfMemoryError:
            raise
        except TOLERATED as error:
            raise self._impossible(error) from error

    def _forward(self, inputs: Inputs, tangents: Inputs) -> Tensor:
        """Return J t for one tangent of each input."""
        load_forward_mode()
        return reverse.with_memory(torch.func.jvp(self.function, tuple(inputs), tuple(tangents))[1])

    def _jvp_of_grad(self, inputs: Inputs, adjoint: Tensor, tangents: Inputs) -> Covectors:
        """Return [adjoint . D^2 phi] t for one tangent of each input."""
        load_forward_mode()

        def gradient(*at: Tensor) -> tuple[Tensor, ...]:
            return torch.func.grad(lambda *x: (adjoint * self.function(*x)).sum(), argnums=tuple(range(len(at))))(*at)

        return tuple(map(reverse.with_memory, torch.func.jvp(gradient, tuple(inputs), tuple(tangents))[1]))

    def _impossible(self, error: Exception) -> TraceError:
        return TraceError(
            f"{self.name} has no closed form here, and torch cannot differentiate it twice: {first_line(error)}. "
            "Write it in other operations, or take out the parameters before it with params=[...]"
        )

    def _refusal(self, order: str, why: str) -> TraceError:
        remedy = "Write it in other operations, or take out the parameters before it with params=[...]"
        if "fake_quantize" in self.name:
            remedy = "It rounds, and torch passes gradients straight through; write x + (f(x) - x).detach(), which does the same"
        return TraceError(
            f"{self.name} has no closed form here, and torch's {order} derivative of it cannot be trusted: {why}. {remedy}"
        )


def _rows(inputs: Inputs, tangents: Tangents) -> list[list[Tensor]]:
    """Return the batch of tangents as a list, with zeros for those that are None."""
    length = next(len(t) for t in tangents if t is not None)
    pairs = list(zip(inputs, tangents, strict=True))
    return [[torch.zeros_like(x) if t is None else t[i] for x, t in pairs] for i in range(length)]


def _doubled(tensors: Inputs) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in tensors)


def _row(covectors: Covectors) -> Covectors:
    return tuple(None if c is None else c[0] for c in covectors)


def _finite(values: Covectors) -> bool:
    return all(v is None or bool(torch.isfinite(v).all()) for v in values)
