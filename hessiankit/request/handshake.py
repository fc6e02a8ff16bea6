"""Before a result: are the trace's loss and gradient those of the module's own call?

Value and gradient see whatever a trace could miss: a parameter taken for a constant, another branch, a cast left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hessiankit.request.batch_loss import BatchLoss, OwnGradient
from hessiankit.request.cancellation import ROUNDING, rounding_errors
from hessiankit.request.loss_trace import call_and_loss
from hessiankit.support.errors import TraceError
from hessiankit.support.tables import two_numbers
from hessiankit.support.torch_state import has_memory, is_narrow, read_numbers
from hessiankit.tracing.graph import NUMBER
from hessiankit.tracing.recording import leaves_course
from hessiankit.tracing.segment import Segment
from hessiankit.tracing.segment_probe import Probe, probe_segments, verify_segments
from hessiankit.tracing.stopped import held_values
from hessiankit.tracing.trace import Trace

FORMULA_ERROR = 1e-7
"""Error of torch's own formulas, relative to a gradient: hardsigmoid's constants are rounded to single precision."""

NOISE = 16.0
"""Multiple of the noise of the gradient that counts as rounding."""

PART = 2**20
"""Entries that are compared at once."""

UNCOMPARED = "; not compared with the module's own gradient"
"""Words in the title of a result where the comparison was switched off."""


class Handshake:
    """Accumulates the traced loss and gradient of a batch, and compares them with the module's own.

    Args:
        batch: The whole batch.
        parts: Number of traces that it is cut into, for :meth:`complete`.
    """

    def __init__(self, batch: BatchLoss, parts: int = 1) -> None:
        self._batch, self._loss, self._eps = batch, 0.0, 0.0
        self._part_counts = dict.fromkeys(batch.parameters, parts)
        self._gradient: dict[str, Tensor] = {}
        self._probes: list[Probe] = []
        self._courses: list[list[Any]] = []
        self._agreements: set[str] = set()
        slopes = batch.reference.gradient.items() if batch.reference is not None else ()
        present = {name: x for name, x in slopes if x is not None and x.numel()}
        self._largest_slopes = dict(zip(present, read_numbers(map(_largest, present.values())), strict=True))
        self._largest = max(filter(math.isfinite, self._largest_slopes.values()), default=0.0)

    @property
    def compares(self) -> bool:
        """Whether there are a loss and a gradient to compare with."""
        return self._batch.reference is not None

    def add(self, trace: Trace, adjoints: Mapping[int, Tensor], share: float = 1.0) -> None:
        """Add some samples, with the derivatives of ``share`` times their loss, by value id."""
        self._courses.append(trace.course)
        if self._batch.reference is None:
            return
        self._loss += float(trace.values[trace.output])
        self._eps = max(self._eps, trace.eps)
        if any(isinstance(a.primitive, Segment) for a in trace.applications):
            probe = probe_segments(trace, self._batch.still)
            self._probes += [] if probe is None else [probe]
        for name, at in trace.parameters.items():
            if at in adjoints:
                self._take(name, adjoints[at] if share == 1.0 else adjoints[at] / share)

    def complete(self, name: str, slope: Tensor) -> bool:
        """Add a part's derivative with respect to one parameter; compare the sum once it is complete; return whether it is kept.

        On a device all are compared together in :meth:`close`, which waits for it once.
        """
        reference = self._batch.reference
        if reference is None:
            return False
        slope = slope.to(self._batch.device)
        self._take(name, slope)
        self._part_counts[name] -= 1
        if slope.device.type == "cpu" and not self._part_counts[name] and not self._differences(reference, (name,)):
            self._agreements.add(name)
            del self._gradient[name]
        return name in self._gradient

    def _take(self, name: str, slope: Tensor) -> None:
        self._gradient[name] = self._gradient[name] + slope if name in self._gradient else slope

    def close(self) -> None:
        """Compare.

        Raises:
            TraceError: Loss or gradient differ by more than rounding: the message names the parameter and the likely cause.
        """
        reference = self._batch.reference
        if reference is None:  # the course is compared even where the gradient is not
            if any(isinstance(step, NUMBER) for course in self._courses for step in course):
                self._check_course()
            return
        if self._differences(reference, self._open_names):
            self._compare(reference)
        if self._probes:  # values of which only the first derivative has been compared so far
            constants = held_values(lambda context: self._batch.own_gradient(context=context))

            def call_at(parameters: dict[str, Tensor]) -> tuple[float, Mapping[str, Tensor | None]]:
                result = self._batch.own_gradient(parameters, constants)
                return result.loss, result.gradient

            verify_segments(self._probes, self._batch.parameters, call_at, self._batch.still)

    def _compare(self, reference: OwnGradient) -> None:
        repeat = self._batch.own_gradient()
        loss, eps = abs(reference.loss - repeat.loss), self._eps
        if loss > ROUNDING * eps * abs(reference.loss):
            raise TraceError(
                "trace: two calls of the module on the same data give different losses "
                f"({two_numbers(reference.loss, repeat.loss)}), so the loss is not a function of the parameters: it is random, "
                "depends on earlier calls, or reads something that has changed since; "
                "call module.eval(), take what changes out of forward, or start anew"
            )
        parameter = next((name for name, g in repeat.gradient.items() if self._moved(reference.gradient[name], g)), None)
        if parameter is not None:
            raise TraceError(
                f"trace: two calls of the module on the same data give different gradients in {parameter!r}, so something that "
                "it reads has changed since the first one, such as a flag; change it back, or start anew"
            )
        self._check_course()
        noise = _noise(self._batch, self._open_names, eps)
        floor = eps * scale_of_gradient(self._batch, repeat)
        different = self._differences(repeat, self._open_names, noise, dict.fromkeys(self._open_names, floor))
        if "" not in different and different:
            errors, _ = rounding_errors(self._batch, {})
            sizes = {name: eps * float(_largest(errors[name])) for name in different}
            different = self._differences(repeat, different, noise, sizes)
        if different:
            raise TraceError(self._message(repeat, different))

    def _check_course(self) -> None:
        """Raise an error if the module's own call takes another branch than its trace, which could pass for noise."""
        if len(self._courses) != 1:
            return
        batch, leaves = self._batch, list(self._batch.leaves.values())
        run = batch.read if batch.loss.name else lambda: call_and_loss(batch, [])
        with batch.at():
            divergence = leaves_course(run, leaves, self._courses[0])
        if divergence is not None:
            step_of_module, step_of_trace, line = divergence
            raise TraceError(
                f"trace: the module's own call has {step_of_module} where its trace has {step_of_trace}"
                f"{f', at {line}' if line else ''}: rounding decides what it computes, by a number that it reads out of a "
                "tensor, as between entries that are equal; keep such numbers out of it"
            )

    def _moved(self, gradient: Tensor | None, repeat: Tensor | None) -> bool:
        """Tell whether two calls of the module itself have different gradients, by more than rounding."""
        if gradient is None or repeat is None:
            return gradient is not repeat
        return float(_largest_difference(gradient, repeat)) > (FORMULA_ERROR + ROUNDING * self._eps) * self._largest

    @property
    def _open_names(self) -> tuple[str, ...]:
        """Names that have not yet agreed: "" for the loss, and parameters."""
        return ("", *(name for name in self._batch.parameters if name not in self._agreements))

    def _differences(
        self,
        reference: OwnGradient,
        names: Iterable[str],
        noise: Mapping[str, float] | None = None,
        errors: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Return what differs by more than rounding, with the difference relative to the larger of the two.

        With the noise of the module's own gradient, and the rounding errors of terms that cancel in it, also what torch's own
        formulas lose is no difference.
        """
        different: dict[str, float] = {}

        def is_rounding(difference: float, size: float, name: str) -> bool:
            tolerance = ROUNDING * self._eps * size
            if name:  # what cancels is rounded as what it is made of, and that is no smaller than the gradient
                tolerance += ROUNDING * self._eps * self._largest
            if noise is not None:
                tolerance += FORMULA_ERROR * size + NOISE * noise.get(name, 0.0)
            return difference <= tolerance + ROUNDING * (errors or {}).get(name, 0.0)

        for name, size_of_reference, difference in self._sizes(reference, list(names)):
            if is_rounding(difference, size_of_reference, name):
                continue
            largest = self._size_of_trace(name)
            if not math.isfinite(largest):
                continue  # the matrix is not finite either, and the error for that says where it comes from
            size = max(largest, size_of_reference)
            if not is_rounding(difference, size, name):
                different[name] = difference / size if size else math.inf  # where the module's own is NaN
        return different

    def _size_of_trace(self, name: str) -> float:
        """Return the largest entry of the trace's gradient with respect to a parameter; its loss, for the name ""."""
        if not name:
            return abs(self._loss)
        slope = self._gradient.get(name)
        return 0.0 if slope is None or not slope.numel() else float(_largest(slope))

    def _sizes(self, reference: OwnGradient, names: Sequence[str]) -> Iterator[tuple[str, float, float]]:
        """Yield names with the largest entry of the module's own gradient, and of the difference of the trace's."""
        terms: dict[tuple[str, str], Tensor] = {}
        known = self._largest_slopes if reference is self._batch.reference else {}
        for name in filter(None, names):
            slope_of_trace, slope_of_module = self._gradient.get(name), reference.gradient[name]
            if slope_of_trace is not None and slope_of_trace.numel():
                terms[name, "difference"] = _largest_difference(slope_of_trace, slope_of_module)
            if slope_of_module is not None and slope_of_module.numel() and name not in known:
                terms[name, "module"] = _largest(slope_of_module)
        sizes = dict(zip(terms, read_numbers(terms.values()), strict=True)) | {(name, "module"): x for name, x in known.items()}
        for name in names:
            if name:
                size_of_reference = sizes.get((name, "module"), 0.0)
                yield name, size_of_reference, sizes.get((name, "difference"), size_of_reference)
            else:
                yield name, abs(reference.loss), abs(self._loss - reference.loss)

    def _message(self, reference: OwnGradient, different: Mapping[str, float]) -> str:
        name = max(different, key=lambda n: (n != "", different[n]))
        slope = reference.gradient[name] if name else None
        if slope is not None and not bool(torch.isfinite(slope).all()):
            return (
                f"trace: the module's own gradient with respect to {name!r} is NaN or infinite where that of the trace is not: "
                "torch multiplies an infinite derivative by zero, in an entry that does not move or is not read; keep its inputs "
                "away from such a point (torch.where or clamp before the operation as well as after it). handshake=False leaves "
                "the comparison out"
            )
        quantity = f"the gradient with respect to {name!r}" if name else "the loss"
        finding = f"trace: {quantity}, as traced, is off by {different[name]:.1e} of that of the module's own call"
        return f"{finding}: {self._cause(reference, name)}; nothing is returned. handshake=False leaves the comparison out"

    def _cause(self, reference: OwnGradient, name: str) -> str:
        leaf = self._batch.leaves.get(name)
        if leaf is not None and leaf._backward_hooks:
            return "a hook on the parameter changes its gradient, which then is not that of the loss; remove the hook"
        if leaf is not None and reference.gradient[name] is None:
            return "autograd does not reach the parameter there (detach, .data, or requires_grad turned off in forward)"
        return (
            "a custom backward that is not the derivative of its forward, a hook that changes a gradient, a copy of a parameter "
            "made before the call, requires_grad switched in forward, something that is done only where nobody watches; or the "
            "module's own gradient has lost its digits, as in a saturated softmax"
        )


def _largest(x: Tensor) -> Tensor:
    """Return the largest absolute value, NaN if there is one."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


def _largest_difference(x: Tensor, y: Tensor | None) -> Tensor:
    """Return the largest absolute difference, NaN if there is one; a part at a time, which needs little memory. None is zero."""
    if y is None:
        return _largest(x)
    if x.numel() <= PART:
        return _largest(x - y)
    parts = zip(x.reshape(-1).split(PART), y.reshape(-1).split(PART), strict=True)
    return torch.stack([_largest(a - b) for a, b in parts]).amax()


def scale_of_gradient(batch: BatchLoss, reference: OwnGradient) -> float:
    """Return the size of the gradient here and at generic points, which rounding errors of cancelled entries have."""
    rng = torch.Generator().manual_seed(0)
    unchecked, gradients = batch.unchecked(), [reference.gradient]
    normals = {name: torch.randn(x.shape, generator=rng, device="cpu").to(x) for name, x in batch.parameters.items()}
    points = (
        {name: x + 0.1 * x.abs().max() * normals[name] if x.numel() else x for name, x in batch.parameters.items()},
        normals,
        {name: 0.1 * x for name, x in normals.items()},
    )
    for point in points:
        with suppress(Exception):  # whatever a module raises outside its domain
            gradients.append(unchecked.own_gradient(point).gradient)
    sizes = [0.0]
    for gradient in gradients:
        largest = read_numbers(_largest(g) for g in gradient.values() if g is not None and g.numel())
        sizes += [size for size in largest if math.isfinite(size)]
    return max(sizes)


def _noise(batch: BatchLoss, names: Iterable[str], eps: float) -> dict[str, float]:
    """Return the size of the rounding errors of the module's own loss, under "", and of some gradients, the largest of each.

    Sixth differences over a tiny stretch cancel the smooth part and leave rounding, amplified by sqrt(924). The smaller of two
    stretches counts, so that a kink in one of them does not. All parameters move: where the loss does not depend on those of
    the batch, their own move would change no rounding.

    Source: Moré and Wild, Estimating computational noise, SIAM J. Sci. Comput. 33 (2011).
    """
    rng = torch.Generator().manual_seed(0)
    unchecked, step = batch.unchecked(), min(eps**0.4, 8 * eps) if eps > 1e-4 else eps**0.4
    parameters = {name: batch.state.values[name] for name, _ in batch.module.named_parameters()}
    point = {name: x for name, x in parameters.items() if x.is_floating_point() and has_memory(x) and not is_narrow(x)}
    noise: dict[str, float] = {}
    for _ in range(2):
        displacement = {}
        for name, x in point.items():
            signs = torch.randint(0, 2, x.shape, generator=rng, device="cpu").to(x) * 2 - 1
            displacement[name] = step * (x.abs().max() if x.numel() else 1.0) * signs
        sixth: dict[str, Tensor] = {}
        for k in range(7):
            at = unchecked.own_gradient({name: x + (k + 1) * displacement[name] for name, x in point.items()})
            terms = {"": torch.tensor(at.loss, dtype=torch.float64, device="cpu")} | {
                n: g for n in names if (g := at.gradient.get(n)) is not None
            }
            for name, term in terms.items():
                weighted_term = term.to(torch.float64) * ((-1) ** k * math.comb(6, k))
                sixth[name] = sixth[name] + weighted_term if name in sixth else weighted_term
        for name, difference in ((n, x) for n, x in sixth.items() if x.numel()):
            noise[name] = min(noise.get(name, math.inf), float(_largest(difference)) / 924**0.5)
    return noise
