"""A batch linearised once, so that a product with its Hessian, or with the Gauss-Newton part, costs two sweeps.

With t_v the tangent of a value along a vector V (forward sweep of jvps) and lambda_v its adjoint, the second-order adjoints

    bar(inputs of v)  +=  D phi_v^T bar(v)  +  [lambda_v . D^2 phi_v] t(inputs of v)

give H V = bar(parameters). The Gauss-Newton part keeps the second term in the loss only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hessiankit.engine.checkpoints import gather, size, split_at_checkpoints
from hessiankit.engine.cost import CALL
from hessiankit.engine.diagnosis import origin
from hessiankit.engine.entrywise_fusion import Step, asymmetry, fuse_entrywise
from hessiankit.engine.parameter_memory import ParameterMemory
from hessiankit.engine.storage import empty
from hessiankit.engine.sweep import Tangents, pull, push, reads, sums_of
from hessiankit.primitives.primitive import CovectorSum, Linearised, Nowhere, hollow
from hessiankit.request.batch_loss import BatchLoss, OwnGradient
from hessiankit.request.handshake import Handshake
from hessiankit.request.loss_trace import LossTrace, loss_trace, samples_are_independent
from hessiankit.support.errors import HessiankitError, InputError, TraceError
from hessiankit.support.torch_state import LARGE, read_numbers
from hessiankit.tracing.attention_fusion import fuse_attention
from hessiankit.tracing.head_fusion import fuse_head
from hessiankit.tracing.one_dtype import widened
from hessiankit.tracing.step_fusion import fuse_steps
from hessiankit.tracing.trace import Application, Trace, accumulate, ancestors_of_output, last_readers

Bars: TypeAlias = "dict[int, Tensor]"  # covectors (S, *value.shape) by the value's id

Recompute: TypeAlias = Literal["layers", "all"] | None

CACHED = 160 * 2**20
"""Bytes of tangents up to which a CPU multiplies vectors together.

With 32 MiB of third-level cache a vector takes, at 40, 80 and 160 MiB: of a GPT-2 with two layers of 16, 1.0, 0.77 and 0.62 ms;
of a toy GPT-2 with 30,080 parameters 0.52, 0.45 and 0.41 ms; of a block with 45,056 parameters 4.7, 4.7 and 4.5 ms. The parts of
a product that calls of torch take still shrink, and what a step reads is a small part of the tangents.
"""

LinearisedBatch: TypeAlias = "Linearisation | MicroBatched | Constant"


def vectors_together(bytes_per_vector: int, calls: int, numbers: int) -> int:
    """Return how many vectors a CPU multiplies together.

    As many as its caches hold, but enough that arithmetic takes as long as the calls of torch: of 200 steps of a GRU with 12
    states, 55 vectors take 13 ms each, 3 take 25 ms each.

    Args:
        bytes_per_vector: Bytes of the tangents of one vector.
        calls: Number of operations.
        numbers: Numbers that they return, all together.
    """
    return max(1, CACHED // bytes_per_vector, CALL * calls // max(1, numbers))


class ComparedBatch:
    """A batch whose loss and gradient at one point have been compared with the module's own."""

    loss: float

    def gradient(self) -> Tensor:
        """Return the gradient of the loss, (P,)."""
        raise NotImplementedError

    def reference(self, batch: BatchLoss) -> BatchLoss:
        """Return the batch with this loss and gradient as its reference: buffers and random numbers may have changed since."""
        with torch.no_grad():
            slopes = self.gradient().split([x.numel() for x in batch.parameters.values()])
        named = {name: slope.reshape(x.shape) for (name, x), slope in zip(batch.parameters.items(), slopes, strict=True)}
        return replace(batch, reference=OwnGradient(self.loss, named))

    def is_of(self, traced: LossTrace) -> bool:
        """Tell whether another trace of the batch is the one that has been compared, with the same loss."""
        return False


