"""The scalar loss of a batch as one trace: the module, followed by the loss in its closed form or traced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hessiankit.request.batch_loss import BatchLoss, ModulePoint
from hessiankit.support.errors import InputError
from hessiankit.tracing.dead_entries import without_dead_entries
from hessiankit.tracing.derivative_tests import generic
from hessiankit.tracing.recording import record
from hessiankit.tracing.trace import Application, Trace, in_one_dtype, trace_call


@dataclass(frozen=True)
class LossTrace:
    """A trace that ends in the scalar loss, in one floating-point type, with the id of the module's output in it.

    The id is None where the output is not one tensor.
    """

    trace: Trace
    output: int | None
    as_stored: bool = False

    def __post_init__(self) -> None:
        """Bring the values to one type, and take out derivatives that are not finite where they do not matter."""
        in_one_dtype(self.trace, as_stored=self.as_stored)
        without_dead_entries(self.trace)

    def signature(self) -> int:
        """Return a number computed from the graph of applications, which differs between different traces."""
        return hash(tuple((a.name, a.inputs, a.output) for a in self.trace.applications))

    def loss_side(self) -> set[int]:
        """Return the values computed from the module's output, whose second derivatives a Gauss-Newton matrix consists of.

        Raises:
            InputError: A second derivative there mixes the output with parameters that reach the loss by another way: the second
                derivatives in the output alone are then no part of the Hessian's.
        """
        assert self.output is not None
        descendants, trace = self.trace.descendants(self.output) - {self.output}, self.trace
        mixed: set[int] = set()
        for a in trace.applications:
            if a.output not in descendants:
                continue
            moving_inputs = [at for at in a.inputs if at in trace.moving]
            bypasses = [at for at in moving_inputs if at in mixed or not (at in descendants or at == self.output)]
            if not bypasses:
                continue
            mixed.add(a.output)
            if _has_curvature(trace, a):
                raise InputError(
                    f"the loss combines the module's output with parameters that reach it by another way ({a.name}), so it has "
                    "no Gauss-Newton part J^T L'' J; let the module apply these parameters to its output, or add their term to "
                    "the loss. kind='hessian' takes any loss"
                )
        return descendants


def loss_trace(batch: BatchLoss, *, is_deferred: bool = False, as_stored: bool = False) -> LossTrace:
    """Trace a module and its loss into one scalar: the module's own call followed by the loss's.

    Args:
        batch: The loss of one batch.
        is_deferred: Whether the trace is read later, when the caller may have overwritten tensors other than the module's and
            the data.
        as_stored: Whether parameters and constants in narrow types are widened only where they are read.
    """
    addresses = batch.stable_addresses if is_deferred else None
    with batch.at():
        if batch.loss.name:
            return _named(batch, addresses, as_stored)
        outputs: list[Tensor] = []
        trace = trace_call(lambda: call_and_loss(batch, outputs), batch.leaves, addresses)
    if not outputs:
        return LossTrace(trace, None, as_stored)
    at = trace.marked[0]
    return LossTrace(trace, trace.add_value(outputs[0].detach()) if at is None else at, as_stored)


@torch.no_grad()
def _has_curvature(trace: Trace, a: Application) -> bool:
    """Tell whether a primitive has a nonzero second derivative with respect to its moving inputs, at their values."""
    if a.primitive.is_linear:
        return False
    inputs, moves = trace.gather(a), [at is not None for at in trace.moving_inputs(a)]
    pairs = enumerate(zip(inputs, moves, strict=True))
    tangents = [generic(x, k).unsqueeze(0) if x is not None and is_moving else None for k, (x, is_moving) in pairs]
    adjoint = generic(trace.values[a.output], len(inputs))
    covectors = a.primitive.linearise(inputs, adjoint, moves).pull(None, tangents)  # type: ignore[arg-type]
    return any(is_moving and x is not None and bool(x.any()) for x, is_moving in zip(covectors, moves, strict=True))


def _named(batch: BatchLoss, addresses: set[int] | None, as_stored: bool) -> LossTrace:
    trace = trace_call(lambda: (batch.read(),), batch.leaves, addresses)
    output, z = trace.output, trace.values[trace.output]
    trace.marked = (output,)
    primitive = batch.loss.primitive(batch.normalizer)
    with torch.no_grad():
        value = primitive.value(z, batch.target)
    trace.output = trace.apply(primitive, (output, trace.add_value(batch.target)), value, batch.loss.name)
    return LossTrace(trace, output, as_stored)


def call_and_loss(batch: BatchLoss, outputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the loss, and the output layer that it depends on, which is appended to ``outputs``, where one is known."""
    result = batch.result()
    value, output = batch.loss.value(result, batch.target), batch.loss.output(result)
    outputs += [] if output is None else [output]
    return (value, *outputs)


def samples_are_independent(batch: BatchLoss) -> bool:
    """Tell whether the module treats samples one by one, by comparing its output on all with its output on parts.

    At the given parameters and at generic ones near them: a gate that is zero hides what it multiplies, but not its slope.
    The parts are halves, and single samples too where the module reads numbers out of tensors: a branch that all of the batch
    takes together may be another for one of its samples.
    """
    count = batch.n_samples
    if count < 2 or not isinstance(batch.target, Tensor) or batch.target.ndim == 0 or batch.target.shape[0] != count:
        return False
    numbers = torch.arange(count, device=batch.device)
    try:
        for parameters in (None, nearby(batch)):
            with batch.at(parameters):
                outputs: list[Tensor] = []
                recording = record(partial(_read, batch, outputs), list(batch.leaves.values()), {})
                parts = [*_halves(numbers), *(numbers.split(1) if recording.reads_numbers else ())]
                if not _agrees_on_parts(batch, outputs[0].detach(), parts):
                    return False
    except Exception:
        return False  # one sample at a time is only a matter of memory
    return True


def _read(batch: BatchLoss, outputs: list[Tensor]) -> None:
    outputs.append(batch.read())


def _halves(numbers: Tensor) -> Iterator[Tensor]:
    """Yield the samples with each digit of their numbers: any two samples are separated by one of these splits."""
    for digit in range((len(numbers) - 1).bit_length()):
        odd = (numbers >> digit) % 2 == 1
        yield from (numbers[odd], numbers[~odd])


def _agrees_on_parts(batch: BatchLoss, output: Tensor, parts: Iterable[Tensor]) -> bool:
    """Compare the output on parts of the samples with that on all of them."""
    if output.ndim == 0 or output.shape[0] != batch.n_samples:
        return False
    tolerance = min(1e3 * torch.finfo(output.dtype).eps, 1e-3) * float(output.abs().max())
    for rows in parts:
        part = batch.part(rows).read().detach()
        if part.shape != output[rows].shape or not bool((part - output[rows]).abs().max() <= tolerance):
            return False
    return True


def nearby(point: ModulePoint, size: float = 0.1) -> dict[str, Tensor]:
    """Return generic parameters near those of a module at a point; each moves by about ``size`` times its largest entry."""
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, p in point.parameters.items():
        step = size * (float(p.abs().max()) or 1.0)
        parameters[name] = p + step * torch.randn(p.shape, generator=generator, device="cpu").to(p)
    return parameters
