"""The Jacobian of a module's output with respect to its parameters, and its transpose, as linear operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.curvature.tensor_operator import TensorOperator
from hessiankit.engine.diagnosis import REMEDY, origin_of_any
from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.parts import WORKSPACE
from hessiankit.engine.sweep import Tangents, dense, pull, push, reads
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.handshake import Handshake
from hessiankit.request.loss_trace import LossTrace, loss_trace
from hessiankit.request.read import read_request
from hessiankit.request.selection import Params
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import full_precision, one_at_a_time
from hessiankit.tracing.trace import Trace

WHO = "jacobian_operator"
NOTHING: Mapping[int, Collection[int]] = MappingProxyType({})

PERIOD = 997
"""Entries after which the cotangent of the comparison repeats; a prime, so that rows of an output are not alike."""


class JacobianOperator(TensorOperator):
    """The Jacobian J of a module's output with respect to its parameters, (outputs, P); made by :func:`jacobian_operator`.

    ``J @ v`` pushes tangents of the parameters forward, ``J.T @ u`` pulls covectors of the output back: one sweep each for a
    whole block of vectors.

    Attributes:
        shape: (entries of the output, P).
        output_shape: Shape of the output; entries are in its row-major order.
        names: Parameter names, in the order of the entries of a vector.
        slices: Entries of each parameter.
        fallbacks: Operations without a closed form, which are differentiated automatically one by one.
    """

    def __init__(self, batch: BatchLoss) -> None:
        traced = loss_trace(batch, is_deferred=True)
        if traced.output is None:
            raise InputError(f"{WHO}: the module does not return one tensor; wrap it so that it does")
        trace, self._output = traced.trace, traced.output
        with batch.at(), torch.no_grad():
            self._compare(batch, traced)
            self._prepare(batch, trace)
        self.output_shape = tuple(trace.values[self._output].shape)
        super().__init__((math.prod(self.output_shape), batch.size), batch.dtype, batch.device)
        self.names, self.slices, self.fallbacks = tuple(batch.parameters), batch.slices, trace.fallbacks
        self._ids = {name: trace.parameters[name] for name in batch.parameters}
        self._shapes = {name: trace.values[at].shape for name, at in self._ids.items()}
        self._batch = batch.unchecked()
        widest = sum(trace.values[a.output].numel() for a in trace.applications) + batch.size
        self.block_size = max(1, WORKSPACE // (widest * batch.dtype.itemsize))

    def _compare(self, batch: BatchLoss, traced: LossTrace) -> None:
        """Compare loss and gradient of the trace with those of the module's own call, if they are known."""
        if batch.reference is not None:
            compare = Handshake(batch)
            compare.add(traced.trace, traced.trace.adjoints())
            compare.close()

    def _prepare(self, batch: BatchLoss, trace: Trace, covered: Mapping[int, Collection[int]] = NOTHING) -> None:
        """Linearise the applications on the way to the output; ``covered`` are places of inputs that are held constant."""
        self._needed, self._steps = {self._output}, list[Step]()
        for a in reversed(trace.applications):
            if a.output not in self._needed:
                continue
            constant = covered.get(a.output, ())
            inputs = tuple(at if at in trace.moving and k not in constant else None for k, at in enumerate(a.inputs))
            if any(at is not None for at in inputs):
                point = a.primitive.linearise(trace.gather(a), None, [at is not None for at in inputs])  # type: ignore[arg-type]
                point.forget()
                self._steps.append(Step(point, inputs, a.output))
                self._needed.update(at for at in inputs if at is not None)
        self._steps.reverse()
        self._reads = reads(self._steps, {self._output})
        if not (self._needed & ({trace.parameters[name] for name in batch.parameters} | covered.keys())):
            raise InputError(f"{WHO}: none of the parameters has an effect on the output; the module does not use them")

    @contextmanager
    def _at_the_point(self) -> Iterator[None]:
        with self._batch.at() if self.fallbacks else nullcontext(), torch.no_grad(), full_precision():
            yield

    def _rows(self, rows: Tensor) -> Tensor:
        """Push forward: (S, P) to (S, outputs)."""
        return self._swept(self._push, rows)

    def _swept(self, sweep: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return the rows that a sweep maps some rows to, a chunk at a time."""
        with self._at_the_point():
            products = torch.cat([sweep(part) for part in rows.split(self.block_size)])
        if not bool(torch.isfinite(products).all()) and bool(torch.isfinite(rows).all()):
            place = origin_of_any([self._batch])
            raise InputError(f"{WHO}: products with the Jacobian are NaN or infinite{place}. {REMEDY}")
        return products

    def _push(self, rows: Tensor) -> Tensor:
        tangents: dict[int, Tangents] = {}
        for name, at in self._ids.items():
            tangents[at] = rows[:, self.slices[name]].reshape(-1, *self._shapes[name])
        push(self._steps, tangents, *self._reads)
        return dense(tangents[self._output]).reshape(len(rows), -1)

    def pull(self, rows: Tensor) -> Tensor:
        """Return J^T times covectors, as rows: (S, outputs) to (S, P)."""
        return self._swept(self._pull, rows)

    def _pull(self, rows: Tensor) -> Tensor:
        bars = self._pulled(rows)
        out = rows.new_zeros(len(rows), self.shape[1])
        for name, at in self._ids.items():
            if at in bars:
                out[:, self.slices[name]] = bars[at].reshape(len(rows), -1)
        return out

    def _pulled(self, rows: Tensor, *arriving: Any) -> dict[int, Tensor]:
        """Return covectors pulled back to the parameters, by id; ``arriving`` as in :func:`~hessiankit.engine.sweep.pull`."""
        bars = {self._output: rows.reshape(-1, *self.output_shape)}
        pull(self._steps, bars, {}, {}, *arriving)
        return bars

    def sample_gradients(self, cotangents: Tensor) -> Tensor:
        """Return J_b^T c_b for each sample b along the first axis of the output: (B, P).

        With the gradients of the loss's terms with respect to the output, the gradients of the samples' own losses.

        Args:
            cotangents: c, of the output's shape.

        Raises:
            InputError: If it is not.
        """
        expected = (self.output_shape, self.torch_dtype)
        if (tuple(cotangents.shape), cotangents.dtype) != expected or not self.output_shape:
            seen = f"cotangents of shape {tuple(cotangents.shape)}, {cotangents.dtype}"
            raise InputError(f"{WHO}: {seen}; expected {expected[0]}, {expected[1]}, with samples first")
        samples = self.output_shape[0]
        gradients = []
        for block in torch.arange(samples, device=self.device).split(self.block_size):
            single = cotangents.new_zeros(len(block), *self.output_shape)
            single[torch.arange(len(block), device=self.device), block] = cotangents[block]
            gradients.append(self.pull(single.flatten(1)))
        return torch.cat(gradients)

    def _adjoint(self) -> TransposedJacobian:
        return TransposedJacobian(self)


class TransposedJacobian(TensorOperator):
    """J^T, (P, outputs); ``J.T`` of a :class:`JacobianOperator`."""

    def __init__(self, jacobian: JacobianOperator) -> None:
        super().__init__((jacobian.shape[1], jacobian.shape[0]), jacobian.torch_dtype, jacobian.device)
        self.jacobian, self.block_size = jacobian, jacobian.block_size

    def _rows(self, rows: Tensor) -> Tensor:
        return self.jacobian.pull(rows)

    def _adjoint(self) -> JacobianOperator:
        return self.jacobian


def _along_a_cotangent(outputs: Any, _target: Any) -> Tensor:
    """Return the inner product of the output with a fixed generic cotangent, whose gradient the handshake compares."""
    if not isinstance(outputs, Tensor):
        raise InputError(f"{WHO}: the module returns a {type(outputs).__name__}; wrap it so that it returns one tensor")
    # a plain sum is constant behind a softmax or a normalisation, and compares nothing there
    numbers = torch.arange(outputs.numel(), device=outputs.device) % PERIOD
    return (outputs * numbers.float().cos().to(outputs.dtype).reshape(outputs.shape)).sum()


@checked(WHO)
@one_at_a_time
def jacobian_operator(module: nn.Module, inputs: Any, *, params: Params = None, handshake: bool = True) -> JacobianOperator:
    """Return the Jacobian of ``module(inputs)`` with respect to the parameters as a linear operator; ``.T`` is its transpose.

    Arguments are those of :func:`hessiankit.hessian`, with one batch, whole parameters, and a module that returns one tensor.

    Args:
        handshake: Compare the inner product of the output with a fixed cotangent, and its gradient, with those of the module's
            own call first.

    Raises:
        InputError: If an argument cannot be used, or the output is not one tensor.
        TraceError: If torch cannot trace the module.

    The Jacobian of a linear layer is X (x) I, known by hand:

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> J = jacobian_operator(layer, torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64))
    >>> J.to_matrix().tolist(), (J.T @ torch.tensor([1.0, 1.0], dtype=torch.float64)).tolist()
    ([[1.0, 0.0], [1.0, 2.0]], [2.0, 2.0])
    """
    return JacobianOperator(read_request(module, inputs, 0, loss=_along_a_cotangent, params=params, handshake=handshake).only())
