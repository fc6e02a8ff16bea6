"""A task's scalar loss as one trace: the module, followed by the loss in its closed form or traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from derivations.loss import CrossEntropy, MeanSquaredError
from derivations.primitive import Primitive
from hessiankit.errors import InputError, TraceError
from hessiankit.request.losses import IGNORE_INDEX, known_count
from hessiankit.request.task import Task
from hessiankit.tracing.one_dtype import in_one_dtype
from hessiankit.tracing.trace import Application, Trace, trace


@dataclass(frozen=True)
class LossTrace:
    """A trace that ends in the scalar loss, in one floating-point type, with the id of the module's output in it."""

    trace: Trace
    output: int | None

    def __post_init__(self) -> None:
        """Bring the values to one type."""
        in_one_dtype(self.trace)


def loss_trace(task: Task, normalizer: float) -> LossTrace:
    """Trace a module and its loss into one scalar."""
    if task.whole:
        return LossTrace(_whole(task), None)
    traced = trace(task.call, task.parameters, task.inputs)
    output = traced.output
    z = traced.values[output]
    if task.loss is None:
        if z.numel() != 1:
            raise TraceError(f"trace: with loss=None the module must return a scalar, got shape {tuple(z.shape)}")
        return LossTrace(traced, None)
    target = task.target
    assert target is not None
    if isinstance(task.loss, str):
        primitive = _primitive(task, normalizer)
        at = traced.add_value(target)
        traced.output = traced.apply(primitive, (output, at), primitive.value(z, target), task.loss)
        return LossTrace(traced, output)
    function = task.loss
    tail = trace(lambda p, t: function(p["outputs"], t), {"outputs": z}, (target,))
    _check_scalar(tail)
    _splice(traced, tail)
    return LossTrace(traced, output)


def loss_value(task: Task, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the loss at some parameters, as torch computes it and autograd follows it."""
    read = task.call(parameters, *task.inputs)
    if task.loss is None:
        return read.reshape(())
    if callable(task.loss):
        return task.loss(read, task.target).reshape(())
    return _primitive(task, normalizer_of(task)).value(read, task.target)


def reached(task: Task) -> set[str]:
    """Return the parameters that the loss depends on, whatever the values are; all of them where torch cannot tell."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in task.parameters.items()}
    try:
        with torch.enable_grad():
            value = loss_value(task, leaves)
        if not value.requires_grad:
            return set()
        slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    except Exception:  # whatever a module may raise when it is called again
        return set(leaves)
    return {name for name, slope in zip(leaves, slopes, strict=True) if slope is not None}


def _primitive(task: Task, normalizer: float) -> Primitive:
    if task.loss == "mse":
        return MeanSquaredError(normalizer)
    return CrossEntropy(ignore_index=IGNORE_INDEX, normalizer=normalizer)


def _whole(task: Task) -> Trace:
    """Trace module and loss as one function, where an object that no trace can hold passes between them."""
    function = task.loss
    assert callable(function)
    traced = trace(lambda p, t, *inputs: function(task.outputs(p, *inputs), t), task.parameters, (task.target, *task.inputs))
    _check_scalar(traced)
    return traced


def _check_scalar(traced: Trace) -> None:
    shape = tuple(traced.values[traced.output].shape)
    if traced.values[traced.output].numel() != 1:
        raise InputError(f"hessian: the loss returned shape {shape}, expected a scalar")


def _splice(head: Trace, tail: Trace) -> None:
    """Append ``tail``, whose one parameter is the output of ``head``, to ``head``."""
    new = {tail.parameters["outputs"]: head.output}
    for at, value in enumerate(tail.values):
        if at not in new:
            new[at] = head.add_value(value, moving=at in tail.moving)
    for a in tail.applications:
        inputs = tuple(None if i is None else new[i] for i in a.inputs)
        head.applications.append(Application(a.primitive, inputs, new[a.output], a.name))
    head.output = new[tail.output]
    head.fallbacks = tuple(dict.fromkeys(head.fallbacks + tail.fallbacks))


def normalizer_of(task: Task) -> float:
    """Return what a named loss divides its sum by: the entries (mse) or the labels that count (cross entropy)."""
    return (known_count(task.loss, task.target) if isinstance(task.loss, str) else None) or 1.0


def samples_are_independent(task: Task) -> bool:
    """Tell whether the module treats samples one by one, by comparing its output on all with its output on parts.

    At the given parameters and at generic ones near them: a gate that is zero hides what it multiplies, but not its slope.
    """
    batch = task.batch
    if batch < 2 or not isinstance(task.target, Tensor) or task.target.ndim == 0 or task.target.shape[0] != batch:
        return False
    try:
        return all(_agree_on_parts(task, cut) for task in (task, _nearby(task)) for cut in {1, (batch + 1) // 3 or 1})
    except Exception:
        return False  # one sample at a time is only a matter of memory


def _agree_on_parts(task: Task, cut: int) -> bool:
    whole = task.call(task.parameters, *task.inputs)
    if whole.ndim == 0 or whole.shape[0] != task.batch:
        return False
    parts = torch.cat([task.call(task.parameters, *task.part(rows).inputs) for rows in (slice(0, cut), slice(cut, None))])
    tolerance = min(1e3 * torch.finfo(whole.dtype).eps, 1e-3) * float(whole.abs().max())
    return parts.shape == whole.shape and bool((parts - whole).abs().max() <= tolerance)


def _nearby(task: Task) -> Task:
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, p in task.parameters.items():
        step = 0.1 * (float(p.abs().max()) or 1.0)
        moved[name] = p + step * torch.randn(p.shape, generator=generator).to(p)
    return replace(task, parameters=moved)