class Linearisation(ComparedBatch):
    """The traced loss of one batch, linearised: the values that products with every vector share.

    Args:
        batch: The batch.
        gauss_newton: Whether second derivatives count in the loss only.
        recompute: Values computed again in every product: none (None), those between checkpoints, where a single value passes
            ("layers"), or all ("all").
        handshake: Comparison with the module's own loss and gradient, of which this part of a batch is a summand; the caller
            closes it.
        traced_loss: The trace of the batch, if there is one; its values are released.
        parameters: Memory of the parameters, where it is not that of whole tensors.

    Attributes:
        loss: The loss.
        eps: The rounding unit of the coarsest type that the module computed in.
        fallbacks: Operations without a closed form.
        bytes_per_vector: Bytes that a product takes for each vector, beside what is kept.
        vectors_together: Number of vectors that a CPU multiplies together.
    """

    def __init__(
        self,
        batch: BatchLoss,
        *,
        gauss_newton: bool,
        recompute: Recompute = None,
        handshake: Handshake | None = None,
        traced_loss: LossTrace | None = None,
        parameters: ParameterMemory | None = None,
    ) -> None:
        traced_loss = traced_loss or loss_trace(batch, is_deferred=True, as_stored=True)
        trace, self._signature = traced_loss.trace, traced_loss.signature()
        self.loss, self.eps, self.fallbacks = float(trace.values[trace.output]), trace.eps, trace.fallbacks
        self._ids = {name: trace.parameters[name] for name in batch.parameters}
        parameter_ids = set(self._ids.values())
        self._narrow_dtypes, self._is_large = trace.narrow, batch.size > LARGE
        self._moving_values, self._output, self._recompute = trace.moving, trace.output, recompute
        self._loss_side = traced_loss.loss_side() if gauss_newton else None
        fuse_attention(trace, self._loss_side)
        fuse_head(trace, self._loss_side)
        fuse_steps(trace, (traced_loss.output,) if gauss_newton else ())
        self._segments = split_at_checkpoints(trace, layers=recompute == "layers")
        path = ancestors_of_output(trace)
        self._first = {at: reader for at, reader in last_readers(path[::-1]).items() if at in parameter_ids}
        self._live_values: set[int] = set()  # values whose tangents reach a nonzero second derivative
        self._steps_of: list[list[Step] | None] = []
        self._checkpoints: list[tuple[dict[int, Tensor], Bars]] = []  # values that enter a segment, adjoints of what leaves it
        constants = {at for at in range(len(trace.values)) if at in parameter_ids or at not in trace.moving}
        self._constants = {at: trace.stored(at) for at in constants}  # made wide where a step reads them: no copy is kept
        self._parameters = parameters or ParameterMemory()
        self._parameters.begin(trace, self._ids, self._segments)
        self._seed = torch.ones_like(trace.values[trace.output]).unsqueeze(0)
        sizes = [sum(size(trace.values[a.output]) for a in segment.applications) for segment in self._segments]
        self.bytes_per_vector = 3 * max(sizes) + 2 * batch.size * batch.dtype.itemsize
        self.vectors_together = vectors_together(self.bytes_per_vector, len(path), sum(sizes) // batch.dtype.itemsize)
        self._asymmetries: list[tuple[Application, Tensor]] = []
        compare = handshake or Handshake(batch)
        compare.add(trace, {})
        with batch.at(), torch.no_grad():
            self._sweep(trace, compare)
            self._read_tests()
        if handshake is None:
            compare.close()
        _, self._last_reads = reads(path if recompute else self._steps(0), parameter_ids)
        self._batch = batch.unchecked()

    def product(self, rows: Tensor) -> Tensor:
        """Return H V as rows: (S, P) to (S, P)."""
        with torch.inference_mode(False):  # tensors that autograd takes, wherever the product is asked for
            if rows.is_inference() or not rows.is_contiguous():
                rows = empty(rows.shape, rows.dtype, rows.device).copy_(rows)
            result = empty(rows.shape, rows.dtype, rows.device)
        step = self.vectors_together if self._seed.device.type == "cpu" else max(1, len(rows))
        with self._at_the_point():
            for part, into in zip(rows.split(step), result.split(step), strict=True):
                self._multiply(part, into)
        return result

    def gradient(self) -> Tensor:
        """Return the gradient of the loss, (P,)."""
        with torch.inference_mode(False):
            result = torch.empty(1, self._parameters.size, dtype=self._batch.dtype, device=self._batch.device)
        with self._at_the_point(), self._parameters.sums(result) as sums:
            bars: Bars = {self._output: self._seed}
            for k in reversed(range(len(self._segments))):
                with sums(k) as segment_sums, self._parameters.present(k):
                    pull(self._steps(k), bars, {}, segment_sums)
        return result[0]

    def is_of(self, traced: LossTrace) -> bool:
        """Tell whether another trace of the batch is the one that has been compared, with the same loss."""
        return traced.signature() == self._signature and float(traced.trace.values[traced.trace.output]) == self.loss

    def origin(self) -> str | None:
        """Return a phrase that names the first operation with a value or derivative that is not finite, or None."""
        with torch.no_grad():
            return origin(loss_trace(self._batch).trace)

    @contextmanager
    def _at_the_point(self) -> Iterator[None]:
        """Disable gradients; where torch differentiates, at the parameters of the linearisation, which its graph may read."""
        if not self.fallbacks:
            with torch.inference_mode():
                yield
        else:
            with self._batch.at(), torch.no_grad():
                yield

    def _sweep(self, trace: Trace, handshake: Handshake) -> None:
        """Sweep back with the adjoints; each derivative by a parameter is compared once it is complete.

        Steps are kept, or the checkpoints that they are recomputed from; other values are released as soon as nothing needs them.
        """
        read = {at for a in trace.applications if a.primitive.reads_values or self._recompute for at in a.inputs}
        moving = {at: trace.values[at] for at in range(len(trace.values)) if at not in self._constants}
        values = {at: x if at in read else hollow(x) for at, x in moving.items()}
        moving.clear()
        trace.values.clear()
        names = {at: name for name, at in self._ids.items()}
        adjoints: Bars = {self._output: self._seed}
        sums: dict[int, CovectorSum] = {} if handshake.compares else dict.fromkeys(names, Nowhere())
        tested = self._smallest(trace.applications, values) if self._is_large else ()
        spare: dict[tuple[torch.Size, torch.dtype], Tensor] = {}  # memory of gradients that have been compared
        for k, segment in reversed(list(enumerate(self._segments))):
            products = () if segment is self._segments[-1] else segment.products(names)
            entry_values, exit_adjoints = {at: values[at] for at in (*segment.entries, *products)}, dict(adjoints)
            steps: list[Step] = []  # the last one first, as the sweep goes back
            run: list[Step] = []
            live_values: set[int | None] = set()  # values that a step reads
            with self._parameters.present(k):
                for a in reversed(segment.applications):
                    for at in a.inputs:
                        if at in names and at not in sums:
                            x = self._parameters.values[at]
                            memory = spare.pop((x.shape, x.dtype), None)
                            sums[at] = CovectorSum(x.new_empty(1, *x.shape) if memory is None else memory)
                    step = self._step(a, values, adjoints, sums)
                    if step is not None:
                        if not self._recompute:
                            run.append(step)
                            if not step.primitive.primitive.is_entrywise:  # here a run of entrywise ones begins
                                _fuse(run, steps, live_values)
                        if a.output in tested:
                            self._asymmetries.append((a, asymmetry(step)))
                    values.pop(a.output, None)
                    for at in (
                        {at for at in a.inputs if at in names and self._first[at] == a.output} if handshake.compares else ()
                    ):
                        gradient = sums.pop(at).close()
                        if not handshake.complete(names[at], gradient[0]):
                            spare[gradient.shape[1:], gradient.dtype] = gradient
                _fuse(run, steps, live_values)
            self._steps_of.insert(0, None if self._recompute else steps[::-1])
            self._checkpoints.insert(0, (entry_values, exit_adjoints))

    def _smallest(self, applications: Iterable[Application], values: Mapping[int, Tensor]) -> set[int]:
        """Return the output of the smallest operation of each kind, unless it is large itself: its derivatives are tested."""
        sizes: dict[Any, tuple[int, int]] = {}
        for a in applications:
            kind = type(a.primitive), tuple(at in self._moving_values for at in a.inputs)
            entries = sum(x.numel() for x in gather(a, values, self._constants) if x is not None)
            sizes[kind] = min((entries, a.output), sizes.get(kind, (LARGE, -1)))
        return {output for _, output in sizes.values()}

    def _read_tests(self) -> None:
        """Read the asymmetries of all operations that are tested, together: a device is waited for once.

        Raises:
            TraceError: The derivatives of one are not each other's transposes.
        """
        applications, errors = zip(*self._asymmetries, strict=True) if self._asymmetries else ((), ())
        for a, error in zip(applications, read_numbers(errors), strict=True):
            if not error <= max(self.eps, torch.finfo(self._seed.dtype).eps) ** 0.5:
                raise TraceError(
                    f"trace: the derivatives of {a.name!r} ({type(a.primitive).__name__}) are not each other's transposes, by "
                    f"{error:.1e} of their size: it overflows, or its second derivative is wrong; write it in other operations, "
                    "or use a wider dtype"
                )

    def _step(self, a: Application, values: dict[int, Tensor], adjoints: Bars, sums: Mapping[int, CovectorSum]) -> Step | None:
        """Linearise one application, and pull the adjoint of its output back; None where there is none."""
        adjoint = adjoints.pop(a.output, None)
        if adjoint is None:
            return None
        inputs = tuple(at if at in self._moving_values else None for at in a.inputs)
        counts = not a.primitive.is_linear and (self._loss_side is None or a.output in self._loss_side)
        at_point = a.primitive.linearise(
            self._inputs(a, values),  # type: ignore[arg-type]
            adjoint[0] if counts else None,
            [at is not None for at in inputs],
        )
        if at_point.is_nonlinear or a.output in self._live_values:
            self._live_values.update(at for at in inputs if at is not None)
        accumulate(adjoints, inputs, at_point.pull_into(adjoint, None, sums_of(sums, inputs)))
        at_point.forget()
        if not self._recompute:
            at_point.hold(gather(a, values, self._constants))  # type: ignore[arg-type]
        return Step(at_point, inputs, a.output)

    def _inputs(self, a: Application, values: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
        """Return the inputs of an application in the type of the derivatives."""
        return tuple(x if x is None else widened(x, self._seed.dtype) for x in gather(a, values, self._constants))

    def _steps(self, k: int) -> list[Step]:
        """Return the steps of a segment, kept or recomputed."""
        stored_steps = self._steps_of[k]
        if stored_steps is not None:
            return stored_steps
        segment, (entry_values, exit_adjoints) = self._segments[k], self._checkpoints[k]
        values, adjoints = dict(entry_values), dict(exit_adjoints)
        for a in segment.applications:
            if a.output not in values:
                values[a.output] = self._value(a, self._inputs(a, values))
        discard = dict.fromkeys(self._ids.values(), Nowhere())
        steps = []
        for a in reversed(segment.applications):
            steps.append(self._step(a, values, adjoints, discard))
            values.pop(a.output)
        return [step for step in reversed(steps) if step is not None]

    def _value(self, a: Application, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """Return the output of one application, rounded to the type that the module computed in."""
        value = a.primitive.value(*inputs)  # type: ignore[arg-type]
        narrow = self._narrow_dtypes.get(a.output)
        return value if narrow is None else value.to(narrow).to(value.dtype)

    def _multiply(self, rows: Tensor, result: Tensor) -> None:
        """Write H rows^T as rows (S, P) to ``result``."""
        tangents: dict[int, Tangents] = {}
        segment_tangents: list[dict[int, Tangents]] = []  # the tangents that enter each segment
        for k, segment in enumerate(self._segments):
            segment_tangents.append({at: tangents[at] for at in segment.entries if at in tangents})
            if k < len(self._segments) - 1:
                with self._parameters.present(k):
                    tangents |= self._parameters.tangents(rows, k)
                    push(self._forward_steps(k), tangents, self._live_values, self._last_reads)
                tangents = {at: t for at, t in tangents.items() if at not in self._parameters.values}
        bars: Bars = {}
        with self._parameters.sums(result) as sums:
            for k in reversed(range(len(self._segments))):
                with sums(k) as segment_sums, self._parameters.present(k):
                    tangents = segment_tangents.pop()
                    tangents |= self._parameters.tangents(rows, k)
                    steps = self._steps(k)
                    input_tangents = push(steps, tangents, self._live_values, self._last_reads, recomputes=self._is_large)
                    pull(steps, bars, input_tangents, segment_sums)
                    del steps, input_tangents, tangents  # no parameter, and no direction, is there while sums are moved

    def _forward_steps(self, k: int) -> Iterator[Step]:
        """Yield the steps of a segment, computed again, with first derivatives alone; values are released once they are read."""
        values = dict(self._checkpoints[k][0])
        for a in self._segments[k].applications:
            inputs = self._inputs(a, values)
            if a.output not in values:
                values[a.output] = self._value(a, inputs)
            if a.output in self._live_values:
                moving_inputs = tuple(at if at in self._moving_values else None for at in a.inputs)
                at_point = a.primitive.linearise(inputs, None, [at is not None for at in moving_inputs])  # type: ignore[arg-type]
                yield Step(at_point, moving_inputs, a.output)
            else:
                yield Step(Linearised(a.primitive, inputs), (), a.output)  # type: ignore[arg-type]
            for at in self._last_reads.get(a.output, ()):
                values.pop(at, None)


def _fuse(run: list[Step], steps: list[Step], live_values: set[int | None]) -> None:
    """Move a run to the steps, all of them last first, fused, so that single operations keep no memory of their own."""
    result = fuse_entrywise(run[::-1], live_values) if len(run) > 1 else list(run)
    live_values.update(at for step in result for at in step.inputs)
    steps += result[::-1]
    run.clear()


class Constant(ComparedBatch):
    """A batch whose loss does not depend on the parameters, with the interface of :class:`Linearisation`."""

    eps, fallbacks = 0.0, ()

    def __init__(self, batch: BatchLoss) -> None:
        self.loss = batch.own_value()
        self._zeros = torch.zeros((), dtype=batch.dtype, device=batch.device).expand(batch.size)
        self.bytes_per_vector = size(self._zeros)

    def product(self, rows: Tensor) -> Tensor:
        """Return zeros, (S, P)."""
        return torch.zeros_like(rows, memory_format=torch.contiguous_format)

    def gradient(self) -> Tensor:
        """Return zeros, (P,)."""
        return self._zeros.clone()

    def reference(self, batch: BatchLoss) -> BatchLoss:
        """Return a batch with this loss, and no gradient, to compare with."""
        return replace(batch, reference=OwnGradient(self.loss, dict.fromkeys(batch.parameters)))

    def origin(self) -> None:
        """Return None: every value is finite."""


DEPENDENT = (
    "micro_batch: the parts of the batch do not add up to the whole: samples depend on each other, as in a batch norm in "
    "training mode or by a number that is read from all of them, or are not the first axis of the output; leave micro_batch out"
)


class MicroBatched(ComparedBatch):
    """A batch in parts of some samples, each recomputed in every product, with the interface of :class:`Linearisation`."""

    def __init__(self, batch: BatchLoss, size: int, *, gauss_newton: bool, recompute: Recompute) -> None:
        starts = range(0, batch.n_samples, size)
        if not batch.loss.name:
            raise InputError("micro_batch needs a loss whose sum over samples is known: 'mse' or 'cross_entropy', or torch's own")
        if batch.reference is None and not samples_are_independent(batch):
            raise TraceError(DEPENDENT)
        handshake = Handshake(batch, len(starts))
        linearised = partial(Linearisation, gauss_newton=gauss_newton, recompute=recompute or "all", handshake=handshake)
        try:
            self._parts = [linearised(batch.part(slice(start, start + size))) for start in starts]
        except HessiankitError:
            raise
        except ValueError as error:  # of shapes that fit for the whole batch
            raise InputError(
                f"micro_batch={size}, of {batch.n_samples} samples: {str(error).rstrip('.')}; inputs, output and target need the "
                "samples as their first axis: return z.transpose(0, 1), say, or leave micro_batch out"
            ) from error
        try:
            handshake.close()
        except TraceError as error:
            raise (error if samples_are_independent(batch) else TraceError(DEPENDENT)) from error
        self.loss, self.eps = sum(part.loss for part in self._parts), max(part.eps for part in self._parts)
        self.fallbacks = tuple(dict.fromkeys(name for part in self._parts for name in part.fallbacks))
        self.bytes_per_vector = max(part.bytes_per_vector for part in self._parts)

    def product(self, rows: Tensor) -> Tensor:
        """Return H V as rows: (S, P) to (S, P)."""
        return reduce(Tensor.add_, (part.product(rows) for part in self._parts))

    def gradient(self) -> Tensor:
        """Return the gradient of the loss, (P,)."""
        return reduce(Tensor.add_, (part.gradient() for part in self._parts))

    def origin(self) -> str | None:
        """Return a phrase that names the first operation with a value or derivative that is not finite, or None."""
        return next((phrase for part in self._parts if (phrase := part.origin())), None)


def linearise(
    batch: BatchLoss,
    *,
    gauss_newton: bool,
    recompute: Recompute = None,
    micro_batch: int | None = None,
    parameters: ParameterMemory | None = None,
) -> LinearisedBatch:
    """Linearise one batch, whole or some samples at a time; arguments as in :class:`Linearisation`.

    Raises:
        TraceError: If torch cannot trace the module, or if samples are not independent.
    """
    try:
        if micro_batch is not None and micro_batch < batch.n_samples:
            return MicroBatched(batch, micro_batch, gauss_newton=gauss_newton, recompute=recompute)
        recompute = recompute or ("all" if micro_batch else None)
        return Linearisation(batch, gauss_newton=gauss_newton, recompute=recompute, parameters=parameters)
    except TraceError:
        if batch.reached():
            raise
    return Constant(batch)
