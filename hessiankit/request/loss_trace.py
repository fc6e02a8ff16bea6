"""A task's scalar loss as one trace: the module, followed by the loss in its closed form or traced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hessiankit.primitives.loss import CrossEntropy, MeanSquaredError, SampledLoss
from hessiankit.request.calling import IGNORE_INDEX, SAMPLED, known_count, member, read_outputs
from hessiankit.request.task import Task
from hessiankit.support.errors import InputError, TraceError
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

    def __post_init__(self) -> None:
        """Bring the values to one type, and take out derivatives that are not finite where they do not matter."""
        in_one_dtype(self.trace)
        without_dead_entries(self.trace)

    def loss_side(self) -> set[int]:
        """Return the values computed from the module's output, whose second derivatives a Gauss-Newton matrix consists of.

        Raises:
            InputError: A second derivative there mixes the output with parameters that reach the loss by another way: the second
                derivatives in the output alone are then no part of the Hessian's.
        """
        assert self.output is not None
        after, trace = self.trace.descendants(self.output) - {self.output}, self.trace
        mixed: set[int] = set()
        for a in trace.applications:
            if a.output not in after:
                continue
            moving = [at for at in a.inputs if at in trace.moving]
            beside = [at for at in moving if at in mixed or not (at in after or at == self.output)]
            if not beside:
                continue
            mixed.add(a.output)
            if _has_curvature(trace, a):
                raise InputError(
                    f"the loss combines the module's output with parameters that reach it by another way ({a.name}), so it has "
                    "no Gauss-Newton part J^T L'' J; let the module apply these parameters to its output, or add their term to "
                    "the loss. kind='hessian' takes any loss"
                )
        return after


def loss_trace(task: Task, normalizer: float, *, later: bool = False) -> LossTrace:
    """Trace a module and its loss into one scalar: the module's own call, and the loss's, as the user makes them.

    Args:
        task: What is asked for.
        normalizer: What a named loss divides its sum by.
        later: Whether the trace is read when the caller may have written into tensors that are not the module's or the data.
    """
    kept = task.kept if later else None
    with task.at():
        if isinstance(task.loss, str):
            return _named(task, normalizer, kept)
        outputs: list[Tensor] = []
        traced = trace_call(lambda: call_and_loss(task, outputs), task.leaves, kept)
    if not outputs:
        return LossTrace(traced, None)
    at = traced.marked[0]
    return LossTrace(traced, traced.add_value(outputs[0].detach()) if at is None else at)


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


def _named(task: Task, normalizer: float, kept: set[int] | None) -> LossTrace:
    traced = trace_call(lambda: (task.read(),), task.leaves, kept)
    output, z = traced.output, traced.values[traced.output]
    traced.marked = (output,)
    primitive = loss_primitive(task, normalizer)
    with torch.no_grad():
        value = primitive.value(z, task.target)
    traced.output = traced.apply(primitive, (output, traced.add_value(task.target)), value, str(task.loss))
    return LossTrace(traced, output)


def call_and_loss(task: Task, outputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the loss, and the output layer that it depends on, which is appended to ``outputs``, where one is known."""
    result = task.run()
    read = read_outputs("hessian", task.loss, result)
    value = _scalar(task.loss(read, task.target) if callable(task.loss) else read)
    output = member(result, "logits") if task.by_logits else read if callable(task.loss) and not task.whole else None
    outputs += [] if output is None else [output]
    return (value, *outputs)


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TraceError(f"trace: the loss is a scalar when the module is called, but {seen} when it is called again")
    return value


def loss_primitive(task: Task, normalizer: float) -> MeanSquaredError | CrossEntropy | SampledLoss:
    """Return a named loss as a primitive with inputs (output, target)."""
    assert isinstance(task.loss, str)
    name = task.loss.removeprefix(SAMPLED)
    loss = MeanSquaredError(normalizer) if name == "mse" else CrossEntropy(ignore_index=IGNORE_INDEX, normalizer=normalizer)
    return loss if name == task.loss else SampledLoss(loss)


def normalizer_of(task: Task) -> float:
    """Return what a named loss divides its sum by: the entries (mse) or the labels that count (cross entropy)."""
    return (known_count(task.loss, task.target) if isinstance(task.loss, str) else None) or 1.0


def samples_are_independent(task: Task) -> bool:
    """Tell whether the module treats samples one by one, by comparing its output on all with its output on parts.

    At the given parameters and at generic ones near them: a gate that is zero hides what it multiplies, but not its slope.
    The parts are halves, and single samples too where the module reads numbers out of tensors: a branch that all of the batch
    takes together may be another for one of its samples.
    """
    batch = task.batch
    if batch < 2 or not isinstance(task.target, Tensor) or task.target.ndim == 0 or task.target.shape[0] != batch:
        return False
    numbers = torch.arange(batch, device=task.device)
    try:
        for parameters in (None, nearby(task)):
            with task.at(parameters):
                outputs: list[Tensor] = []
                recording = record(partial(_read, task, outputs), list(task.leaves.values()), {})
                parts = [*_halves(numbers), *(numbers.split(1) if recording.reads_numbers else ())]
                if not _agrees_on_parts(task, outputs[0].detach(), parts):
                    return False
    except Exception:
        return False  # one sample at a time is only a matter of memory
    return True


def _read(task: Task, outputs: list[Tensor]) -> None:
    outputs.append(task.read())


def _halves(numbers: Tensor) -> Iterator[Tensor]:
    """Yield the samples with each digit of their numbers: any two of them are apart in one of these."""
    for digit in range((len(numbers) - 1).bit_length()):
        odd = (numbers >> digit) % 2 == 1
        yield from (numbers[odd], numbers[~odd])


def _agrees_on_parts(task: Task, whole: Tensor, parts: Iterable[Tensor]) -> bool:
    """Compare the output on parts of the samples with that on all of them."""
    if whole.ndim == 0 or whole.shape[0] != task.batch:
        return False
    tolerance = min(1e3 * torch.finfo(whole.dtype).eps, 1e-3) * float(whole.abs().max())
    for rows in parts:
        part = task.part(rows).read().detach()
        if part.shape != whole[rows].shape or not bool((part - whole[rows]).abs().max() <= tolerance):
            return False
    return True


def nearby(task: Task, size: float = 0.1) -> dict[str, Tensor]:
    """Return generic parameters near those of a task; each moves by about ``size`` times its largest entry."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, p in task.parameters.items():
        step = size * (float(p.abs().max()) or 1.0)
        moved[name] = p + step * torch.randn(p.shape, generator=generator, device="cpu").to(p)
    return moved
